"""Read the answer of a built-in task in the format that it was asked for, and give credit for the format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hrl.data.tasks.answer_format import BOXED, PLAIN, TAGS, AnswerFormat, format_of_row
from hrl.reward.scorers.base import Reward, Scorer, only
from hrl.reward.scorers.final_answer import after_thinking, boxed_answers, stated_answers, tagged_answers
from hrl.reward.scorers.numbers import as_number, final_number

_AROUND = frozenset(" \t\r\n*_`\"'")


def read_answer(text: str, form: AnswerFormat, right: Any) -> str | None:
    """Return the one answer in a response; None if it has none in this format, an empty one, or several.

    Args:
        text: The response.
        form: How the answer was asked for. In `plain`, tags, a box or a sentence such as "The answer is …" also show
            what the answer is; failing those it is the number that the text concludes with, where the right answer is
            a number, and else the whole text.
        right: The right answer, of which only the kind is used, and whether it is empty.
    """
    text = after_thinking(text)
    if form is TAGS or form is BOXED:
        answer = only(tagged_answers(text) if form is TAGS else boxed_answers(text))
        # Credit for a format would be paid for `\boxed{}`, which is less work than any answer.
        return answer if answer or right == "" else None
    marked = tagged_answers(text) or boxed_answers(text)
    if marked:
        return only(marked)
    if isinstance(right, str) and str(as_number(right)) == right:
        number = final_number(text)
        return None if number is None else str(number)
    stated = stated_answers(text)
    return only(stated) if stated else _whole(text, right)


def with_credit(correct: float, is_in_format: bool, credit: float) -> Reward:
    """Return a reward of which `credit` is for the format and the rest for the answer, with both as parts."""
    share = credit + (1 - credit) * correct if is_in_format else 0.0
    return {"score": share, "correct": correct, "format": float(is_in_format)}


def in_format(scorer: Scorer) -> Scorer:
    """Return a scorer for rows that say how their answer is to be written; `scorer` gets the answer alone.

    Rows in `plain`, and those that say nothing, are left to `scorer`, whose rewards are plain numbers.
    """

    def read_truth(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> _Asked:
        form, credit = format_of_row(extra_info, PLAIN)
        return _Asked(scorer.read_truth(data_source, ground_truth, extra_info), ground_truth, form, credit)

    def score(text: str, asked: _Asked) -> Reward:
        if asked.form is PLAIN:
            return scorer.score(text, asked.truth)
        answer = read_answer(text, asked.form, asked.right)
        correct: Any = 0.0 if answer is None else scorer.score(answer, asked.truth)
        return with_credit(correct, answer is not None, asked.credit)

    def answer(text: str, asked: _Asked) -> str | None:
        found = text if asked.form is PLAIN else read_answer(text, asked.form, asked.right)
        return None if found is None or scorer.answer is None else scorer.answer(found, asked.truth)

    return replace(scorer, read_truth=read_truth, score=score, answer=answer)


class _Asked(NamedTuple):
    truth: Any
    right: Any
    form: AnswerFormat
    credit: float


def _whole(text: str, right: Any) -> str | None:
    """Return a whole text as an answer, without a full stop and other marks around it that the right answer lacks."""
    around = "".join(sorted(_AROUND - set(str(right)))) + " \n"
    answer = text.strip(around)
    if answer.endswith(".") and not str(right).endswith("."):
        answer = answer[:-1].rstrip(around)
    return answer or None
