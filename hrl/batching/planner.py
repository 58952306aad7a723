"""The driver's decision, once per stage and from lengths alone: which rank runs which rows, in which micro-batches.

Ranks never negotiate. A plan is a function of its arguments, so a rerun plans the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from hrl.batching.micro import Limits, MicroBatches, cut_micro_batches
from hrl.batching.plan import BatchPlan, MiniBatchPlan, RankPlan
from hrl.batching.rows import Rows, counts

Lengths = Sequence[int] | np.ndarray


def plan_forward(
    prompt_lens: Lengths,
    response_lens: Lengths,
    *,
    world_size: int,
    max_tokens: int | None,
    max_rows: int | None = None,
    group_ids: Sequence[Hashable] | np.ndarray | None = None,
    share_prefix: bool = False,
    budget_key: str = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
) -> BatchPlan:
    """Plan one pass over all rows without an optimizer step: log-probs, values, reward models.

    Args:
        prompt_lens: (B,) tokens of every prompt.
        response_lens: (B,) tokens of every response.
        world_size: Number of ranks.
        max_tokens: Hard cap on the tokens of a rank's micro-batch; None only together with `max_rows`.
        max_rows: Fixed number of rows per micro-batch.
        group_ids: (B,) group of every row (its `uid`); None makes every row a group.
        share_prefix: The rows of a group that share a micro-batch count (and compute) their prompt once.
        budget_key: The configuration key that an error about `max_tokens` names.

    Returns:
        A plan of exactly one mini-batch that holds every row once. Its counts take every response token as trained.

    Raises:
        ValueError: A row alone exceeds `max_tokens` (row, length, budget and key are named), or arguments don't fit.
    """
    limits = Limits.of(max_tokens, max_rows, budget_key)
    rows = Rows.of(prompt_lens, response_lens, group_ids, share_prefix)
    step = _plan_step(rows, np.arange(len(rows)), rows.response, None, world_size, limits)
    return _assemble(rows, [step], world_size, repeats=1)


def plan_update(
    prompt_lens: Lengths,
    response_lens: Lengths,
    trained_tokens: Lengths,
    *,
    world_size: int,
    mini_batch_rows: int,
    epochs: int,
    max_tokens: int | None,
    max_rows: int | None = None,
    group_ids: Sequence[Hashable] | np.ndarray | None = None,
    share_prefix: bool = False,
    skip: Sequence[bool] | np.ndarray | None = None,
    shuffle_seed: int | None = None,
    budget_key: str = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
) -> BatchPlan:
    """Plan the optimizer steps of a batch: `epochs` times over mini-batches of `mini_batch_rows` rows.

    Mini-batches are consecutive rows; where a cut would part a group it moves to the nearest end of a group. An epoch
    has ceil(B / mini_batch_rows) of them, or one per group if that is fewer. Each is balanced over the ranks by itself,
    since each is one synchronous step.

    Args:
        prompt_lens: As in `plan_forward`, like all arguments not named here.
        response_lens: (B,) tokens of every response, with those that are not trained on.
        trained_tokens: (B,) tokens of every response that are trained on, for the divisors of the loss.
        world_size: Number of ranks.
        mini_batch_rows: Rows per optimizer step, over all ranks.
        epochs: Passes over the batch.
        max_tokens: Hard cap on the tokens of a rank's micro-batch; None only together with `max_rows`.
        max_rows: Fixed number of rows per micro-batch.
        group_ids: (B,) group of every row; groups whose rows lie apart are brought together.
        share_prefix: The rows of a group that share a micro-batch count (and compute) their prompt once.
        skip: (B,) rows that can't move a weight. They count in the divisors and are neither sent nor run.
        shuffle_seed: Shuffle the groups before cutting, anew in each epoch; None keeps their order.
        budget_key: The configuration key that an error about `max_tokens` names.

    Returns:
        A plan with the mini-batches of all epochs, in order. A mini-batch that skips all its rows stays, as a step
        without micro-batches. A rank holds a row once, however many epochs run it.

    Raises:
        ValueError: As in `plan_forward`.
    """
    for name, number in (("mini_batch_rows", mini_batch_rows), ("epochs", epochs)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    limits = Limits.of(max_tokens, max_rows, budget_key)
    rows = Rows.of(prompt_lens, response_lens, group_ids, share_prefix)
    trained = counts(trained_tokens, "trained_tokens", num_rows=len(rows))[rows.index]
    if (trained > rows.response).any():
        row = int(rows.index[np.argmax(trained > rows.response)])
        raise ValueError(f"row {row} has more trained tokens than response tokens")
    left_out = None if skip is None else _mask(skip, len(rows))[rows.index]
    orders = [None] if shuffle_seed is None else [np.random.default_rng([shuffle_seed, e]) for e in range(epochs)]
    steps = [
        _plan_step(rows, positions, trained, left_out, world_size, limits)
        for order in orders
        for positions in _mini_batches(rows, mini_batch_rows, order)
    ]
    return _assemble(rows, steps, world_size, repeats=epochs if shuffle_seed is None else 1)


@dataclass(frozen=True)
class _Step:
    """One mini-batch before rows get their place on a rank."""

    ranks: MicroBatches
    num_tokens: int
    num_sequences: int
    num_groups: int


def _plan_step(
    rows: Rows,
    positions: np.ndarray,
    trained: np.ndarray,
    left_out: np.ndarray | None,
    world_size: int,
    limits: Limits,
) -> _Step:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    run = np.sort(positions if left_out is None else positions[~left_out[positions]])
    with_tokens = positions[trained[positions] > 0]
    return _Step(
        ranks=cut_micro_batches(rows, run, world_size, limits),
        num_tokens=int(trained[positions].sum()),
        num_sequences=len(with_tokens),
        num_groups=len(np.unique(rows.group[with_tokens])),
    )


def _mini_batches(rows: Rows, mini_batch_rows: int, order: np.random.Generator | None) -> list[np.ndarray]:
    """Cut the rows, their groups in order or shuffled, every `mini_batch_rows` rows or at the nearest end of a group.

    There are ceil(B / mini_batch_rows) mini-batches, or as many as there are groups if these are fewer: their number,
    and with it the learning rate's schedule, does not depend on the shuffle.
    """
    groups = rows.runs(np.arange(len(rows)))
    if not groups:
        return []
    if order is not None:
        groups = [groups[g] for g in order.permutation(len(groups))]
    ends = np.cumsum([len(group) for group in groups])
    number = min(-(-len(rows) // mini_batch_rows), len(groups))
    cut = np.arange(1, number)
    wanted = cut * mini_batch_rows
    after = np.searchsorted(ends, wanted)
    groups_before = np.where(wanted - ends[np.maximum(after - 1, 0)] < ends[after] - wanted, after, after + 1)
    # Between two cuts, and after the last, stands at least one group.
    groups_before = np.maximum.accumulate(np.maximum(groups_before, 1) - cut) + cut
    groups_before = np.minimum(groups_before, len(groups) - number + cut)
    return np.split(np.concatenate(groups), ends[groups_before - 1])


def _assemble(rows: Rows, steps: list[_Step], world_size: int, repeats: int) -> BatchPlan:
    """Give every rank the rows that its micro-batches name, in the order of their first use."""
    held, plans = [], []
    for rank in range(world_size):
        place: dict[int, int] = {}
        mini_batches = tuple(
            MiniBatchPlan(
                micro_batches=tuple(
                    tuple(place.setdefault(row, len(place)) for row in rows.index[micro_batch].tolist())
                    for micro_batch in step.ranks[rank]
                ),
                num_tokens=step.num_tokens,
                num_sequences=step.num_sequences,
                num_groups=step.num_groups,
            )
            for step in steps
        )
        held.append(tuple(place))
        plans.append(RankPlan(mini_batches * repeats))
    return BatchPlan(rows=tuple(held), ranks=tuple(plans))


def _mask(skip: Sequence[bool] | np.ndarray, num_rows: int) -> np.ndarray:
    mask = np.asarray(skip)
    if mask.shape != (num_rows,) or mask.dtype != bool:
        raise ValueError(f"skip must be {num_rows} booleans, got shape {mask.shape} of {mask.dtype}")
    return mask
