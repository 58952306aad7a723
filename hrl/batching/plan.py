"""What the driver decides about a batch: which rank runs which rows, in which micro-batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MiniBatchPlan:
    """One optimizer step (or one plain forward) as one rank sees it.

    Attributes:
        micro_batches: Positions into the rank's own rows. Every rank has the same number of micro-batches, so that no
            collective is left alone; `()` is an empty one, which takes part in collectives and weighs nothing. A
            mini-batch whose rows were all left out has no micro-batch at all and is still one optimizer step.
        num_tokens: Trained tokens of the whole mini-batch over all ranks, rows that were left out included.
        num_sequences: Rows with at least one trained token, counted likewise; an episode of several rows is one.
        num_groups: Groups with at least one such row, counted likewise.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    num_tokens: int
    num_sequences: int
    num_groups: int


@dataclass(frozen=True)
class RankPlan:
    """What one rank runs, in order. A plain forward has exactly one mini-batch.

    Attributes:
        mini_batches: Of rows of the rank.
        is_tree: The rows of a micro-batch compute all that they have in common at their beginning once, however deep;
            else equal prompts alone.
    """

    mini_batches: tuple[MiniBatchPlan, ...]
    is_tree: bool = False

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.mini_batches)


@dataclass(frozen=True)
class BatchPlan:
    """Which rows every rank holds and what it runs.

    Attributes:
        rows: Per rank the indices into the whole batch, in the order in which the rank holds them, each at most once.
        ranks: Per rank what it runs.
        ranks_each: So many consecutive ranks run each entry of `rows` and `ranks` together, as a sequence group, and
            the first of them answers for all. With more than one, "rank" stands for such a group here.

    Raises:
        ValueError: The ranks differ in their number of mini-batches, micro-batches or counts: one of them would wait in
            a collective for ever.
    """

    rows: tuple[tuple[int, ...], ...]
    ranks: tuple[RankPlan, ...]
    ranks_each: int = 1

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps, the same on every rank."""
        return self.ranks[0].num_steps

    def __post_init__(self) -> None:
        if not self.ranks or len(self.rows) != len(self.ranks):
            raise ValueError(f"a plan needs rows for each of its ranks, got {len(self.rows)} for {len(self.ranks)}")
        expected = _collective_shape(self.ranks[0])
        for rank, plan in enumerate(self.ranks):
            if _collective_shape(plan) != expected:
                raise ValueError(
                    f"rank {rank} would run {_collective_shape(plan)} and rank 0 {expected} "
                    "(micro-batches, tokens, sequences, groups of every mini-batch): all ranks must agree"
                )


def _collective_shape(plan: RankPlan) -> list[tuple[int, int, int, int]]:
    return [(len(m.micro_batches), m.num_tokens, m.num_sequences, m.num_groups) for m in plan.mini_batches]
