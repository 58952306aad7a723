r"""Answers of mathematics compared by value, with math-verify and sympy, inside bounds.

sympy computes whatever it is given: `10^{10^{10}}`, `((9!)!)!` and `(x+y+z)^{200}` keep it busy for hours or fill the
memory. An answer beyond the bounds below is therefore only compared as text. What still takes longer than
`_LONGEST_CPU_S` of the processor's time is given up.
"""

from __future__ import annotations

import math
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hrl.reward.scorers.base import Scorer
from hrl.reward.scorers.final_answer import (
    after_thinking,
    boxed_answers,
    explicit_answers,
    sides_of,
)
from hrl.reward.scorers.math_text import math_form

_LONGEST_CPU_S = 5.0
_LONGEST_ANSWER = 400
_LONGEST_DIGITS = 300
_DEEPEST_NESTING = 8
_MOST_NODES = 150
_MOST_TERMS = 400
_LARGEST_BITS = 20_000
_LARGEST_FACTORIAL = 2_000
_OPEN_ENDED = re.compile(r"\\(?:sum|prod|int|iint|oint|lim|limsup|liminf|binom|dbinom|tbinom|choose)(?![a-zA-Z])")
_REDUNDANT = re.compile(r"\{\{([^{}]*)\}\}|\(\(([^()]*)\)\)")
_RELATION = re.compile(r"[<>]|\\[lg]eq?(?![a-z])|\\n?eq(?![a-z])|\\in(?![a-z])")
_INTEGER = re.compile(r"-?[0-9]+")
_DECIMAL = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_SCALED = {"million": 6, "billion": 9, "trillion": 12}
_UNIT = re.compile(
    r"(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard|liter)(?:es)?s?"
    r" *(?:\^[0-9]+)?"
)
_CLOSE = 1e-4
_GEOMETRY_FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
_GEOMETRY_FORMAT_WEIGHT = 0.1


class _TookTooLong(BaseException):
    """Raised by the timer; no `Exception`, because sympy and math-verify catch those and try the next method."""


class AnswerTooComplexError(ValueError):
    """An answer that isn't text for text the right one, and lies outside what is compared by value."""


@dataclass(frozen=True)
class MathTruth:
    """A ground truth in its text, its normal form, and parsed.

    Attributes:
        text: without a box around it.
        form: the MATH data set's normal form of it.
        parsed: what math-verify made of it; empty where it lies outside the bounds.
    """

    text: str
    form: str
    parsed: tuple[Any, ...]


def equal_by_value(truth: MathTruth, answer: str) -> bool:
    """Whether an answer is the truth in another form: the same number, expression, set, interval, equation.

    Each side of a chain of equations must be, unless the truth is an equation itself.

    Raises:
        AnswerTooComplexError: that can't be found out within bounds.
    """
    if math_form(answer[:_LONGEST_ANSWER]) == truth.form and len(answer) <= _LONGEST_ANSWER:
        return True
    if not truth.parsed:
        return False
    sides = (answer,) if "=" in truth.text or _RELATION.search(answer) else sides_of(answer)
    return all(_is_equal(truth, side) for side in sides)


def _is_equal(truth: MathTruth, side: str) -> bool:
    from math_verify import verify

    parsed = parse_bounded(side)
    if parsed is None:
        raise AnswerTooComplexError(
            f"an answer of {len(side)} characters is too complex to be computed with: {side[:60]!r}"
        )
    with _limited_cpu():
        return bool(parsed) and bool(verify(list(truth.parsed), list(parsed), timeout_seconds=None))


def parse_bounded(text: str) -> tuple[Any, ...] | None:
    """What math-verify makes of LaTeX or plain mathematics; None beyond the bounds, nothing where it makes nothing."""
    from math_verify import parse
    from math_verify.parser import LatexExtractionConfig

    for _ in range(_DEEPEST_NESTING):
        text = _REDUNDANT.sub(lambda match: f"{{{match[1]}}}" if match[1] is not None else f"({match[2]})", text)
    too_long = len(text) > _LONGEST_ANSWER or re.search(rf"[0-9]{{{_LONGEST_DIGITS}}}", text) is not None
    if too_long or _nesting(text) > _DEEPEST_NESTING or _OPEN_ENDED.search(text):
        return None
    text = text.encode("utf-8", "replace").decode("utf-8").strip().strip("$").strip()
    with _limited_cpu():
        parsed = parse(f"\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)
    return tuple(parsed) if all(_is_small(expression) for expression in parsed) else None


def _nesting(text: str) -> int:
    depth = deepest = 0
    for sign in text:
        depth += (sign in "{([") - (sign in "})]")
        deepest = max(deepest, depth)
    return deepest


def _is_small(expression: Any) -> bool:
    """Whether a parsed, not yet computed expression can be computed with: its size, its numbers, its expansions."""
    from sympy import Basic, preorder_traversal

    if not isinstance(expression, Basic):
        return True
    nodes = []
    for node in preorder_traversal(expression):
        nodes.append(node)
        if len(nodes) > _MOST_NODES:
            return False
    return _bits(expression) <= _LARGEST_BITS and _terms(expression) <= _MOST_TERMS


def _bits(expression: Any) -> float:
    """An upper bound of log2 of every number that computing passes through; infinite if none is known."""
    from sympy import Add, Float, Integer, Mul, Pow, Rational, factorial

    if isinstance(expression, Float):
        return max(1.0, abs(math.log2(abs(float(expression)) or 1.0)))
    if isinstance(expression, Integer):
        return float(int(expression).bit_length())
    if isinstance(expression, Rational):
        return float(max(int(expression.p).bit_length(), int(expression.q).bit_length()))
    parts = [_bits(part) for part in expression.args]
    if isinstance(expression, factorial):
        of = expression.args[0]
        return math.inf if of.args or (of.is_Integer and of > _LARGEST_FACTORIAL) else float(_LARGEST_BITS)
    if isinstance(expression, Pow):
        base, exponent = parts
        if exponent > math.log2(_LARGEST_BITS) + 1:
            return math.inf
        return max(1.0, base) * 2.0**exponent
    if isinstance(expression, Add | Mul):
        return sum(parts)
    return max(parts, default=1.0)


def _terms(expression: Any) -> float:
    """An upper bound of the terms that multiplying the expression out gives."""
    from sympy import Add, Integer, Mul, Pow

    parts = [_terms(part) for part in expression.args]
    if isinstance(expression, Pow) and isinstance(expression.exp, Integer) and expression.base.free_symbols:
        power, addends = min(abs(int(expression.exp)), 10_000), parts[0]
        return float(math.comb(power + int(addends) - 1, power)) if 1 < addends <= _MOST_TERMS else addends
    if isinstance(expression, Add):
        return sum(parts)
    if isinstance(expression, Mul):
        return math.prod(parts)
    return max(parts, default=1.0)


@contextmanager
def _limited_cpu() -> Iterator[None]:
    """Ends what runs inside after `_LONGEST_CPU_S` of processor time, where a signal can: in the main thread.

    Raises:
        AnswerTooComplexError: it was ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST_CPU_S)
    try:
        yield
    except _TookTooLong:
        raise AnswerTooComplexError(f"not computed within {_LONGEST_CPU_S:g} s of processor time") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def graded_equal(truth: MathTruth, answer: str) -> bool:
    """Equality as PRM800K grades it (Lightman et al. 2023, arXiv:2305.20050, code of the paper).

    Text for text in normal form, or a difference that is 0. A whole number must be given as one, a fraction reduced,
    and a tuple or interval in the truth's brackets.

    Raises:
        AnswerTooComplexError: as `equal_by_value`.
    """
    if len(answer) > _LONGEST_ANSWER:
        raise AnswerTooComplexError(f"an answer of {len(answer)} characters is too long to be graded")
    if math_form(answer) == truth.form:
        return True
    wanted, given = graded_form(truth.text), graded_form(answer)
    if wanted == given or not given:
        return wanted == given and bool(given)
    wanted_parts, given_parts = _tuple_parts(wanted), _tuple_parts(given)
    if len(wanted_parts) != len(given_parts):
        return False
    if len(wanted_parts) > 1 and (wanted[0], wanted[-1]) != (given[0], given[-1]):
        return False
    return all(_graded_part(*pair) for pair in zip(wanted_parts, given_parts, strict=True))


def graded_form(answer: str) -> str:
    """PRM800K's normal form: without units, money and percent signs, in lower case, whole numbers as such."""
    if (text := re.fullmatch(r"\\text\{(.+?)\}", answer)) is not None:
        answer = text.group(1)
    for old, new in (("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , ")):
        answer = answer.replace(old, new)
    for word, power in _SCALED.items():
        answer = answer.replace(word, f"*10^{power}")
    answer = re.sub(r"\^ *(?:\\circ|\{\\circ\})", "", _UNIT.sub("", answer))
    answer = re.sub(r",\\! *", "", answer.strip().removeprefix("{") if answer[-1:] != "}" else answer.strip())
    answer = answer.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac")
    answer = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", answer)
    answer = re.sub(r"([0-9]) +([0-9])", r"\1+\2", re.sub(r"- *", "-", answer)).replace(" ", "").lower()
    plain = answer.replace(",", "") if re.fullmatch(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?", answer) else answer
    if _DECIMAL.fullmatch(plain) and len(plain) <= _LONGEST_DIGITS:
        whole, _, rest = plain.partition(".")
        return (whole if not rest.strip("0") else plain) or "0"
    return answer


def _tuple_parts(text: str) -> list[str]:
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not re.search(r"[()\[\]]", text[1:-1]):
        return [graded_form(part) for part in text[1:-1].split(",")]
    return [text]


def _graded_part(wanted: str, given: str) -> bool:
    if wanted == given:
        return True
    fractions = [re.fullmatch(r"-?[0-9]+/[0-9]+", text) is not None for text in (wanted, given)]
    whole = [_INTEGER.fullmatch(text) is not None for text in (wanted, given)]
    if all(fractions) or whole[0] != whole[1] or all(whole):
        return False
    # Not compared by value: high or bracketed powers, and formulas of more than two letters, which may be words.
    both = wanted + given
    letters = set(re.sub(r"sqrt|frac", "", both)) & set("abcdefghijklmnopqrstuvwxyz")
    if len(letters) > 2 or re.search(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]", both):
        return False
    return equal_by_value(_truth_of(wanted, parse_bounded(wanted) or ()), given)


def read_truth(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> MathTruth:
    """A ground truth to compare with: LaTeX, plain mathematics, or a text with its last box.

    Raises:
        ValueError: it can't be parsed.
    """
    text = str(ground_truth).strip()
    boxes = boxed_answers(text)
    text = boxes[-1] if boxes else text.strip("$").strip()
    try:
        parsed = parse_bounded(text) if text else ()
    except AnswerTooComplexError:
        parsed = None
    if parsed == ():
        shown = str(ground_truth)[:80]
        raise ValueError(f"ground truth {shown!r} of data source {data_source!r} is no mathematical expression")
    return _truth_of(text, parsed or ())


def _truth_of(text: str, parsed: tuple[Any, ...]) -> MathTruth:
    return MathTruth(text, math_form(text), parsed)


def _score_by_value(text: str, truth: MathTruth) -> float:
    answers = explicit_answers(after_thinking(text))
    return float(bool(answers) and all(equal_by_value(truth, answer) for answer in answers))


def _score_numina(text: str, truth: MathTruth) -> float:
    answers = explicit_answers(after_thinking(text))
    return float(bool(answers) and all(_is_close(truth, answer) or graded_equal(truth, answer) for answer in answers))


def _is_close(truth: MathTruth, answer: str) -> bool:
    """PRIME's tolerance (Cui et al. 2025, arXiv:2502.01456, code of the paper): 0.01 %, percent and share alike."""
    wanted, given = (re.sub(r"\{,\}|,|\\?%|\\?\$", "", text).strip() for text in (truth.text, answer))
    if max(len(wanted), len(given)) > _LONGEST_DIGITS or not (_DECIMAL.fullmatch(wanted) and _DECIMAL.fullmatch(given)):
        return False
    right = float(wanted)
    return any(math.isclose(right * factor, float(given), rel_tol=_CLOSE) for factor in (0.01, 1.0, 100.0))


def _score_geometry(text: str, truth: MathTruth) -> float:
    boxes = boxed_answers(after_thinking(text))
    accuracy = float(bool(boxes) and all(graded_equal(truth, box) for box in boxes))
    form = float(_GEOMETRY_FORMAT.fullmatch(text) is not None)
    return (1.0 - _GEOMETRY_FORMAT_WEIGHT) * accuracy + _GEOMETRY_FORMAT_WEIGHT * form


def _load() -> None:
    """Parses and compares once: the parser builds its tables then."""
    equal_by_value(read_truth("math_verify", "\\frac{3}{4}", {}), "x+1")


MATH_VERIFY = Scorer("the value of the box or of the stated answer", read_truth, _score_by_value, load=_load)
NUMINA = Scorer(
    "the box or the stated answer, graded as PRM800K does, numbers to 0.01 %", read_truth, _score_numina, load=_load
)
GEOMETRY = Scorer(
    "0.9 for the box, graded as PRM800K does, and 0.1 for <think>…</think> before it",
    read_truth,
    _score_geometry,
    load=_load,
)
