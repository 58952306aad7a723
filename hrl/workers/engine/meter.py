"""What an update measures, collected on the device and fetched once: to fetch is to wait until it is computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hrl.metrics import Metric
from hrl.workers.engine.nonfinite import names_of_nonfinite

#: `torch.quantile` takes no more numbers than this.
QUANTILE_LIMIT = 1 << 24


@dataclass(frozen=True)
class SpreadNames:
    """What the spread of a collection of numbers is called: their mean, 99th percentile and maximum."""

    mean: str
    p99: str
    max: str


class Meter:
    """Collects (sum, count) pairs and numbers whose spread is reported.

    Args:
        world_size: Ranks that measure the same update.
        num_mini_batches: Its optimizer steps.
    """

    def __init__(self, world_size: int = 1, num_mini_batches: int = 1) -> None:
        self.world_size = world_size
        self._num_mini_batches = num_mini_batches
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._spreads: dict[SpreadNames, list[Tensor]] = {}

    def add(self, name: str, total: Tensor, count: Tensor | float) -> None:
        """Add to a mean over tokens or rows."""
        total = total.detach()
        old = self._sums.get(name)
        if not isinstance(count, Tensor):  # filled in on the device, not copied to it
            count = torch.full((), float(count), dtype=total.dtype, device=total.device)
        count = count.to(total)
        self._sums[name] = (total, count) if old is None else (old[0] + total, old[1] + count)

    def add_all(self, metrics: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Add (sum, count) pairs by name."""
        for name, (total, count) in metrics.items():
            self.add(name, total, count)

    def add_share(self, name: str, share: Tensor) -> None:
        """Add a share of a mini-batch's loss: summed over micro-batches and ranks, averaged over mini-batches."""
        self.add(name, share, 0.0)
        total, _ = self._sums[name]
        self._sums[name] = (total, torch.full_like(total, self._num_mini_batches / self.world_size))

    def add_spread(self, names: SpreadNames, numbers: Tensor) -> None:
        """Collect numbers `(n,)`."""
        self._spreads.setdefault(names, []).append(numbers)

    def nonfinite(self) -> tuple[str, ...]:
        """Return the names of what is not finite by now."""
        spreads = {names.mean: torch.cat(parts) for names, parts in self._spreads.items()}
        return names_of_nonfinite({name: total for name, (total, _) in self._sums.items()} | spreads)

    def metrics(self) -> dict[str, Metric]:
        """Return everything by name, after one wait."""
        parts = [torch.stack(pair).double() for pair in self._sums.values()]
        spreads = {names: torch.cat(numbers).double() for names, numbers in self._spreads.items()}
        spreads = {names: numbers for names, numbers in spreads.items() if numbers.numel() > 0}
        for numbers in spreads.values():
            p99 = torch.quantile(numbers[:QUANTILE_LIMIT], 0.99)
            parts.append(torch.stack([numbers.sum(), p99, numbers.max()]))
        found = iter(torch.cat(parts).tolist() if parts else [])
        metrics = {name: Metric.mean(next(found), next(found)) for name in self._sums}
        for names, numbers in spreads.items():
            metrics[names.mean] = Metric.mean(next(found), numbers.numel())
            # Over several ranks the largest of their 99th percentiles, which is not below that of all tokens.
            metrics[names.p99] = Metric.max(next(found))
            metrics[names.max] = Metric.max(next(found))
        return metrics
