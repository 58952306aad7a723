"""What a batch of a data set, and a validation on one, say in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hrl.batching.rows import lengths_of
from hrl.protocol import DataProto


def batch_metrics(batch: DataProto) -> dict[str, float]:
    """Return lengths of prompts and answers, and how many tokens of the batch are trained on."""
    prompt_lens, response_lens = lengths_of(batch)
    return {
        "prompt_length/mean": float(prompt_lens.float().mean()),
        "response_length/mean": float(response_lens.float().mean()),
        "prompt_length/max": float(prompt_lens.max()),
        "response_length/max": float(response_lens.max()),
        "train/tokens": float(batch.batch["response_mask"].sum()),
    }


def metrics_by_source(
    sources: Sequence[str], columns: Mapping[str, Tensor], weights: Tensor | None = None
) -> dict[str, float]:
    """Means over the items of every source.

    Args:
        sources: Source of each item (N,).
        columns: Per metric a number for each item (N,).
        weights: Of the items (N,), such as their tokens; all alike by default.

    Returns:
        `val/<source>/<metric>`, and `val/<source>/n`, the number of items.

    Raises:
        ValueError: A number is not finite; names metric, item and source.
    """
    for name, values in columns.items():
        bad = (~torch.isfinite(values)).nonzero().flatten().tolist()
        if bad:
            raise ValueError(f"validation item {bad[0]} (source {sources[bad[0]]!r}) has the {name} {values[bad[0]]}")
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(sources):
        mine = torch.tensor([other == source for other in sources])
        weight = torch.ones(int(mine.sum()), dtype=torch.float64) if weights is None else weights[mine].double()
        for name, values in columns.items():
            metrics[f"val/{source}/{name}"] = float(values[mine].double() @ weight / weight.sum())
        metrics[f"val/{source}/n"] = float(mine.sum())
    return metrics
