"""Spread the rows of one mini-batch over ranks and cut each rank's share into micro-batches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hrl.batching.balance import balance, longest_first, pack
from hrl.batching.rows import Rows

_CLOSE_ENOUGH = (
    1.02  # heaviest rank over the mean at which groups are not cut further: each cut computes a prompt again
)

MicroBatches = list[list[np.ndarray]]  # per rank, per micro-batch: positions, ascending


@dataclass(frozen=True)
class Limits:
    """How large one rank's micro-batch may be, and the key that raises it.

    Attributes:
        max_tokens: Hard cap on its tokens.
        max_rows: Number of its rows (the last one has the rest), or None to fill it up to `max_tokens`.
        budget_key: Configuration key of `max_tokens`, for the error.
    """

    max_tokens: int
    max_rows: int | None
    budget_key: str

    @classmethod
    def of(cls, max_tokens: int | None, max_rows: int | None, budget_key: str) -> Limits:
        """Check the limits; no token budget at all is fine where the number of rows is fixed.

        Raises:
            ValueError: There is no limit, or one below 1.
        """
        if max_tokens is None and max_rows is None:
            raise ValueError("a micro-batch needs a limit: give max_tokens, max_rows or both")
        for name, limit in (("max_tokens", max_tokens), ("max_rows", max_rows)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be at least 1, got {limit}")
        return cls(sys.maxsize if max_tokens is None else max_tokens, max_rows, budget_key)

    def check(self, rows: Rows, positions: np.ndarray) -> None:
        """Raise a ValueError that names the first row which alone exceeds the token budget."""
        tokens = (rows.prompt + rows.response)[positions]
        too_long = rows.index[positions[tokens > self.max_tokens]]
        if len(too_long):
            row = int(too_long.min())
            length = int(tokens[rows.index[positions] == row][0])
            raise ValueError(
                f"row {row} alone has {length} tokens, more than the {self.max_tokens} that one micro-batch may hold; "
                f"set {self.budget_key} to at least {length}, or shorten prompts or responses"
            )


def cut_micro_batches(rows: Rows, positions: np.ndarray, world_size: int, limits: Limits) -> MicroBatches:
    """Cut one mini-batch: every position once, as many micro-batches on every rank, none above the limits.

    Ranks are balanced first, because all of them wait for the slowest; then each rank's micro-batches, because ranks
    meet in every layer of every micro-batch; the costliest comes first on every rank, so that equals meet.
    """
    limits.check(rows, positions)
    if not len(positions):
        return [[] for _ in range(world_size)]
    if limits.max_rows is not None:
        shares = _share_by_count(rows, positions, world_size)
        ranks = [list(_in_order(rows, share, limits.max_rows, limits.max_tokens)) for share in shares]
    else:
        ranks = _pack_ranks(rows, _share_by_cost(rows, positions, world_size, limits.max_tokens), limits.max_tokens)
    steps = max(map(len, ranks))
    nothing = np.zeros(0, dtype=np.int64)
    return [share + [nothing] * (steps - len(share)) for share in ranks]


def _share_by_cost(rows: Rows, positions: np.ndarray, world_size: int, max_tokens: int) -> list[list[np.ndarray]]:
    """Give every rank units (rows of one group that stay together) of about the same cost.

    Whole groups are cheapest, as each computes its prompt once; where they are too few or too unlike to balance, they
    are cut into 2, 4, ... parts, as long as the heaviest rank gets lighter by it.
    """
    groups = rows.runs(positions) if rows.share_prefix else list(positions[:, None])
    largest = max((len(group) for group in groups), default=0)
    parts, lightest, shares = 1, np.inf, []
    while True:
        units = _cut_groups(rows, groups, parts, max_tokens)
        cost = rows.cost(units)
        bins = balance(cost, world_size)
        heaviest = max(float(cost[units_of_rank].sum()) for units_of_rank in bins)
        if heaviest < lightest:
            lightest, shares = heaviest, [[units[u] for u in units_of_rank] for units_of_rank in bins]
        if parts >= largest or heaviest <= _CLOSE_ENOUGH * cost.sum() / world_size:
            return shares
        parts *= 2


def _cut_groups(rows: Rows, groups: list[np.ndarray], parts: int, max_tokens: int) -> list[np.ndarray]:
    """Cut every group into at most `parts` units of about equal length, and into more where the budget asks for it."""
    units = groups if parts == 1 else [unit for group in groups for unit in _split_evenly(rows, group, parts)]
    fits = rows.tokens(units) <= max_tokens
    return [
        unit
        for whole, fit in zip(units, fits, strict=True)
        for unit in ([whole] if fit else _split_to_fit(rows, whole, max_tokens))
    ]


def _split_evenly(rows: Rows, group: np.ndarray, parts: int) -> list[np.ndarray]:
    if parts >= len(group):
        return list(group[:, None])
    return [np.sort(group[part]) for part in longest_first(rows.response[group], parts)]


def _split_to_fit(rows: Rows, group: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    room = max_tokens - int(rows.prompt[group[0]])
    return [np.sort(group[part]) for part in pack(rows.response[group], room)]


def _pack_ranks(rows: Rows, shares: list[list[np.ndarray]], max_tokens: int) -> MicroBatches:
    """Pack each rank's units into the number of micro-batches that the fullest rank needs, evenly where they fit so."""
    tokens = [rows.tokens(units) for units in shares]
    packed = [pack(of_rank, max_tokens) for of_rank in tokens]
    steps = max(map(len, packed))
    ranks = []
    for units, of_rank, bins in zip(shares, tokens, packed, strict=True):
        cost = rows.cost(units)
        if steps > 1:
            even = [part for part in longest_first(cost, steps) if part]
            bins = even if all(of_rank[part].sum() <= max_tokens for part in even) else bins
        bins = sorted(bins, key=lambda part: -cost[part].sum())
        ranks.append([np.sort(np.concatenate([units[u] for u in part])) for part in bins])
    return ranks


def _share_by_count(rows: Rows, positions: np.ndarray, world_size: int) -> list[np.ndarray]:
    """Give every rank as many rows (to within one) of about the same cost; whole groups where they come out even."""
    units = rows.runs(positions) if rows.share_prefix else []
    if len(units) % world_size or len({len(unit) for unit in units}) != 1:
        units = list(positions[:, None])
    bins = balance(rows.cost(units), world_size, equal_size=True)
    return [np.sort(np.concatenate([units[u] for u in share])) if share else positions[:0] for share in bins]


def _in_order(rows: Rows, share: np.ndarray, max_rows: int, max_tokens: int) -> Iterator[np.ndarray]:
    """Cut a rank's rows into runs of `max_rows`, shorter where the token budget ends a run."""
    start = 0
    while start < len(share):
        end = min(start + max_rows, len(share))
        while rows.num_tokens(share[start:end]) > max_tokens:
            end -= 1
        yield share[start:end]
        start = end
