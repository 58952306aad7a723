"""What a reward pool is given, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "skip", "error", "timeout", "crash"]


@dataclass(frozen=True)
class RewardSample:
    """One response to score.

    Attributes:
        name: How messages call the sample.
        data_source, ground_truth, extra_info: Of the prompt's row; plain data.
        solution_str: The response's text.
    """

    name: str
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardOutcome:
    """What became of a sample.

    Attributes:
        status: `ok`; `skip`, the function returned None; `error`, it raised or returned no reward; `timeout`, it was
            killed at its deadline; `crash`, its process died, twice.
        score: The reward, if `ok`.
        parts: What the function returned beside it.
        error: A message or traceback for the last three.
        duration_s: Of the last attempt.
        attempts: 2 after a crash.
        unscorable: Why a built-in function could not score the response, whose score is then that of a wrong answer.
    """

    status: Status
    score: float | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    duration_s: float = 0.0
    attempts: int = 1
    unscorable: str | None = None
