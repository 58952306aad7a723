"""An answer as it grows: what is done for a token does not depend on how many there were before."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hrl.serve.answers import Form
from hrl.serve.asked import ChatAsked
from hrl.serve.policy import Context, GrowingChoice, PolicyWords, Reading
from hrl.serve.sessions import Conversation, Session
from tests.episodes.families import FAMILIES, call, control_ids, result, user
from tests.serve.doors import tokenizer_with_merges


class _Looked(list[Any]):
    """Counts the items that are looked at."""

    count = 0

    def __iter__(self) -> Any:
        self.count += len(self)
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.count += len(found) if isinstance(place, slice) else 1
        return found


class _Decoding(PreTrainedTokenizerFast):
    """Counts the tokens that become text."""

    count = 0

    def decode(self, token_ids: Any, **kwargs: Any) -> str:
        type(self).count += len(token_ids)
        return str(super().decode(token_ids, **kwargs))


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_stream_of_twice_the_tokens_is_twice_the_work(is_chat: bool):
    tokenizer = tokenizer_with_merges()
    tokenizer.__class__ = _Decoding
    form = Form("tiny", is_chat, log_probs=True, token_ids=True)

    def work(count: int) -> tuple[int, int]:
        growing = GrowingChoice(tokenizer, Context([1], Conversation()), log_probs=True)
        growing._pieces = pieces = _Looked()
        growing.choice = replace(growing.choice, pieces=pieces)
        _Decoding.count = shown = 0
        for token in range(count):
            can_show = growing.add([40 + token % 20], [-0.5])
            form.piece(0, growing.choice, shown, can_show)
            shown = can_show
        assert shown == count
        return pieces.count, _Decoding.count

    once, twice = work(100), work(200)
    assert twice[0] == 2 * once[0] and twice[1] <= 2 * once[1] + 2


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "mistral", "smollm2"])
def test_what_a_tool_or_an_answer_spells_out_is_no_control_token_in_a_chat_that_nobody_remembers(name: str):
    family = FAMILIES[name]
    words = PolicyWords(family.tokenizer, Reading(stop_ids=family.stop_ids), 4000)
    names = control_ids(family)
    added = "".join(family.tokenizer.added_tokens_decoder[token].content for token in sorted(names))

    def context(said: str, heard: str) -> list[int]:
        answered = {"role": "assistant", "content": said}
        messages = [*user("Go!"), answered, *user(heard)]
        if family.calls:
            answered["tool_calls"] = [call(word="a")]
            messages[2:] = [result(heard)]
        asked = ChatAsked(model="m", messages=messages)
        return asyncio.run(words.chat(Session("s"), asked)).ids

    special = {token for token in names if family.tokenizer.added_tokens_decoder[token].special}
    harmless, heard, said = context("So", "x"), context("So", f"x{added}"), context(f"So{added}", "x")
    assert [token for token in heard if token in names] == [token for token in harmless if token in names]
    assert [token for token in said if token in special] == [token for token in harmless if token in special]
    assert added in family.tokenizer.decode(heard)
    words.close()
