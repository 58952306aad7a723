"""What a door knows again is bounded in bytes, over all of its sessions, and what is of use stays."""

from __future__ import annotations

from typing import Any

import pytest

from hrl.serve.history import Chats, Memory, Texts
from hrl.serve.sessions import Conversation, Limits, Sessions


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_what_is_known_is_found_by_its_messages_and_setting():
    chats: Chats[str] = Chats()
    asked = [{"role": "user", "content": "a"}]
    chats.add(asked, ["tools"], said("b"), "known", 3)
    on = [*asked, said("b"), {"role": "user", "content": "c"}]
    assert chats.longest(on, ["tools"]) == (2, "known")
    assert chats.longest(on, []) is None
    assert chats.longest([*asked, said("other"), on[-1]], ["tools"]) is None
    assert chats.longest(on[:2], ["tools"]) is None, "an answer is asked for behind the last known one"
    chats.add(on, ["tools"], said("d"), "more", 5)
    assert chats.longest([*on, said("d"), asked[0]], ["tools"]) == (4, "more")


def test_what_was_asked_for_longest_ago_makes_room_whoever_it_is_of():
    memory = Memory(3500)  # three short ones
    one, other = Texts[int](memory), Texts[int](memory)
    for number, (texts, text) in enumerate([(one, "a"), (other, "b"), (other, "c")]):
        texts.add(text, [number], number)
    assert one.longest("a!") is not None
    one.add("d", [3], 3)
    assert other.longest("b!") is None, "it makes room"
    assert [texts.longest(text) is not None for texts, text in ((one, "a"), (other, "c"), (one, "d"))] == [True] * 3
    assert 0 < memory.num_bytes <= 3500


@pytest.mark.parametrize("long", ["tokens", "messages", "text"])
def test_long_ones_are_fewer(long: str):
    memory = Memory(100_000)
    chats, texts = Chats[int](memory), Texts[int](memory)
    for number in range(50):
        if long == "text":
            texts.add(f"{number}" + "x" * 10_000, [1], number)
        else:
            messages = [{"role": "user", "content": f"{number}"}] * (30 if long == "messages" else 1)
            chats.add(messages, [], said(""), number, 1000 if long == "tokens" else 1)
    kept = len(chats._known) + len(texts._known)
    assert 1 <= kept <= 3 and len(memory._known) == kept


def test_what_is_larger_than_all_there_is_room_for_is_not_known():
    memory = Memory(2000)
    texts = Texts[int](memory)
    texts.add("a", [], 0)
    before = memory.num_bytes
    texts.add("x" * 1000, [], 1)
    assert texts.longest("x" * 1000) is None
    assert texts.longest("ab") is not None and memory.num_bytes == before, "and takes no room from others"


def test_texts_of_a_session_are_so_few_that_all_can_be_looked_at(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hrl.serve.history._MOST_TEXTS", 2)
    memory = Memory()
    texts = Texts[int](memory)
    for text in "abac":
        texts.add(text, [1], 1)
    assert [texts.longest(text) is not None for text in "abc"] == [True, False, True]
    assert len(memory._known) == 2


def test_a_later_answer_of_the_same_words_takes_the_place_and_counts_once():
    memory = Memory()
    texts = Texts[int](memory)
    texts.add("a", [1], 1)
    before = memory.num_bytes
    texts.add("a", [2], 2)
    found = texts.longest("ab")
    assert found is not None and found.value == 2 and memory.num_bytes == before


def test_a_session_that_goes_is_forgotten_and_all_share_one_bound():
    ended: list[str] = []
    sessions = Sessions("hrl-key", Limits(), most=2, on_end=lambda session: ended.append(session.name))
    first, second = (sessions.of("Bearer hrl-key", name) for name in "ab")
    first.texts.add("x", [1], Conversation())
    assert first.memory is second.memory and first.memory.num_bytes > 0
    sessions.of("Bearer hrl-key", "c")
    assert ended == ["a"] and first.memory.num_bytes == 0 and first.texts.longest("x") is None
