"""What a built-in scorer is: a way to read the ground truth, and a score for a text against it.

The two are apart because they fail through different faults. A ground truth that can't be read is the data's and is
handled by `reward.on_error`; a text that breaks the scorer once the truth is read is the policy's, and scores as wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Reward = float | Mapping[str, Any]


class TruthError(ValueError):
    """A ground truth that a scorer can't read."""

    def __init__(self, ground_truth: object, data_source: str, what: str) -> None:
        super().__init__(f"ground truth {str(ground_truth)[:80]!r} of data source {data_source!r} {what}")


class RowError(ValueError):
    """A row that turned out bad when a response was scored by it: the data's fault after all."""


def _nothing() -> None:
    """Import nothing."""


@dataclass(frozen=True)
class Scorer:
    """A built-in reward function.

    Attributes:
        rule: What it pays for, in a phrase, for messages and the documentation.
        read_truth: From a row's `(data_source, ground_truth, extra_info)` to what `score` compares with.
            Raises `TruthError` or another `ValueError`.
        score: From a response's text and that truth to the reward. Raises `RowError` where the row is to blame.
        wrong: The reward of a wrong answer, and of one that can't be scored.
        load: Imports what the scorer needs, so that the first sample's deadline doesn't pay for it.
    """

    rule: str
    read_truth: Callable[[str, Any, Mapping[str, Any]], Any]
    score: Callable[[str, Any], Reward]
    wrong: Reward = 0.0
    load: Callable[[], None] = _nothing
