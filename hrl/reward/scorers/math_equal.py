r"""Compare mathematical answers by value with math-verify and sympy, within bounds.

sympy computes whatever it is given: `10^{10^{10}}`, `((9!)!)!` and `(x+y+z)^{200}` keep it busy for hours or fill the
memory. An answer beyond the bounds below is therefore compared only as text. A comparison that still takes more than
`_LONGEST_CPU_S` of processor time is given up.
"""

from __future__ import annotations

import logging
import math
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hrl.reward.scorers.base import Scorer, TruthError, all_right, only
from hrl.reward.scorers.final_answer import (
    after_thinking,
    ascii_minus,
    boxed_answers,
    explicit_answers,
    sides_of,
)
from hrl.reward.scorers.math_text import math_form

_LONGEST_CPU_S = 5.0
LONGEST_ANSWER = 400
LONGEST_DIGITS = 300
_DEEPEST_NESTING = 8
_MOST_NODES = 150
_MOST_TERMS = 400
_LARGEST_BITS = 20_000
_LARGEST_FACTORIAL = 2_000
_OPEN_ENDED = re.compile(r"\\(?:sum|prod|int|iint|oint|lim|limsup|liminf|binom|dbinom|tbinom|choose)(?![a-zA-Z])")
_INTEGER = re.compile(r"-?[0-9]+")
_PLAIN = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\\frac\{-?[0-9]+\}\{-?[0-9]+\}")
_DEGREES = re.compile(r"\^\s*\{?\\circ\}?")
_QUOTIENT = re.compile(r"[0-9)}]\s*(?:/|÷|\\div)\s*[0-9(\\]|\\[dt]?frac")
_CALCULATION = re.compile(
    r"[0-9)}]\s*(?:[+*×·÷-]|\\(?:div|pm|bmod)|(?:\\times|\\cdot)(?!\s*10\s*\^))\s*[-(\\]*\s*[0-9(\\{]"
    r"|(?<!10)[0-9)]\s*(?:\^|\*\*)|(?<!\\times)(?<!\\cdot)(?<![0-9])\s*10\s*\^"
    r"|\\(?:sqrt|log|ln|sin|cos|tan|max|min|gcd|lcm)|[0-9)]\s*!"
)
_REDUNDANT = re.compile(r"\{\{([^{}]*)\}\}|\(\(([^()]*)\)\)")
_RELATION = re.compile(r"[<>]|\\[lg]eq?(?![a-z])|\\n?eq(?![a-z])|\\in(?![a-z])")


class _TookTooLong(BaseException):
    """Raised by the timer; not an `Exception`, because sympy and math-verify catch those and try the next method."""


class AnswerTooComplexError(ValueError):
    """An answer that differs from the truth as text and is too large or too complex to compare by value."""


@dataclass(frozen=True)
class MathTruth:
    """A ground truth as text and parsed.

    Attributes:
        text: The text, without a box around it.
        parsed: The result of math-verify; empty if it is beyond the bounds.
    """

    text: str
    parsed: tuple[Any, ...]

    @property
    def form(self) -> str:
        """The text in the MATH data set's normal form."""
        return math_form(self.text)


def equal_by_value(truth: MathTruth, answer: str, decimals: int = 6) -> bool:
    """Return whether an answer equals the truth as a number, expression, set, interval or equation.

    In a chain of equations each side must equal it, unless the truth is an equation itself. If one of two numbers is a
    decimal fraction, `decimals` places are compared.

    Raises:
        AnswerTooComplexError: The comparison would exceed the bounds.
    """
    if math_form(answer[:LONGEST_ANSWER]) == truth.form and len(answer) <= LONGEST_ANSWER:
        return True
    if not truth.parsed:
        return False
    sides = (answer,) if "=" in truth.text or _RELATION.search(answer) else sides_of(answer)
    return all(_is_equal(truth, side, decimals) for side in sides)


def _is_equal(truth: MathTruth, side: str, decimals: int) -> bool:
    from math_verify import verify

    parsed = parse_answer(side)
    with limited_cpu():
        return bool(parsed) and bool(
            verify(list(truth.parsed), list(parsed), float_rounding=decimals, timeout_seconds=None)
        )


def is_worked_out(truth: MathTruth, answer: str) -> bool:
    r"""Return whether an answer is a number where the truth is one, and no calculation, such as the question itself.

    `\boxed{7+5}` equals 12, and says no more than the question did. The last side of `7 + 5 = 12` counts. A fraction
    need not be reduced, unless the truth is a whole number.
    """
    if not _PLAIN.fullmatch(truth.form):
        return True
    last = _DEGREES.sub("", ascii_minus((sides_of(answer) or ("",))[-1]))
    is_quotient = _INTEGER.fullmatch(truth.form) is not None and _QUOTIENT.search(last) is not None
    return not is_quotient and _CALCULATION.search(last) is None


def parse_answer(text: str) -> tuple[Any, ...]:
    """Parse an answer with math-verify.

    Raises:
        AnswerTooComplexError: The answer is beyond the bounds.
    """
    parsed = parse_bounded(text)
    if parsed is None:
        raise AnswerTooComplexError(
            f"an answer of {len(text)} characters is too complex to compute with: {text[:60]!r}"
        )
    return parsed


def parse_bounded(text: str) -> tuple[Any, ...] | None:
    """Parse LaTeX or plain mathematics with math-verify; None beyond the bounds, empty if it can't be parsed."""
    from math_verify import parse
    from math_verify.parser import LatexExtractionConfig

    for _ in range(_DEEPEST_NESTING):
        text = _REDUNDANT.sub(lambda match: f"{{{match[1]}}}" if match[1] is not None else f"({match[2]})", text)
    too_long = len(text) > LONGEST_ANSWER or re.search(rf"[0-9]{{{LONGEST_DIGITS}}}", text) is not None
    if too_long or _nesting(text) > _DEEPEST_NESTING or _OPEN_ENDED.search(text):
        return None
    text = ascii_minus(text).encode("utf-8", "replace").decode("utf-8").strip().strip("$").strip()
    with limited_cpu():
        parsed = parse(f"\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)
    return tuple(parsed) if all(_is_small(expression) for expression in parsed) else None


def _nesting(text: str) -> int:
    depth = deepest = 0
    for sign in text:
        depth += (sign in "{([") - (sign in "})]")
        deepest = max(deepest, depth)
    return deepest


def _is_small(expression: Any) -> bool:
    """Return whether a parsed, unevaluated expression is within the bounds on size, numbers and expansions."""
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
    """Return an upper bound on log2 of all numbers that occur in the computation; infinite if none is known."""
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
    """Return an upper bound on the number of terms of the expanded expression."""
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
def limited_cpu() -> Iterator[None]:
    """Limit the block to `_LONGEST_CPU_S` of processor time; works only in the main thread, as it uses a signal.

    Raises:
        AnswerTooComplexError: The time was exceeded.
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


def read_truth(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> MathTruth:
    """Read a ground truth: LaTeX, plain mathematics, or a text whose last box counts.

    Raises:
        TruthError: It can't be parsed.
    """
    text = str(ground_truth).strip()
    boxes = boxed_answers(text)
    text = boxes[-1] if boxes else text.strip("$").strip()
    try:
        parsed = parse_bounded(text) if text else ()
    except AnswerTooComplexError:
        parsed = None
    if parsed == ():
        raise TruthError(ground_truth, data_source, "is not a mathematical expression")
    return MathTruth(text, parsed or ())


def _score_by_value(text: str, truth: MathTruth) -> float:
    def is_right(answer: str) -> bool:
        return equal_by_value(truth, answer) and is_worked_out(truth, answer)

    return all_right(explicit_answers(after_thinking(text)), is_right)


def answer_in_normal_form(text: str, truth: MathTruth) -> str | None:
    """Return the one answer of a text as MATH writes it; None for none or several."""
    found = {math_form(answer[:LONGEST_ANSWER]) for answer in explicit_answers(after_thinking(text))}
    return only(list(found))


def load() -> None:
    """Parse and compare once, so that the parser builds its tables."""
    # It warns in every process that its own timer is off; the one here is `limited_cpu`.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    equal_by_value(read_truth("math_verify", "\\frac{3}{4}", {}), "x+1")


MATH_VERIFY = Scorer(
    "the value of the box or of the stated answer", read_truth, _score_by_value, load=load, answer=answer_in_normal_form
)
