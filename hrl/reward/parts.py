"""What the parts of a reward were, over many samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hrl.metrics import Metric


def numeric_parts(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Return every part that is a number in some sample, as one value per sample; None where a sample has no number.

    Args:
        parts: Part → value, one mapping per sample.
    """
    names = dict.fromkeys(name for sample in parts for name in sample)
    columns = {name: [_number(sample.get(name)) for sample in parts] for name in names}
    return {name: column for name, column in columns.items() if any(value is not None for value in column)}


def part_metrics(parts: Sequence[Mapping[str, Any]]) -> dict[str, Metric]:
    """Return the mean of every part over the samples that have it, as it was before weights.

    Args:
        parts: Part → value, one mapping per sample.

    Returns:
        `reward/<part>/mean`, and `reward/<part>/missing`, the number of samples without it, where there are any.
    """
    metrics: dict[str, Metric] = {}
    for name, column in numeric_parts(parts).items():
        values = [value for value in column if value is not None]
        metrics[f"reward/{name}/mean"] = Metric.mean(sum(values), len(values))
        if len(values) < len(column):
            metrics[f"reward/{name}/missing"] = Metric.total(len(column) - len(values))
    return metrics


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
