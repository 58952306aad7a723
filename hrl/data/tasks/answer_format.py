"""How the answer to a built-in task is asked for and written: `answer=plain`, `tags` or `boxed` in its address."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from hrl.errors import DatasetError
from hrl.nearest import did_you_mean

ANSWER_FORMAT = "answer_format"
FORMAT_CREDIT = "format_credit"
"""Fields of a row's `extra_info`, for its scorer."""
_MOST_SHOTS = 8


@dataclass(frozen=True)
class AnswerFormat:
    r"""A way to write an answer.

    Attributes:
        name: As in the task's address.
        instruction: What the prompt says about it, behind the question.
        opening, closing: What stands around the answer.
        credit: Score of a wrong answer in this format, so that a model that does not know the format learns it first.
        shots: Solved examples before the question; without any, a small model never writes tags.
        reads: What the scorer reads as the answer, for the catalogue.
    """

    name: str
    instruction: str
    opening: str
    closing: str
    credit: float
    shots: int
    reads: str

    def write(self, answer: object) -> str:
        """Return a response that has the answer in this format."""
        return f"{self.opening}{answer}{self.closing}"


PLAIN = AnswerFormat(
    "plain", "Give the final answer only.", "", "", 0.0, 0, "what the response states as its answer, else all of it"
)
TAGS = AnswerFormat(
    "tags",
    "Write your final answer between <answer> and </answer>.",
    "<answer>",
    "</answer>",
    0.1,
    2,
    "the text in <answer>…</answer>",
)
BOXED = AnswerFormat(
    "boxed", r"Write your final answer in \boxed{}.", r"\boxed{", "}", 0.1, 2, r"the text in \boxed{…}"
)

FORMATS: Mapping[str, AnswerFormat] = {one.name: one for one in (PLAIN, TAGS, BOXED)}
"""Name → format; the first is the default of every task."""


def chat(
    question: str, form: AnswerFormat, shown: Sequence[tuple[str, object]] = (), *, separator: str = "\n\n"
) -> list[dict[str, str]]:
    """Return the prompt of a question as a chat, after solved examples.

    Args:
        question: What is asked.
        form: How the answer is to be written.
        shown: Examples: a question and its answer each.
        separator: What stands between the question and the instruction.
    """
    turns = []
    for asked, answer in shown:
        turns.append({"role": "user", "content": f"{asked}{separator}{form.instruction}"})
        turns.append({"role": "assistant", "content": form.write(answer)})
    return [*turns, {"role": "user", "content": f"{question}{separator}{form.instruction}"}]


def format_info(form: AnswerFormat, credit: float) -> dict[str, Any]:
    """Return what a row's `extra_info` says of its format, for its scorer."""
    return {ANSWER_FORMAT: form.name, FORMAT_CREDIT: credit}


def format_of_row(extra_info: Mapping[str, Any], default: AnswerFormat) -> tuple[AnswerFormat, float]:
    """Return a row's format and its credit.

    Args:
        extra_info: Of the row.
        default: The format of rows that name none, as those of earlier versions.

    Raises:
        ValueError: There is no such format.
    """
    name = str(extra_info.get(ANSWER_FORMAT, default.name))
    if name not in FORMATS:
        raise ValueError(f"extra_info.{ANSWER_FORMAT} is {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name], float(extra_info.get(FORMAT_CREDIT, 0.0))


# ---------------------------------------------------------------------- the options of an address


def options_in(query: str, address: str) -> dict[str, Any]:
    """Read `size=10&answer=tags`; values are JSON or plain strings.

    Raises:
        DatasetError: It is not of this form.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        raise DatasetError(f"{address!r} does not end in ?name=value&name=value: {error}") from error
    return {name: _value(text) for name, text in pairs}


def take_format(options: dict[str, Any], address: str) -> tuple[AnswerFormat, float]:
    """Take `answer` and `format_credit` out of the options of an address.

    Raises:
        DatasetError: There is no such format, or the credit is no number from 0 up to, but not including, 1.
    """
    name = str(options.pop("answer", PLAIN.name))
    if name not in FORMATS:
        hint = did_you_mean(name, FORMATS, f"There are {', '.join(FORMATS)}.")
        raise DatasetError(f"answer={name} in {address!r} is no way to write an answer. {hint}")
    credit = options.pop("format_credit", FORMATS[name].credit)
    if isinstance(credit, bool) or not isinstance(credit, int | float) or not 0 <= credit < 1:
        raise DatasetError(f"format_credit={credit} in {address!r} must be a number from 0 to below 1, e.g. 0.1")
    return FORMATS[name], float(credit)


def take_shots(options: dict[str, Any], form: AnswerFormat, address: str) -> int:
    """Take the number of solved examples out of the options of an address.

    Raises:
        DatasetError: It is no number from 0 to `_MOST_SHOTS`.
    """
    shots = options.pop("shots", form.shots)
    if isinstance(shots, bool) or not isinstance(shots, int) or not 0 <= shots <= _MOST_SHOTS:
        raise DatasetError(f"shots={shots} in {address!r} must be a number from 0 to {_MOST_SHOTS}")
    return shots


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
