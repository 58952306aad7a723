"""Answers that are one number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from hrl.reward.scorers.base import Scorer, TruthError, all_right
from hrl.reward.scorers.final_answer import (
    after_thinking,
    ascii_minus,
    explicit_answers,
    hashed_answers,
    sentences,
    sides_of,
)

_POWER_OF_TEN = r"(?:[eE][-+]?[0-9]{1,3})?"
_NUMBER = re.compile(
    rf"(?<![0-9A-Za-z.])-?(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]+)(?:\.[0-9]+)?{_POWER_OF_TEN}(?![0-9])"
)
_VERB = r"(?:is|are|was|be|equals?|equal\s+to|gives?|gets?|makes?|obtains?|as|have|has|total)"
_LEADS_TO = rf"(?:=>|=|≈|→|->|:|\b{_VERB}(?:\s+(?:simply|just|now|then|therefore|exactly|also|only))?\b)[\s*_`$\\(\[]*$"
_LEADING = re.compile(_LEADS_TO, re.IGNORECASE)
_CONCLUSION = re.compile(rf"(?P<said>[^.!?\n=:]*?){_LEADS_TO}", re.IGNORECASE)
"""Looked for only where `_LEADING` is found, since not to find it takes time with the square of the length."""
_SPACED_MINUS = re.compile(
    rf"(\A[\s$({{\[]{{0,8}}|(?:[=≈($\[{{#]|:|\b{_VERB}\b)[ \t$({{\[]{{0,8}})-[ \t]{{1,8}}(?=[0-9])", re.IGNORECASE
)
"""A minus that belongs to the number behind it in spite of a space: "= - 12", but not the dash of a list."""
_TAG = re.compile(r"</?[A-Za-z][^<>]{0,40}>")
_DENIED_BEFORE = re.compile(
    r"(?:[±∓√∛≠≤≥<]|(?<![-=\n>])>|!=|\\(?:pm|mp|neq?|sqrt|leq?|geq?|lt|gt)|\b(?:not|never)|n['’]t"
    r"|\b(?:less|more|fewer|greater|other)\s+than|\bat\s+(?:most|least)|\b(?:wrong|incorrect)\s+\w+\s+(?:is|was|:))"
    r"[\s*_`\"'${(\[=]*\Z",
    re.IGNORECASE,
)
"""What makes the number behind it another one, or none: `√12`, `≠ 12`, "less than 12", "not 12"."""
_DENIED_BEHIND = re.compile(
    r"[⁰¹²³⁴-⁹]|\s?(?:\^|\*\*\s?[0-9(])|(?:[xX][0-9a-fA-F]|[xyzijπkKMB](?![A-Za-z0-9]))|\s?\\(?:pi|sqrt|frac)|[√π]"
    r"|[\s*_`\"'$]{0,4}\b(?:is|was)\s+(?:wrong|incorrect|false|not)\b"
)
"""The same behind a number: `12²`, `12k`, `12i`, "12 is wrong"."""
_EARLIER = re.compile(rf".*[,;]|.*\b{_VERB}\s+-?[0-9.]+\s*(?:and|or|then|so)?\b", re.DOTALL | re.IGNORECASE)
_LONGEST_NUMBER = 64
_LONGEST_CONTEXT = 200
_LONGEST_DENIAL = 40
_FLEXIBLE_WINDOW = 300


def as_number(text: str) -> Decimal | None:
    """Return `1,234.50` as a number; None for anything else, and for numbers of more than 64 characters."""
    plain = text.strip().replace(",", "")
    if len(plain) > _LONGEST_NUMBER or not re.fullmatch(rf"-?[0-9]+(?:\.[0-9]+)?{_POWER_OF_TEN}", plain):
        return None
    return Decimal(plain)


def number_text(number: Decimal | None) -> str | None:
    """Return a number as a text that is the same for equal numbers: `12` for 12.0."""
    if number is None:
        return None
    return f"{number.normalize():f}" if abs(number.adjusted()) < _LONGEST_NUMBER else str(number.normalize())


def single_number(answer: str) -> Decimal | None:
    """Return the single number in an answer, which may have units or words around it; None for none or several.

    In `7 + 5 = 12` it is the last side, unless another side is a different number.
    """
    sides = sides_of(_signs_at_numbers(answer))
    plain = {_only_number(side) for side in sides if as_number(side) is not None}
    return None if len(plain) > 1 else _only_number(sides[-1])


def concluded_number(text: str) -> Decimal | None:
    """Return the number that a text without an explicit answer concludes with, if it is unambiguous.

    That is the only number outside of questions, or the last one if it is a conclusion: `7 + 5 = 12`, "the sum is 12".
    Lists of numbers, alternatives, and different conclusions in the same words are not an answer.
    """
    text = "\n".join(sentence for sentence in sentences(text) if not sentence.rstrip(" *_\"')").endswith("?"))
    text = _signs_at_numbers(text)
    found = list(_NUMBER.finditer(text))
    claimed = {_claimed(text, match) for match in found}
    if len(claimed) == 1:
        return claimed.pop()
    concluded: dict[str, set[Decimal | None]] = {}
    last: Decimal | None = None
    for match in found:
        context = text[max(0, match.start() - _LONGEST_CONTEXT) : match.start()]
        before = _CONCLUSION.search(context) if _LEADING.search(context) else None
        if before is None or _claimed(text, match) is None:
            last = last if as_number(match.group()) == last else None  # `7 + 5 = 12`, and once more 12
            continue
        said = "".join(_EARLIER.sub("", before["said"]).lower().split())
        bare = as_number(before["said"].strip(" \t*_`$,;"))
        last = as_number(match.group())
        if bare is not None and bare != last:  # `10 = 11`, `10: 11`
            return None
        concluded.setdefault(said, set()).add(last)
    return None if any(len(group) > 1 for group in concluded.values()) else last


def _only_number(text: str) -> Decimal | None:
    text = text[:_LONGEST_CONTEXT]
    found = {_claimed(text, match) for match in _NUMBER.finditer(text)}
    return found.pop() if len(found) == 1 else None


def _claimed(text: str, match: re.Match[str]) -> Decimal | None:
    """Return a number of a text; None where the text says that it is another or none (`√12`, `12k`, "not 12")."""
    before = _TAG.sub("\n", text[max(0, match.start() - _LONGEST_DENIAL) : match.start()])
    if _DENIED_BEFORE.search(before) or _DENIED_BEHIND.match(text, match.end()):
        return None
    return as_number(match.group())


def _signs_at_numbers(text: str) -> str:
    """Return a text with one spelling of minus, at its number."""
    return _SPACED_MINUS.sub(r"\1-", ascii_minus(text))


def _read_number(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Decimal:
    text = str(ground_truth)
    plain = (hashed_answers(text) or (text,))[-1].replace("$", "").strip()
    number = as_number(plain)
    if number is None:
        raise TruthError(text, data_source, "is not a number")
    if not _NUMBER.fullmatch(plain):  # 3,14 is no 314
        raise TruthError(text, data_source, "has a comma elsewhere than before thousands; write 3.14 and 1,234")
    return number


def final_number(text: str) -> Decimal | None:
    """Return the number that a text gives as its answer: the explicit one, or the one that it concludes with.

    None if there is none, or if explicit answers differ.
    """
    text = after_thinking(text)
    answers = explicit_answers(text) or hashed_answers(text)
    if not answers:
        return concluded_number(text)
    numbers = {single_number(answer) for answer in answers}
    return numbers.pop() if len(numbers) == 1 else None


def _score_numeric(text: str, truth: Decimal) -> float:
    return float(final_number(text) == truth)


def _score_hashes(text: str, truth: Decimal) -> float:
    return all_right(hashed_answers(after_thinking(text)), lambda answer: single_number(answer) == truth)


def _last_number(text: str) -> Decimal | None:
    found = list(_NUMBER.finditer(window := _signs_at_numbers(text[-_FLEXIBLE_WINDOW:])))
    return _claimed(window, found[-1]) if found else None


def _number_behind_hashes(text: str, truth: Decimal) -> str | None:
    numbers = {single_number(answer) for answer in hashed_answers(after_thinking(text))}
    return number_text(numbers.pop()) if len(numbers) == 1 else None


NUMERIC = Scorer(
    "one number, stated as the answer or concluded",
    _read_number,
    _score_numeric,
    answer=lambda text, truth: number_text(final_number(text)),
)
GSM8K = Scorer("the number behind '#### '", _read_number, _score_hashes, answer=_number_behind_hashes)
GSM8K_FLEXIBLE = Scorer(
    "the last number of the last 300 characters, whatever it stands for",
    _read_number,
    lambda text, truth: float(_last_number(text) == truth),
    answer=lambda text, truth: number_text(_last_number(text)),
)
