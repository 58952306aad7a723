"""What the ranks of a model compute in a pass over some rows: packed ones, or padded ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np

from hrl.batching.padded import cut_padded
from hrl.models.flops import ModelFlops
from hrl.plan.workload import Workload


@dataclass(frozen=True)
class Pass:
    """A forward over some rows. All numbers are means, since the rows of a mini-batch are.

    Attributes:
        tokens: Through the layers, of all ranks; of padded rows with what fills them.
        pairs: Query–key pairs, likewise.
        head_tokens: Through the head.
        micro_batches: Of one group of ranks.
        fullest: Tokens of the group with the most over the mean of all. Groups that run padded rows wait for each other
            in every micro-batch, and the most of each count.
    """

    tokens: float
    pairs: float
    head_tokens: float
    micro_batches: int
    fullest: float

    @classmethod
    def packed(cls, work: Workload, groups: int, budget: int) -> Pass:
        """Return a pass over packed rows.

        Args:
            work: The rows.
            groups: How many micro-batches run at once.
            budget: Tokens of the largest micro-batch.
        """
        tokens = work.packed_tokens(groups, budget)
        longest = work.prompt + work.longest_of(work.sequences)
        return cls(
            tokens=tokens,
            pairs=work.pairs(groups, budget),
            head_tokens=work.sequences * work.sampled,
            micro_batches=ceil(tokens / groups / budget),
            fullest=longest / (tokens / groups),
        )

    @classmethod
    def padded(cls, work: Workload, groups: int, budget: int | None, max_rows: int | None) -> Pass:
        """Return a pass over padded rows, in the micro-batches that a run would cut.

        The rows are those at the middles of as many quantiles as there are rows, all with a prompt of the mean length.

        Args:
            work: The rows.
            groups: As of `packed`.
            budget: Tokens of the largest micro-batch with filling; None where only the number of rows is fixed.
            max_rows: Rows of a micro-batch; None fills it up to the budget.
        """
        return _padded(work, groups, budget, max_rows)

    def flops(self, of_token: ModelFlops) -> tuple[float, float]:
        """Return the FLOPs of the layers, and of the head on what was sampled."""
        return (
            of_token.per_token * self.tokens + of_token.per_pair * self.pairs,
            of_token.per_head_token * self.head_tokens,
        )


@lru_cache(maxsize=256)  # a search asks for the same passes in hundreds of layouts
def _padded(work: Workload, groups: int, budget: int | None, max_rows: int | None) -> Pass:
    rows = max(1, round(work.sequences))
    quantiles = (np.arange(rows) + 0.5) / rows
    length = np.rint(work.prompt + work.longest * quantiles**work.tail).astype(np.int64)
    # A row above what a micro-batch holds is refused by a run.
    most = sys.maxsize if budget is None else max(int(length.max()), budget)
    cut = cut_padded(length, groups, max_tokens=most, max_rows=max_rows)
    sizes = np.array([[len(picked) for picked in rank] for rank in cut], np.float64)
    widths = np.array([[length[picked].max(initial=0) for picked in rank] for rank in cut], np.float64)
    tokens, part = sizes * widths, work.sequences / rows
    return Pass(
        tokens=part * float(tokens.sum()),
        pairs=part * float((tokens * (widths + 1.0)).sum()) / 2.0,
        head_tokens=work.sequences * work.sampled,
        micro_batches=len(cut[0]),
        fullest=float(tokens.max(axis=0).sum()) * groups / float(tokens.sum()),
    )
