"""Balance of rows over ranks.

The rows of a batch are dealt out to data-parallel ranks so that no rank has much more to compute than the others.
verl's trainer computes each row's work from its length (L + L² / 24576, up to a factor) and calls an equal-size
Karmarkar-Karp with the tensor of these; hrl gets the same costs. verl needs as many rows on every rank, because its
dispatch cuts the batch into equal pieces; hrl sends rows by plan and needs that only for micro-batches of a fixed
number of rows: `equal sizes` is hrl under verl's constraint too. Both results are checked to hold every row once.
`overload` is by how much the heaviest rank, for which the others wait, is above the mean. Responses are log-normal
(median 1,000 tokens, at most 16,384), as those of reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench.harness import Case, Comparison
from bench.peers import VERL
from hrl.batching.balance import balance

AXIS = "rows"
SECONDS = 29
THREADS = 1
_Bins = list[list[int]]


def cases() -> Iterator[Case]:
    """Yield growth in rows at 16 rows a rank, growth in ranks at 8,192 rows, then both under verl's constraint."""
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    def case(rows: int, ranks: int, *, equal_size: bool = False, time: float | None = None, series: str = "") -> Case:
        work = calculate_workload(_lengths(rows))
        costs = work.numpy()

        def ours() -> _Bins:
            return balance(costs, ranks, equal_size=equal_size)

        def verl() -> _Bins:
            return get_seqlen_balanced_partitions(work, k_partitions=ranks, equal_size=True)

        def overloads() -> Iterator[Comparison]:
            label = f"{rows} rows, {ranks} ranks{', equal sizes' if equal_size else ''}"
            found = (100 * _overload(costs, bins) for bins in (ours(), verl()))
            # The target is a fifth of verl's overload while a rank has at most 32 rows.
            floor = 5.0 if time is not None else None
            yield Comparison(label, VERL, "overload in %", *found, floor)

        label = f"{rows} rows, {ranks} ranks{', equal sizes' if equal_size else ''}"
        x = None if not series else rows
        return Case(label, VERL, ours, verl, _check(rows, ranks, equal_size), time, x, series, others=overloads)

    for rows in (512, 1024, 2048, 4096, 8192):
        yield case(rows, rows // 16, time=50.0 if rows == 8192 else None, series="16 rows a rank")
    for ranks in (8, 64):
        yield case(8192, ranks)
    yield case(1024, 32, time=50.0)
    yield case(1024, 32, equal_size=True)
    yield case(8192, 512, equal_size=True)


def _lengths(rows: int) -> torch.Tensor:
    """Return prompt and response tokens of each row, int64 `(B,)`."""
    random = np.random.default_rng(rows)
    response = np.clip(np.exp(random.normal(np.log(1000), 0.8, rows)), 16, 16384)
    return torch.from_numpy(random.integers(64, 1024, rows) + response.astype(np.int64))


def _overload(costs: np.ndarray, bins: _Bins) -> float:
    loads = [costs[items].sum() for items in bins]
    return float(max(loads) / np.mean(loads) - 1)


def _check(rows: int, ranks: int, equal_size: bool) -> Callable[[_Bins, _Bins], None]:
    """Return a check that both deal out every row once; the partitions themselves differ."""

    def check(ours: _Bins, theirs: _Bins) -> None:
        for bins in (ours, theirs):
            assert len(bins) == ranks
            assert sorted(row for items in bins for row in items) == list(range(rows))
        assert not equal_size or {len(items) for items in ours} == {rows // ranks}

    return check
