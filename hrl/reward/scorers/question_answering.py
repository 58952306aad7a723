"""Compare short answers to factual questions word by word."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from hrl.reward.scorers.base import Scorer, TruthError, only
from hrl.reward.scorers.final_answer import after_thinking, tagged_answers

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_TAGS_ALLOWED = 10
_SPAM_FACTOR = 0.25


def squad_form(answer: str) -> str:
    """Return SQuAD's normal form (Rajpurkar et al. 2016): lower case, no punctuation or articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def _read_targets(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> frozenset[str]:
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    texts = [target] if isinstance(target, str) else target
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
        raise TruthError(ground_truth, data_source, "has no 'target': a text, or a list of them")
    forms = frozenset(map(squad_form, texts)) - {""}
    if not forms:
        raise TruthError(ground_truth, data_source, "has a 'target' of articles and punctuation alone")
    return forms


def _score_exact_match(text: str, targets: frozenset[str]) -> float:
    text = after_thinking(text)
    if _tagged(text, targets) not in targets:
        return 0.0
    spam = max(text.count("<answer>"), text.count("</answer>")) > _TAGS_ALLOWED
    return _SPAM_FACTOR if spam else 1.0


def _tagged(text: str, targets: frozenset[str]) -> str | None:
    return only(list({squad_form(answer) for answer in tagged_answers(after_thinking(text))}))


EXACT_MATCH = Scorer(
    "the text in <answer>…</answer>, equal to a target but for case, articles, punctuation",
    _read_targets,
    _score_exact_match,
    answer=_tagged,
)
