"""Steps of an answer, by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hrl.data.steps import StepMarks, mark_id, step_ends, tokens_at, with_step_tokens, word_id
from tests.trainer.ppo.test_reward_model_rows import tokenizer_of


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


def test_marks_and_words_are_tokens_as_the_tokenizer_writes_them() -> None:
    tokenizer = tokenizer_of("a + b + c ки", None)
    ids = tokenizer.get_vocab()
    assert (mark_id(tokenizer, "<s>"), word_id(tokenizer, "+"), word_id(tokenizer, " +")) == (
        ids["<s>"],
        ids["+"],
        ids["Ġ+"],
    )
    assert mark_id(tokenizer, " <s>") == ids["<s>"]  # the space is written, and the token read
    assert mark_id(tokenizer, "ab") is None and word_id(tokenizer, "+-") is None and mark_id(tokenizer, " ") is None
    marks = StepMarks.of(tokenizer, " <s>", "\n", ["+", "-"])
    assert (marks.token_id, marks.reward_ids) == (ids["<s>"], (ids["+"], ids["-"]))
    assert marks.hide("1 <s> 2<s>") == "1     2   "
    with pytest.raises(ValueError, match="tokens"):
        StepMarks.of(tokenizer, "<s>", "\n", ["+", "-+"])
