"""What a run that learns from a data set shows and leaves: all that a PPO run does but samples, which it has not."""

from __future__ import annotations

from collections.abc import Mapping

from hrl.batching.lengths import lengths_of
from hrl.protocol import DataProto
from hrl.report.reporter import RunReporter
from hrl.report.reward_curve import LOSS


class OfflineReporter(RunReporter):
    """A reporter of rows that nobody sampled."""

    curve = LOSS

    def describe(self, batch: DataProto) -> dict[str, float]:
        """Lengths of prompts and answers, and how many tokens of the batch were trained on."""
        lengths = dict(zip(("prompt_length", "response_length"), lengths_of(batch), strict=True))
        metrics = {f"{name}/mean": float(values.float().mean()) for name, values in lengths.items()}
        metrics |= {f"{name}/max": float(values.max()) for name, values in lengths.items()}
        return metrics | {"train/tokens": float(batch.batch["response_mask"].sum())}

    def show_samples(self, step: int, batch: DataProto) -> None:
        """The rows are the user's own."""

    def warn(self, metrics: Mapping[str, float]) -> None:
        """There is no sampler to disagree with."""
