"""Score answers to reasoning-gym tasks with the task's own scorer, without running code from the model.

Some of those scorers pass the model's answer to `eval`, or to sympy's `parse_expr`, which also evaluates. For these
datasets an answer must first match a grammar that only allows numbers, literals or formulas; any other answer scores 0
without reaching the scorer.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hrl.data.tasks.answer_format import TAGS, AnswerFormat, format_of_row
from hrl.data.tasks.reasoning_gym import DATA_SOURCE_PREFIX, create_dataset
from hrl.reward.scorers.answer_format import read_answer, with_credit
from hrl.reward.scorers.base import Reward, RowError, Scorer
from hrl.reward.scorers.math_equal import limited_cpu

_ARITHMETIC = re.compile(r"[0-9+\-*/().\s]{1,200}")
_FORMULA = re.compile(r"[0-9A-Za-z+\-*/().\s]{1,1000}")
_FORMULA_NAMES = frozenset({"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "exp", "log", "sqrt"})
_ATTRIBUTE = re.compile(r"[A-Za-z)]\s*\.|\.\s*[A-Za-z(]")
_SMALL_POWER = re.compile(
    r"\*\*\s*(?:-?[0-9]{1,2}|[A-Za-z]|\(\s*-?[0-9]{1,2}(?:\s*/\s*[0-9]{1,2})?\s*\))(?![0-9A-Za-z]|\s*\*\*)"
)
_LARGE = re.compile(r"[0-9.]\s*[eE]\s*[-+]?\s*[0-9]{3,}|[0-9]{61,}")
"""A number that sympy writes out: `1e999999999` keeps it busy for ever."""
_WORDS = re.compile(r"[A-Za-z0-9_\s]*")
_UNREADABLE_ANSWER = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def is_arithmetic(answer: str) -> bool:
    """Return whether an answer has only digits, the four operations and brackets; no `**`, which could run for ever."""
    return _ARITHMETIC.fullmatch(answer) is not None and "**" not in answer


def is_formula(answer: str) -> bool:
    """Return whether an answer has only numbers, operators, one-letter variables, basic functions and small powers.

    Numbers are of at most 60 digits, and powers of ten of at most two.
    """
    return (
        _FORMULA.fullmatch(answer) is not None
        and _ATTRIBUTE.search(answer) is None
        and _LARGE.search(answer) is None
        and all(len(name) == 1 or name in _FORMULA_NAMES for name in re.findall(r"[A-Za-z]+", answer))
        and len(_SMALL_POWER.findall(answer)) == answer.count("**")
    )


def is_literal_or_words(answer: str) -> bool:
    """Return whether an answer is a literal such as `["A", "B"]` or plain words, which can't call anything."""
    if _WORDS.fullmatch(answer):
        return True
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


GRAMMARS: dict[str, Callable[[str], bool]] = {
    "countdown": is_arithmetic,
    "puzzle24": is_arithmetic,
    "simple_integration": is_formula,
    "intermediate_integration": is_formula,
    "polynomial_multiplication": is_formula,
    "string_insertion": is_literal_or_words,
    "spiral_matrix": is_literal_or_words,
    "binary_matrix": is_literal_or_words,
    "n_queens": is_literal_or_words,
}
"""Datasets whose scorers evaluate the answer. A test compares this with the source of the installed package."""

SAME_WORD = frozenset({"game_of_life_halting"})
"""Datasets whose answers are compared as text, because their scorers pay any text: they compare `bool("False")`, which
is true, with `bool("True")`."""


@dataclass(frozen=True)
class Task:
    """The task that an answer is scored by.

    Attributes:
        dataset: The dataset of reasoning-gym, which has the scorer.
        entry: The dataset's entry for this row.
        allows: Returns whether an answer may reach the dataset's scorer; None if any may.
        form: How the answer was asked for.
        credit: Score of a wrong answer in that format.
    """

    dataset: Any
    entry: dict[str, Any]
    allows: Callable[[str], bool] | None
    form: AnswerFormat = TAGS
    credit: float = 0.0


def read_task(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Task:
    """Return the task of a row.

    Raises:
        ValueError: The row was not made by a dataset of reasoning-gym.
    """
    if not isinstance(extra_info, Mapping) or "parameters" not in extra_info:
        raise ValueError(f"extra_info of a {data_source} row has no 'parameters': it was not made by reasoning_gym:…")
    if not isinstance(ground_truth, Mapping):
        raise ValueError(
            f"ground truth of a {data_source} row is not an entry of a dataset, but {str(ground_truth)[:80]!r}"
        )
    name = data_source.removeprefix(DATA_SOURCE_PREFIX)
    dataset = _dataset(name, json.dumps(extra_info["parameters"], sort_keys=True))
    allows = GRAMMARS.get(name)
    if name in SAME_WORD:
        right = str(ground_truth.get("answer")).casefold()
        allows = lambda answer: answer.casefold() == right  # noqa: E731
    return Task(dataset, dict(ground_truth), allows, *format_of_row(extra_info, TAGS))


def score(text: str, task: Task) -> Reward:
    """Score the answer in `text`.

    A format with a credit gives it for any answer in the format, and the rest of 1 by the task's own score; both are
    parts of the reward then, `format` and `correct`.
    """
    answer = read_answer(text, task.form, task.entry.get("answer"))
    correct = 0.0 if answer is None else score_answer(answer, task)
    return correct if task.credit == 0 else with_credit(correct, answer is not None, task.credit)


def score_answer(answer: str, task: Task) -> float:
    """Return the task's own score of an answer, 0 to 1; 0 if the right answer has other text around it.

    An answer that the scorer fails on scores 0, provided that the scorer handles the row's own answer.

    Raises:
        RowError: The row's own answer can't be scored either.
    """
    if task.allows is not None and not task.allows(answer):
        return 0.0
    try:
        with limited_cpu():
            value = float(task.dataset.score_answer(answer, dict(task.entry)))
    except _UNREADABLE_ANSWER:
        _check_right_answer(task)
        return 0.0
    return 0.0 if _is_paid_for_containing(answer, task.entry.get("answer"), value) else value


def _check_right_answer(task: Task) -> None:
    try:
        task.dataset.score_answer(task.entry["answer"], dict(task.entry))
    except _UNREADABLE_ANSWER as error:
        raise RowError(f"the row's own answer can't be scored either: {type(error).__name__}: {error}") from error


def _is_paid_for_containing(answer: str, right: Any, value: float) -> bool:
    """Return whether a score is the partial reward for containing the right answer, e.g. 1/3 for "4" in "3 4"."""
    if not isinstance(right, str):
        return False
    spellings = [(right, answer), (right.replace(",", ""), answer.replace(",", ""))]  # some scorers leave commas out
    return any(r != a and r in a and math.isclose(value, len(r) / len(a)) for r, a in spellings)


def _import() -> None:
    import reasoning_gym  # noqa: F401


@lru_cache(maxsize=32)
def _dataset(name: str, parameters: str) -> Any:
    return create_dataset(name, json.loads(parameters))


REASONING_GYM = Scorer(
    "the dataset's own rule for the answer",
    read_task,
    score,
    load=_import,
    answer=lambda text, task: read_answer(text, task.form, task.entry.get("answer")),
)
