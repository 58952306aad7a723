"""The interface of built-in scorers: read the ground truth, then score a text against it.

The two are separate because their failures have different causes. A ground truth that can't be read is a fault of the
data and is handled by `reward.on_error`; a text that the scorer then fails on is the policy's and scores as wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hrl.errors import HrlError

Reward = float | Mapping[str, Any]
UNSCORABLE = "unscorable"
"""Part with the reason why a response could not be scored, and got the reward of a wrong answer."""


class TruthError(HrlError, ValueError):
    """A ground truth that a scorer can't read."""

    def __init__(self, ground_truth: object, data_source: str, what: str) -> None:
        super().__init__(f"ground truth {str(ground_truth)[:80]!r} of data source {data_source!r} {what}")


class RowError(ValueError):
    """A row that turned out to be bad only when a response was scored; or that could not be tried on this machine."""


@dataclass(frozen=True)
class Scorer:
    """A built-in reward function.

    Attributes:
        rule: What it rewards, in a phrase for messages and documentation.
        read_truth: Turns a row's `(data_source, ground_truth, extra_info)` into the truth for `score`.
            Raises `TruthError` or another `ValueError`.
        score: Returns the reward of a response's text, given that truth. Raises `RowError` if the row is to blame.
        answer: Returns what a text answers, given that truth: the same text for the same answer, None for no answer or
            several. It is the part `pred`, by which votes are counted. None for a scorer whose reward has `pred`.
        wrong: The reward of a wrong answer, and of one that can't be scored.
        load: Imports what the scorer needs, to keep the import time out of the first sample's deadline.
    """

    rule: str
    read_truth: Callable[[str, Any, Mapping[str, Any]], Any]
    score: Callable[[str, Any], Reward]
    answer: Callable[[str, Any], str | None] | None = None
    wrong: Reward = 0.0
    load: Callable[[], None] = lambda: None


def only(answers: Sequence[str]) -> str | None:
    """Return the answer if there is exactly one."""
    return answers[0] if len(answers) == 1 else None


def all_right(answers: Sequence[str], is_right: Callable[[str], bool]) -> float:
    """Return 1.0 if there is an answer and all of them are right, else 0.0."""
    return float(bool(answers) and all(map(is_right, answers)))
