"""Answers that are one number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from hrl.reward.scorers.base import Scorer, TruthError, all_right
from hrl.reward.scorers.final_answer import (
    after_thinking,
    explicit_answers,
    hashed_answers,
    sentences,
    sides_of,
)

_NUMBER = re.compile(r"(?<![0-9A-Za-z.])-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?![0-9])")
_VERB = r"(?:is|are|was|be|equals?|equal\s+to|gives?|gets?|makes?|obtains?|as|have|has|total)"
_CONCLUSION = re.compile(
    rf"(?P<said>[^.!?\n=:]*?)(?:=|≈|→|->|:|\b{_VERB}(?:\s+(?:simply|just|now|then|therefore|exactly|also|only))?\b)"
    r"[\s*_`$\\(\[]*$",
    re.IGNORECASE,
)
_EARLIER = re.compile(rf".*[,;]|.*\b{_VERB}\s+-?[0-9.]+\s*(?:and|or|then|so)?\b", re.DOTALL | re.IGNORECASE)
_LONGEST_NUMBER = 64
_LONGEST_CONTEXT = 200
_FLEXIBLE_WINDOW = 300


def as_number(text: str) -> Decimal | None:
    """Return `1,234.50` as a number; None for anything else, and for numbers of more than 64 characters."""
    plain = text.strip().replace(",", "")
    if len(plain) > _LONGEST_NUMBER or not re.fullmatch(r"-?[0-9]+(?:\.[0-9]+)?", plain):
        return None
    return Decimal(plain)


def single_number(answer: str) -> Decimal | None:
    """Return the single number in an answer, which may have units or words around it; None for none or several.

    In `7 + 5 = 12` it is the last side, unless another side is a different number.
    """
    sides = sides_of(answer)
    plain = {_only_number(side) for side in sides if as_number(side) is not None}
    return None if len(plain) > 1 else _only_number(sides[-1])


def concluded_number(text: str) -> Decimal | None:
    """Return the number that a text without an explicit answer concludes with, if it is unambiguous.

    That is the only number outside of questions, or the last one if it is a conclusion: `7 + 5 = 12`, "the sum is 12".
    Lists of numbers, alternatives, and different conclusions in the same words are not an answer.
    """
    text = "\n".join(sentence for sentence in sentences(text) if not sentence.rstrip(" *_\"')").endswith("?"))
    found = list(_NUMBER.finditer(text))
    values = {match.group().replace(",", "") for match in found}
    if len(values) == 1 or len({as_number(value) for value in values}) == 1:
        return as_number(found[-1].group())
    concluded: dict[str, set[Decimal | None]] = {}
    last: Decimal | None = None
    for match in found:
        before = _CONCLUSION.search(text[max(0, match.start() - _LONGEST_CONTEXT) : match.start()])
        if before is None:
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
    found = {as_number(match.group()) for match in _NUMBER.finditer(text[:_LONGEST_CONTEXT])}
    return found.pop() if len(found) == 1 else None


def _read_number(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Decimal:
    text = str(ground_truth)
    number = as_number((hashed_answers(text) or (text,))[-1].replace("$", ""))
    if number is None:
        raise TruthError(text, data_source, "is not a number")
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


def _score_last_number(text: str, truth: Decimal) -> float:
    numbers = _NUMBER.findall(text[-_FLEXIBLE_WINDOW:])
    return float(bool(numbers) and as_number(numbers[-1]) == truth)


NUMERIC = Scorer("one number, stated as the answer or concluded", _read_number, _score_numeric)
GSM8K = Scorer("the number behind '#### '", _read_number, _score_hashes)
GSM8K_FLEXIBLE = Scorer(
    "the last number of the last 300 characters, whatever it stands for", _read_number, _score_last_number
)
