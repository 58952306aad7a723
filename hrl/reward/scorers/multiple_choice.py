"""The letter of a multiple-choice answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hrl.reward.scorers.base import Scorer, TruthError
from hrl.reward.scorers.final_answer import after_thinking, boxed_answers, tagged_answers

_LETTER = re.compile(
    r"[\s*_`\"'$]*(?:\\text\{)?(?:(?:option|choice)\s+)?[\s*_`\"']*"
    r"(?:[(\[]\s*(?P<bracketed>[A-Za-z])\s*[)\]]|(?P<bare>[A-Z]))(?![A-Za-z0-9])(?P<rest>.*)\Z",
    re.DOTALL,
)
_AFTER = re.compile(
    r"[\s*_`\"'$}]*(?:\Z|[).:,;!\]—–-]|(?:because|since|as|which|is(?!\s+(?:wrong|incorrect|false|not)\b))\b|\((?!or\b))"
)
_ANOTHER = re.compile(
    r"[\s*_`\"'$})\].:]*(?:(?:[,;/&]|\bor\b|\band\b)[\s*_`\"']*(?:or\s+|and\s+)?[(\[]?[A-Z][)\]]?(?![A-Za-z0-9'])"
    r"|[\s*_]+[(\[]\s*[A-Za-z]\s*[)\]])"
)
"""A second letter right behind the first: `, C`, ` or C`, ` (C)`."""
_LABEL = re.compile(r"(?<![A-Za-z0-9'])[(\[]?([A-Z])[)\]](?![A-Za-z0-9])")
_STATED = re.compile(
    r"(?<!\bwrong\s)(?<!\bincorrect\s)\banswer[*_]*[^.:\n]{0,40}?(?:\bis\b|:)[*_]*[ \t]*", re.IGNORECASE
)
_LONGEST_STATEMENT = 300


def choice_of(answer: str) -> str | None:
    """Return the letter that an answer begins with: `B`, `(b)`, `B) Paris`, `**B.**`; None for none or several."""
    match = _LETTER.match(answer[:_LONGEST_STATEMENT])
    if match is None or _ANOTHER.match(rest := match["rest"].split("\n", 1)[0]):
        return None
    if len(set(_LABEL.findall(answer[:_LONGEST_STATEMENT].split("\n", 1)[0]))) > 1:  # the choices, listed again
        return None
    if match["bare"] and not _AFTER.match(rest):  # the first word of a sentence, such as "A"
        return None
    return (match["bracketed"] or match["bare"]).upper()


def _read_letter(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> str:
    if isinstance(ground_truth, int) and not isinstance(ground_truth, bool) and 0 <= ground_truth < 26:
        return chr(ord("A") + ground_truth)  # an index, as in MMLU
    text = str(ground_truth).strip()
    letter = choice_of(text.upper() if len(text) == 1 else text)
    if letter is None:
        raise TruthError(ground_truth, data_source, "is neither a letter nor the index of a choice, counted from 0")
    return letter


def _chosen(text: str) -> str | None:
    """Return the letter that a text chooses; None if it chooses none, or several."""
    text = after_thinking(text)
    answers = tagged_answers(text) or boxed_answers(text) or _stated(text)
    if not answers:
        return choice_of(text.strip()) if "\n" not in text.strip() else None
    letters = {choice_of(answer) for answer in answers}
    return letters.pop() if len(letters) == 1 else None


def _stated(text: str) -> tuple[str, ...]:
    """Return what follows "The answer is" and "Answer:", up to the end of its line."""
    found = (text[match.end() : match.end() + _LONGEST_STATEMENT].split("\n", 1)[0] for match in _STATED.finditer(text))
    return tuple(dict.fromkeys(one for one in found if one.strip()))[:8]


MULTIPLE_CHOICE = Scorer(
    "the letter of the choice, and no other",
    _read_letter,
    lambda text, truth: float(_chosen(text) == truth),
    answer=lambda text, truth: _chosen(text),
)
