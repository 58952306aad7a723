"""Compare mathematical answers as text, after bringing equivalent spellings to one normal form.

There are two normal forms, each used for the data it was made for: that of the MATH data set (Hendrycks et al. 2021,
arXiv:2103.03874, code of the paper), and that of Minerva (Lewkowycz et al. 2022, arXiv:2206.14858, listing in the
appendix), which DAPO took over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from hrl.reward.scorers.base import Scorer, TruthError, all_right, only
from hrl.reward.scorers.final_answer import after_thinking, boxed_answers, sides_of

_LONGEST_ANSWER = 2000
_DAPO_WINDOW = 300
_DAPO_BOX_WINDOW = 100
_NO_ANSWER = "[INVALID]"
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

_MATH_REPLACED = (
    *(("\n", ""), ("−", "-"), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac")),
    *((removed, "") for removed in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")),
)
_MATH_LEADING_POINT = re.compile(r"(^| |\{)\.")
_UNIT = re.compile(r"\\text\{ (?!(?:or|and)\b).*", re.DOTALL)
_BARE_ROOT = re.compile(r"\\sqrt([^{])")
_FRACTION = re.compile(r"\\frac(?:([^{])([^{])|([^{])(?=\{))")
_PLAIN_FRACTION = re.compile(r"-?(?:0|[1-9][0-9]*)/-?(?:0|[1-9][0-9]*)")

_MINERVA_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_MINERVA_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_MINERVA_UNWRAPPED = (
    re.compile(r"\\text\{(.*?)\}"),
    re.compile(r"\\textbf\{(.*?)\}"),
    re.compile(r"\\overline\{(.*?)\}"),
)


def replaced(text: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Return the text with the first of each pair replaced by the second, one pair after the other."""
    for old, new in pairs:
        text = text.replace(old, new)
    return text


def math_form(answer: str) -> str:
    r"""Return MATH's normal form: one spelling of fractions, roots, decimals; no spaces, units, degrees, percents.

    `\dfrac12`, `\frac{1}{2}`, `1/2` and `0.5` become the same; `x = 5` becomes `5`. Nothing else is computed.
    """
    text = replaced(answer, _MATH_REPLACED)
    text = _UNIT.sub("", text) if text.count("\\text{ ") == 1 else text
    text = _MATH_LEADING_POINT.sub(r"\g<1>0.", text.replace("\\%", ""))
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2 and not any(sign.isdigit() for sign in name):
        text = value
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text).replace(" ", "")
    text = _FRACTION.sub(_in_braces, text)
    if text == "0.5":
        return "\\frac{1}{2}"
    if _PLAIN_FRACTION.fullmatch(text):
        over, under = text.split("/")
        return f"\\frac{{{over}}}{{{under}}}"
    return text


def minerva_form(answer: str) -> str:
    """Return Minerva's normal form: the text after the last `=`, without units, articles, dollars, text commands."""
    text = replaced(answer.split("=")[-1], _MINERVA_REPLACED)
    text = replaced(text, ((removed, "") for removed in _MINERVA_REMOVED))
    if (math := re.search(r"\$(.*?)\$", text)) is not None:
        text = math.group(1)
    for unwrapped in _MINERVA_UNWRAPPED:
        text = unwrapped.sub(r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    if re.fullmatch(r"[0-9]{1,3}(,[0-9]{3})+", text):
        text = text.replace(",", "")
    return text.strip()


def _in_braces(match: re.Match[str]) -> str:
    over, under, alone = match.groups()
    return f"\\frac{{{alone}}}" if alone is not None else f"\\frac{{{over}}}{{{under}}}"


def _read_text(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> str:
    if not isinstance(ground_truth, str | int | float) or not str(ground_truth).strip():
        raise TruthError(ground_truth, data_source, "is not the text of an answer")
    return str(ground_truth)


def _score_math(text: str, truth: str) -> float:
    right = math_form(truth)
    boxes = boxed_answers(after_thinking(text))
    return all_right(boxes, lambda box: len(box) <= _LONGEST_ANSWER and math_form(box) == right)


def _score_dapo(text: str, truth: str) -> dict[str, Any]:
    text = after_thinking(text)
    lines = _ANSWER_LINE.findall(text[-_DAPO_WINDOW:])
    if lines:
        forms = [minerva_form(line) for line in lines]
        right = {minerva_form(truth)}
        is_right = set(forms) == right and all(_agrees_with_itself(line, right) for line in lines)
        return _dapo_reward(is_right, forms[-1])
    boxes = boxed_answers(text[-_DAPO_BOX_WINDOW:])
    return _dapo_reward(set(boxes) == {truth.strip()}, boxes[-1] if boxes else _NO_ANSWER)


def _agrees_with_itself(line: str, right: set[str]) -> bool:
    """Return whether the sides of `1 + 2 = 3` that are plain numbers are the same number."""
    sides = {minerva_form(side) for side in sides_of(line)}
    return {side for side in sides if re.fullmatch(r"-?[0-9.]+", side)} <= right


def _dapo_reward(is_right: bool, answer: str) -> dict[str, Any]:
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": answer}


def boxed_in_normal_form(text: str, truth: object, *, longest: int) -> str | None:
    """Return the only box of a text in MATH's normal form, None if there is none or several.

    Args:
        text: The response.
        truth: Of its row; not needed.
        longest: How many characters of a box are read.
    """
    return only([math_form(box[:longest]) for box in boxed_answers(after_thinking(text))])


MATH = Scorer(
    "the text of the box, in MATH's normal form",
    _read_text,
    _score_math,
    answer=partial(boxed_in_normal_form, longest=_LONGEST_ANSWER),
)
DAPO = Scorer(
    "the line 'Answer: …', else the box, in Minerva's normal form; 1 and -1",
    _read_text,
    _score_dapo,
    wrong=_dapo_reward(False, _NO_ANSWER),
)
