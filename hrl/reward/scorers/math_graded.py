"""Grade mathematical answers as PRM800K does (Lightman et al. 2023, arXiv:2305.20050, code of the paper).

verl's functions for Numina's problems (through PRIME, Cui et al. 2025, arXiv:2502.01456) and for geometry3k (through
mathruler) are built on it.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

from hrl.reward.scorers.base import Scorer, all_right
from hrl.reward.scorers.final_answer import after_thinking, boxed_answers, explicit_answers
from hrl.reward.scorers.math_equal import (
    LONGEST_ANSWER,
    LONGEST_DIGITS,
    AnswerTooComplexError,
    MathTruth,
    answer_in_normal_form,
    equal_by_value,
    is_worked_out,
    limited_cpu,
    load,
    parse_answer,
    parse_bounded,
    read_truth,
)
from hrl.reward.scorers.math_text import boxed_in_normal_form, math_form, replaced

_INTEGER = re.compile(r"-?[0-9]+")
_FRACTION = re.compile(r"-?[0-9]+/[0-9]+")
_DECIMAL = re.compile(r"(-?)0*([0-9]*)(?:\.([0-9]*))?")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_SPELLINGS = (
    *(("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , "), ("{,}", ",")),
    *(("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12"), ("\\tfrac", "\\frac"), ("\\dfrac", "\\frac")),
)
_UNIT = re.compile(
    r"(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard|liter)(?:es)?s?"
    r" *(?:\^[0-9]+)?"
)
_NOT_COMPUTED = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]|,")
_EXACT_DECIMALS = 12
_CLOSE = 1e-4
_GEOMETRY_FORMAT = ("</think>", "\\boxed{", "}")
_GEOMETRY_FORMAT_WEIGHT = 0.1


def graded_equal(truth: MathTruth, answer: str) -> bool:
    """Return whether an answer is the truth: the same text in normal form, or a difference of 0.

    Whole numbers must be written as such, fractions reduced, and tuples or intervals in the truth's brackets.

    Raises:
        AnswerTooComplexError: The comparison would exceed the bounds.
    """
    if len(answer) > LONGEST_ANSWER:
        raise AnswerTooComplexError(f"an answer of {len(answer)} characters is too long to grade")
    if math_form(answer) == truth.form:
        return True
    wanted, given = graded_form(truth.text), graded_form(answer)
    if not given:
        return False
    wanted_parts, given_parts = _tuple_parts(wanted), _tuple_parts(given)
    if len(wanted_parts) != len(given_parts):
        return False
    if len(wanted_parts) > 1 and (wanted[0], wanted[-1]) != (given[0], given[-1]):
        return False
    return all(_is_equal_part(*pair) for pair in zip(wanted_parts, given_parts, strict=True))


def graded_form(answer: str) -> str:
    """Return PRM800K's normal form: without units, money and percent signs, in lower case, whole numbers as such."""
    if (text := re.fullmatch(r"\\text\{(.+?)\}", answer)) is not None:
        answer = text.group(1)
    answer = replaced(answer, _SPELLINGS)
    answer = re.sub(r"\^ *(?:\\circ|\{\\circ\})", "", _UNIT.sub("", answer)).strip()
    if answer.startswith("{") and answer.endswith("}"):
        answer = answer[1:-1]
    answer = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r" \1/\2", re.sub(r",\\! *", "", answer))
    answer = re.sub(r"([0-9]) +([0-9])", r"\1+\2", re.sub(r"- *", "-", answer)).replace(" ", "").lower()
    plain = answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer
    if len(plain) > LONGEST_DIGITS or (number := _DECIMAL.fullmatch(plain)) is None or not plain.strip("-."):
        return answer
    sign, whole, rest = number.groups()
    return f"{sign}{whole or '0'}" + (f".{rest}" if rest and rest.strip("0") else "")


def _tuple_parts(text: str) -> list[str]:
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not re.search(r"[()\[\]]", text[1:-1]):
        return [graded_form(part) for part in text[1:-1].split(",")]
    return [text]


def _is_equal_part(wanted: str, given: str) -> bool:
    if wanted == given:
        return True
    whole = [_INTEGER.fullmatch(text) is not None for text in (wanted, given)]
    if whole[0] != whole[1] or all(whole) or all(_FRACTION.fullmatch(text) for text in (wanted, given)):
        return False
    # Not compared by value: lists, high or bracketed powers, and more than two letters, which may be words.
    both = wanted + given
    letters = set(re.sub(r"sqrt|frac", "", both)) & set("abcdefghijklmnopqrstuvwxyz")
    if len(letters) > 2 or _NOT_COMPUTED.search(both):
        return False
    return equal_by_value(MathTruth(wanted, parse_bounded(wanted) or ()), given, _EXACT_DECIMALS)


def is_close(truth: MathTruth, answer: str) -> bool:
    """Return whether numbers are equal by PRIME's tolerance: within 0.01 %, and shares equal to percentages.

    Raises:
        AnswerTooComplexError: The comparison would exceed the bounds.
    """
    wanted, given = _value(truth.parsed), _value(parse_answer(re.sub(r"\\?%", "", answer)))
    if wanted is None or given is None:
        return False
    both_plain = all(re.fullmatch(r"[-0-9.,\\%$ ]*", text) for text in (truth.text, answer))
    factors = (0.01, 1.0, 100.0) if both_plain else (1.0,)
    return any(math.isclose(wanted * factor, given, rel_tol=_CLOSE) for factor in factors)


def _value(parsed: tuple[Any, ...]) -> float | None:
    """Return the value of an expression as a real number; None if it isn't one."""
    from sympy import Expr

    if not parsed or not isinstance(parsed[0], Expr) or parsed[0].free_symbols:
        return None
    with limited_cpu():
        value = parsed[0].evalf()
    return float(value) if value.is_Float or value.is_Integer else None


def _score_numina(text: str, truth: MathTruth) -> float:
    def is_right(answer: str) -> bool:
        return _is_right(truth, answer) and is_worked_out(truth, answer)

    return all_right(explicit_answers(after_thinking(text)), is_right)


def _is_right(truth: MathTruth, answer: str) -> bool:
    if graded_equal(truth, answer) or _without_brackets(truth.text) == _without_brackets(answer):
        return True
    return is_close(truth, answer) or equal_by_value(truth, answer, _EXACT_DECIMALS)


def _without_brackets(text: str) -> str:
    return re.sub(r"[{}() ]", "", text)


def _score_geometry(text: str, truth: MathTruth) -> dict[str, float]:
    accuracy = all_right(boxed_answers(after_thinking(text)), lambda box: graded_equal(truth, box))
    form = float(text.startswith("<think>") and _in_order(text, _GEOMETRY_FORMAT))
    return {"score": (1.0 - _GEOMETRY_FORMAT_WEIGHT) * accuracy + _GEOMETRY_FORMAT_WEIGHT * form, "acc": accuracy}


def _in_order(text: str, marks: tuple[str, ...]) -> bool:
    """Return whether `text` has all marks in this order, in linear time, unlike a pattern with `.*`."""
    position = 0
    for mark in marks:
        found = text.find(mark, position)
        if found < 0:
            return False
        position = found + len(mark)
    return True


NUMINA = Scorer(
    "the value of the box or of the stated answer, to 0.01 %",
    read_truth,
    _score_numina,
    load=load,
    answer=answer_in_normal_form,
)
GEOMETRY = Scorer(
    "0.9 for the box, graded as PRM800K does, and 0.1 for <think>…</think> before it",
    read_truth,
    _score_geometry,
    wrong={"score": 0.0, "acc": 0.0},
    load=load,
    answer=partial(boxed_in_normal_form, longest=LONGEST_ANSWER),
)
