"""Steps of an answer, by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from hrl.data.steps import step_ends, tokens_at, with_step_tokens


def text_of(tokens: Sequence[str]) -> Callable[[Sequence[int]], str]:
    return lambda ids: "".join(tokens[place] for place in ids)


def test_a_step_ends_behind_its_last_character_that_is_no_space() -> None:
    text = "7 + 5\n\n= 12 \n\n\n\nDone"
    ends = step_ends(text, "\n\n")
    assert [text[:end] for end in ends] == ["7 + 5", "7 + 5\n\n= 12", text]
    assert with_step_tokens(text, ends, "<s>") == "7 + 5<s>\n\n= 12<s> \n\n\n\nDone<s>"
    assert (step_ends("", "\n\n"), step_ends(" \n\n ", "\n\n"), step_ends("one", "\n\n")) == ([], [], [3])
    assert with_step_tokens("", [], "<s>") == "" and with_step_tokens("one \n", [3], "<s>") == "one<s> \n"


def test_a_step_ends_at_the_token_that_reaches_its_end() -> None:
    tokens = ["7 +", " 5\n\n=", " 1", "2"]  # the second one holds the end of a step and the beginning of the next
    ends = step_ends("7 + 5\n\n= 12", "\n\n")
    assert ends == [5, 11] and tokens_at(ends, range(4), text_of(tokens)) == [1, 3]
    # A special token has no text: the step ends before it.
    ended = [*tokens, ""]
    assert tokens_at([11], range(5), text_of(ended)) == [3]


@given(st.lists(st.text("ab\n ", max_size=4), min_size=1))
def test_every_step_ends_at_the_first_token_with_all_of_it(tokens: list[str]) -> None:
    text = "".join(tokens)
    ends = step_ends(text, "\n\n")
    for end, place in zip(ends, tokens_at(ends, range(len(tokens)), text_of(tokens)), strict=True):
        assert len("".join(tokens[: place + 1])) >= end > len("".join(tokens[:place]))
