"""The driver's decision, once per stage and from lengths: which rank runs which rows, in which micro-batches.

Ranks never negotiate. A plan is a function of its arguments, so a rerun plans the same.

The samples of a group compute their prompt once. Rows of episodes of several turns have more in common than that, or
less: branches of an episode share most of it, and their prompts may differ. How much is read from their tokens, once
for a batch (`Trie`), and then the rows of a group are planned as a tree: cuts go where rows have the least in common.

Rows of a model that can't run packed ones share nothing; they are padded, and planned by length (`cut_padded`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count, islice, pairwise
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from hrl.algos.numbering import number_groups
from hrl.batching.balance import balance, longest_first, pack
from hrl.batching.episodes import episode_numbers
from hrl.batching.padded import cut_padded
from hrl.batching.plan import BatchPlan, MiniBatchPlan, RankPlan
from hrl.batching.trie import Trie

if TYPE_CHECKING:
    from torch import Tensor

    from hrl.protocol import DataProto

Lengths = Sequence[int] | np.ndarray

# Matrix products cost in proportion to L, attention to L²; they are equal at a length of 6 hidden sizes: 24,576 tokens
# for a model of 7B parameters (hidden size 4096). Smaller models meet earlier, at lengths where L² is small anyway.
EQUAL_COST_TOKENS = 24576

# Heaviest rank over the mean at which groups are not cut further: each cut computes a prompt again.
_CLOSE_ENOUGH = 1.02

_Units = Sequence[np.ndarray] | np.ndarray  # rows of one group that stay together; (n, 1) where each is one row
_MicroBatches = list[list[np.ndarray]]  # per rank, per micro-batch: positions, ascending


def lengths_of(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Return the tokens of prompt and response, int64 (B,) each: from the mask, never from token ids.

    Args:
        batch: `attention_mask (B, P+R)` and `responses (B, R)`.
    """
    mask = batch.batch["attention_mask"]
    prompt_width = mask.shape[-1] - batch.batch["responses"].shape[-1]
    return mask[:, :prompt_width].sum(-1), mask[:, prompt_width:].sum(-1)


@dataclass(frozen=True)
class RowLengths:
    """Lengths and groups of a batch's rows, in an order in which the rows of a group are neighbours.

    All methods take positions in this order; `index` leads back to the batch. The rows of a unit (see `tokens`) are of
    one group and ascend.

    Attributes:
        index: (B,) row number in the batch.
        prompt: (B,) tokens of the prompt.
        response: (B,) tokens of the response.
        trained: (B,) tokens of the response that are trained on, for the divisors of the loss.
        group: (B,) number of the group, by first appearance in the batch.
        share_prefix: The rows of a group that run together compute once what they have in common at their beginning.
        shared: (B,) tokens that a row has in common with the one before it, as `Trie` has them. None where a group's
            rows have their prompt in common and no more is looked for.
        episode: (B,) number of the episode that a row is a branch of; None where every row is one.
        is_padded: The rows of a micro-batch are padded to the longest of them, and share nothing.
    """

    index: np.ndarray
    prompt: np.ndarray
    response: np.ndarray
    trained: np.ndarray
    group: np.ndarray
    share_prefix: bool
    shared: np.ndarray | None = None
    episode: np.ndarray | None = None
    is_padded: bool = False

    @classmethod
    def of(
        cls,
        prompt_lens: Lengths,
        response_lens: Lengths,
        trained_tokens: Lengths,
        group_ids: Sequence[Hashable] | np.ndarray | None,
        share_prefix: bool,
        trie: Trie | None = None,
        episode_ids: np.ndarray | None = None,
        *,
        is_padded: bool = False,
    ) -> RowLengths:
        """Check the lengths and sort the rows by group.

        Args:
            prompt_lens: (B,) tokens of every prompt.
            response_lens: (B,) tokens of every response, with those that are not trained on.
            trained_tokens: (B,) tokens of every response that are trained on.
            group_ids: (B,) group of every row (its `uid`); None makes every row a group.
            share_prefix: The rows of a group that share a micro-batch count (and compute) their prompt once.
            trie: What the rows of each group have in common instead; it is read where `share_prefix` is set. Without
                it, rows of a group whose prompts are of one length have one prompt.
            episode_ids: (B,) codes of the episode of every row, all of one group; None makes every row an episode.
            is_padded: The rows of a micro-batch are padded to the longest of them.

        Raises:
            ValueError: The lengths are not (B,) counts, a response has more trained tokens than tokens, or padded rows
                share prefixes.
        """
        if is_padded and share_prefix:
            raise ValueError("padded rows share no prefix")
        prompt = _counts(prompt_lens, "prompt_lens")
        response = _counts(response_lens, "response_lens", num_rows=len(prompt))
        trained = _counts(trained_tokens, "trained_tokens", num_rows=len(prompt))
        if (trained > response).any():
            raise ValueError(f"row {int(np.argmax(trained > response))} has more trained tokens than response tokens")
        group = _group_numbers(group_ids, len(prompt))
        index = np.argsort(group, kind="stable")
        shared = None
        if share_prefix and trie is not None:
            index, shared = trie.order, trie.shared
        elif share_prefix and (prompt[index] != prompt[index][np.searchsorted(group[index], group[index])]).any():
            index = np.lexsort((prompt, group))
            is_like_before = (np.diff(group[index]) == 0) & (np.diff(prompt[index]) == 0)
            shared = np.append(False, is_like_before) * prompt[index]
        episode = None if episode_ids is None else episode_ids[index]
        sizes = prompt[index], response[index], trained[index]
        return cls(index, *sizes, group[index], share_prefix, shared, episode, is_padded)

    def __len__(self) -> int:
        return len(self.index)

    def tokens(self, units: _Units) -> np.ndarray:
        """Return the tokens that each unit (rows of one group) runs."""
        if self.shared is not None:
            return self._sum_of_tree(units, np.asarray)
        return self._sum(units, self.prompt, self.response)

    def cost(self, units: _Units) -> np.ndarray:
        """Return what each unit (rows of one group) costs, in tokens of a short row: L + L² / 24576.

        A shared prompt is paid once; each response attends to it, hence (P + R)² - P² for the response's part. The same
        holds for all that a row of a tree has in common with others.
        """
        if self.shared is not None:
            return self._sum_of_tree(units, _cost)
        return self._sum(units, *self._costs)

    @cached_property
    def _costs(self) -> tuple[np.ndarray, np.ndarray]:
        of_prompt = _cost(self.prompt)
        return of_prompt, _cost(self.prompt + self.response) - of_prompt

    def _sum(self, units: _Units, of_prompt: np.ndarray, of_response: np.ndarray) -> np.ndarray:
        rows = _flat(units)
        if len(rows) == len(units):  # each unit is one row
            return of_prompt[rows] + of_response[rows]
        starts = _starts(units)
        prompts = of_prompt[rows[starts]] if self.share_prefix else np.add.reduceat(of_prompt[rows], starts)
        return prompts + np.add.reduceat(of_response[rows], starts)

    def _sum_of_tree(self, units: _Units, weigh: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        rows, starts = _flat(units), _starts(units)
        common = self.in_common(rows)
        common[starts] = 0
        return np.add.reduceat(weigh(self.prompt[rows] + self.response[rows]) - weigh(common), starts)

    def in_common(self, positions: np.ndarray) -> np.ndarray:
        """Return the tokens that each row has in common with the one before it among these; 0 for the first.

        Only where positions ascend is that so; elsewhere the number means nothing.
        """
        before, here = positions[:-1], positions[1:]
        common = np.zeros(len(positions), np.int64)
        if self.shared is not None:
            # Two rows have in common the least of what neighbours between them have.
            ends = np.stack([before, here], axis=1).reshape(-1) + 1
            common[1:] = np.minimum.reduceat(np.append(self.shared, 0), ends)[::2]
        elif self.share_prefix:
            common[1:] = np.where(self.group[here] == self.group[before], self.prompt[here], 0)
        return common

    def subtrees(self, run: np.ndarray) -> tuple[list[np.ndarray], int]:
        """Cut two or more ascending rows of a group where they have the least in common; also return that least."""
        common = self.in_common(run)[1:]
        least = int(common.min())
        return np.split(run, np.flatnonzero(common == least) + 1), least

    def runs(self, positions: np.ndarray) -> list[np.ndarray]:
        """Cut ascending positions where the group changes."""
        return np.split(positions, np.flatnonzero(np.diff(self.group[positions])) + 1) if len(positions) else []

    def num_samples(self, positions: np.ndarray) -> int:
        """Return how many responses these rows are, where an episode of several rows is one."""
        return len(positions if self.episode is None else np.unique(self.episode[positions]))


def _cost(tokens: np.ndarray) -> np.ndarray:
    """Return what sequences of so many tokens cost, float64."""
    length = tokens.astype(np.float64)
    return length + length**2 / EQUAL_COST_TOKENS


@dataclass(frozen=True)
class MicroBatchLimits:
    """How large a micro-batch may be, how many ranks run it together, and the key that raises it.

    Attributes:
        max_tokens: Hard cap on its tokens, of all ranks that run it; `None` only together with `max_rows`.
        max_rows: Fixed number of its rows (the last one has the rest), pairs where pairs are planned; `None` to fill
            it up to `max_tokens`.
        budget_key: The configuration key of `max_tokens`, for errors.
        ranks: Consecutive ranks that run each micro-batch together.
        slices: Into how many parts its tokens are cut over these ranks; None is one for each.
    """

    max_tokens: int | None
    max_rows: int | None
    budget_key: str
    ranks: int = 1
    slices: int | None = None

    @property
    def token_cap(self) -> int:
        """`max_tokens`, or a number that no micro-batch reaches."""
        return sys.maxsize if self.max_tokens is None else self.max_tokens

    def check(self) -> None:
        """Check the limits; no token budget at all is fine where the number of rows is fixed.

        Raises:
            ValueError: There is no limit, or one below 1.
        """
        if self.max_tokens is None and self.max_rows is None:
            raise ValueError("a micro-batch needs a limit: give max_tokens, max_rows or both")
        for name, limit in (("max_tokens", self.max_tokens), ("max_rows", self.max_rows), ("ranks", self.ranks)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be at least 1, got {limit}")

    def least_budget(self, tokens: int) -> int:
        """Return what `budget_key`, which counts tokens of one rank, has to be for a micro-batch of so many tokens."""
        return -(-tokens // (self.ranks if self.slices is None else self.slices))

    def sequence_groups(self, world_size: int) -> int:
        """Return how many micro-batches run at once on so many ranks.

        Raises:
            ValueError: The ranks that run a micro-batch together don't divide them.
        """
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        if world_size % self.ranks:
            raise ValueError(
                f"{world_size} ranks do not make groups of {self.ranks}: set ulysses_sequence_parallel_size or "
                "tensor_parallel_size to a divisor of their number"
            )
        return world_size // self.ranks

    def check_rows(self, rows: RowLengths, positions: np.ndarray) -> None:
        """Raise a ValueError that names the first row which alone exceeds the token budget."""
        tokens = (rows.prompt + rows.response)[positions]
        too_long = rows.index[positions[tokens > self.token_cap]]
        if len(too_long):
            row = int(too_long.min())
            length = int(tokens[rows.index[positions] == row][0])
            raise ValueError(
                f"row {row} alone has {length} tokens, more than the {self.token_cap} that one micro-batch may hold; "
                f"set {self.budget_key} to at least {self.least_budget(length)}, or shorten prompts or responses"
            )


@dataclass(frozen=True)
class Planner:
    """Plans a batch for the worker groups.

    Attributes:
        share_prefix: The samples of a group compute their prompt once; rows of episodes of several turns compute once
            all that they have in common at their beginning.
        packs_rows: Rows of a micro-batch are packed into one; else they are padded, and share nothing.
    """

    share_prefix: bool
    packs_rows: bool = True
    _last_trie: list[tuple[list[ref[Any]], Trie]] = field(default_factory=list, repr=False, compare=False)

    def forward(self, batch: DataProto, world_size: int, limits: MicroBatchLimits) -> BatchPlan:
        """Plan one pass over every row, balanced over ranks: for log-probs, values and reward models."""
        return plan_forward(self._rows(batch), world_size, limits)

    def update(
        self,
        batch: DataProto,
        world_size: int,
        limits: MicroBatchLimits,
        *,
        mini_batch_rows: int,
        epochs: int,
        skip: np.ndarray | None = None,
        shuffle_seed: int | None = None,
    ) -> BatchPlan:
        """Plan `epochs` passes over mini-batches of `mini_batch_rows` rows; rows in `skip` count and are not run.

        An episode counts as one row, however many it has.
        """
        return plan_update(
            self._rows(batch),
            world_size,
            limits,
            mini_batch_rows=mini_batch_rows,
            epochs=epochs,
            skip=skip,
            shuffle_seed=shuffle_seed,
        )

    def pairs(
        self,
        batch: DataProto,
        world_size: int,
        limits: MicroBatchLimits,
        *,
        mini_batch_pairs: int,
        epochs: int = 1,
    ) -> BatchPlan:
        """Plan as `update` does, where rows 2i and 2i + 1 are a pair; `limits.max_rows` counts pairs."""
        rows = self._rows(batch, grouped=False)  # the rows of a pair are known by their places
        return plan_pairs(rows, world_size, limits, mini_batch_pairs=mini_batch_pairs, epochs=epochs)

    def shared_tokens(self, batch: DataProto, plan: BatchPlan) -> float | None:
        """Return the share of a plan's tokens that are not computed, as other rows of a micro-batch have them too.

        Args:
            batch: That was planned.
            plan: Of this planner.

        Returns:
            None where rows are no trees, or none is run.
        """
        if not plan.ranks[0].is_tree or not any(map(len, plan.rows)):
            return None
        rows = self._rows(batch)
        place = np.argsort(rows.index)
        # Of a tree a unit may be a whole micro-batch: rows of two groups have nothing in common.
        units = [
            np.sort(place[[held[at] for at in picked]])
            for held, rank in zip(plan.rows, plan.ranks, strict=True)
            for mini_batch in rank.mini_batches
            for picked in mini_batch.micro_batches
            if picked
        ]
        return 1.0 - float(rows.tokens(units).sum() / (rows.prompt + rows.response)[_flat(units)].sum())

    def _rows(self, batch: DataProto, *, grouped: bool = True) -> RowLengths:
        groups = batch.non_tensor_batch["uid"] if grouped else None
        shares = self.share_prefix and self.packs_rows
        trie = self.trie(batch) if grouped and shares and _has_turns(batch) else None
        trained = batch.batch["response_mask"].sum(-1)
        episodes = episode_numbers(batch) if grouped else None
        lengths = lengths_of(batch)
        return RowLengths.of(*lengths, trained, groups, shares, trie, episodes, is_padded=not self.packs_rows)

    def trie(self, batch: DataProto) -> Trie:
        """Return what the rows of the groups have in common, read once for all stages of a step."""
        columns = [batch.batch[name] for name in ("prompts", "responses", "attention_mask")]
        source = [*columns, batch.non_tensor_batch["uid"]]
        # The stages add columns to the batch and leave these as they are, the same tensors.
        for of, trie in self._last_trie:
            if all(one() is other for one, other in zip(of, source, strict=True)):
                return trie
        prompts, responses, mask = (column.numpy() for column in columns)
        tokens = np.concatenate([prompts, responses], axis=1, dtype=np.int32)
        mask = mask.astype(bool)
        sequences = np.split(tokens[mask], np.cumsum(mask.sum(1))[:-1])
        trie = Trie.of(sequences, _group_numbers(source[-1], len(mask)))
        self._last_trie[:] = [([ref(one) for one in source], trie)]
        return trie


def _has_turns(batch: DataProto) -> bool:
    """Return whether an episode of the batch has several turns; a single one is a prompt and its response."""
    turns = batch.non_tensor_batch.get("num_turns")
    return turns is not None and bool((turns > 1).any())


def rows_of_first_step(plan: BatchPlan) -> list[int]:
    """Return the rows of the batch that the first optimizer step of an update runs, over all ranks."""
    return [
        held[place]
        for held, rank in zip(plan.rows, plan.ranks, strict=True)
        for mini_batch in rank.mini_batches[:1]
        for micro_batch in mini_batch.micro_batches
        for place in micro_batch
    ]


def plan_generation(group_ids: np.ndarray, world_size: int, tensor_parallel_size: int) -> BatchPlan:
    """Give whole groups, in turn, to the ranks that drive an engine; their tensor-parallel peers get no row.

    Args:
        group_ids: (B,) the uid of every row.
        world_size: Ranks of the rollout's worker group.
        tensor_parallel_size: Ranks that form one engine; the first of them drives it.
    """
    leaders = range(0, world_size, tensor_parallel_size)
    _, first, group = np.unique(group_ids, return_index=True, return_inverse=True)
    order_of_appearance = np.argsort(np.argsort(first))[group]
    engine = order_of_appearance * len(leaders) // len(first)
    rows = [tuple(np.flatnonzero(engine == k).tolist()) for k in range(len(leaders))]
    per_rank = tuple(rows[rank // tensor_parallel_size] if rank in leaders else () for rank in range(world_size))
    return BatchPlan(rows=per_rank, ranks=(RankPlan(mini_batches=()),) * world_size)


def plan_forward(rows: RowLengths, world_size: int, limits: MicroBatchLimits) -> BatchPlan:
    """Plan one pass over all rows without an optimizer step: log-probs, values, reward models.

    Args:
        rows: All rows of the batch.
        world_size: Number of ranks.
        limits: Of a micro-batch, and how many ranks run it.

    Returns:
        A plan of exactly one mini-batch that holds every row once. Its counts take every response token as trained.

    Raises:
        ValueError: A row alone exceeds the token budget (row, length, budget, key are named), or arguments don't fit.
    """
    step = _plan_step(rows, np.arange(len(rows)), rows.response, None, world_size, limits)
    return _assemble(rows, [step], world_size, limits, repeats=1)


def plan_update(
    rows: RowLengths,
    world_size: int,
    limits: MicroBatchLimits,
    *,
    mini_batch_rows: int,
    epochs: int,
    skip: Sequence[bool] | np.ndarray | None = None,
    shuffle_seed: int | None = None,
) -> BatchPlan:
    """Plan the optimizer steps of a batch: `epochs` times over mini-batches of `mini_batch_rows` rows.

    Mini-batches are consecutive rows, those of a group brought together; where a cut would part a group it moves to
    the nearest end of a group. An epoch has ceil(B / mini_batch_rows) of them, or one per group if that is fewer. Each
    is balanced over the ranks by itself, since each is one synchronous step. An episode counts as one row here, however
    many it has: their number is the chat template's doing and must not change the number of optimizer steps.

    Args:
        rows: All rows of the batch.
        world_size: Number of ranks.
        limits: Of a micro-batch, and how many ranks run it.
        mini_batch_rows: Rows per optimizer step, over all ranks; of an episode of several rows only one counts.
        epochs: Passes over the batch.
        skip: (B,) rows that can't move a weight. They count in the divisors and are neither sent nor run.
        shuffle_seed: Shuffle the groups before cutting, anew in each epoch; None keeps their order.

    Returns:
        A plan with the mini-batches of all epochs, in order. A mini-batch that skips all its rows stays, as a step
        without micro-batches. A rank holds a row once, however many epochs run it.

    Raises:
        ValueError: As in `plan_forward`.
    """
    for name, number in (("mini_batch_rows", mini_batch_rows), ("epochs", epochs)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    left_out = None if skip is None else _mask(skip, len(rows))[rows.index]
    orders = [None] if shuffle_seed is None else [np.random.default_rng([shuffle_seed, e]) for e in range(epochs)]
    steps = [
        _plan_step(rows, positions, rows.trained, left_out, world_size, limits)
        for order in orders
        for positions in _mini_batches(rows, mini_batch_rows, order)
    ]
    return _assemble(rows, steps, world_size, limits, repeats=epochs if shuffle_seed is None else 1)


@dataclass(frozen=True)
class _Step:
    """One mini-batch before rows get their place on a rank."""

    ranks: _MicroBatches
    num_tokens: int
    num_sequences: int
    num_groups: int


def _plan_step(
    rows: RowLengths,
    positions: np.ndarray,
    trained: np.ndarray,
    left_out: np.ndarray | None,
    world_size: int,
    limits: MicroBatchLimits,
) -> _Step:
    limits.check()
    sequence_groups = limits.sequence_groups(world_size)
    run = np.sort(positions if left_out is None else positions[~left_out[positions]])
    with_tokens = positions[trained[positions] > 0]
    return _Step(
        ranks=_cut_micro_batches(rows, run, sequence_groups, limits),
        num_tokens=int(trained[positions].sum()),
        num_sequences=rows.num_samples(with_tokens),
        num_groups=int(np.count_nonzero(np.bincount(rows.group[with_tokens]))),
    )


def _mini_batches(rows: RowLengths, mini_batch_rows: int, order: np.random.Generator | None) -> list[np.ndarray]:
    """Cut the rows, their groups in order or shuffled, every `mini_batch_rows` rows or at the nearest end of a group.

    There are ceil(B / mini_batch_rows) mini-batches, or as many as there are groups if these are fewer: their number,
    and with it the learning rate's schedule, does not depend on the shuffle.
    """
    groups = rows.runs(np.arange(len(rows)))
    if not groups:
        return []
    if order is not None:
        groups = [groups[g] for g in order.permutation(len(groups))]
    ends = np.cumsum([rows.num_samples(group) for group in groups])
    number = min(-(-int(ends[-1]) // mini_batch_rows), len(groups))
    cut = np.arange(1, number)
    wanted = cut * mini_batch_rows
    after = np.searchsorted(ends, wanted)
    groups_before = np.where(wanted - ends[np.maximum(after - 1, 0)] < ends[after] - wanted, after, after + 1)
    # Between two cuts, and after the last, stands at least one group.
    groups_before = np.maximum.accumulate(np.maximum(groups_before, 1) - cut) + cut
    groups_before = np.minimum(groups_before, len(groups) - number + cut)
    return np.split(np.concatenate(groups), np.cumsum([len(group) for group in groups])[groups_before - 1])


def _assemble(
    rows: RowLengths, steps: list[_Step], world_size: int, limits: MicroBatchLimits, repeats: int
) -> BatchPlan:
    """Give every rank the rows that its micro-batches name, in the order of their first use."""
    held, plans = [], []
    for rank in range(limits.sequence_groups(world_size)):
        used = rows.index[_flat([micro_batch for step in steps for micro_batch in step.ranks[rank]])].tolist()
        place = dict(zip(dict.fromkeys(used), count()))
        places = map(place.__getitem__, used)
        mini_batches = tuple(
            MiniBatchPlan(
                micro_batches=tuple(tuple(islice(places, len(micro_batch))) for micro_batch in step.ranks[rank]),
                num_tokens=step.num_tokens,
                num_sequences=step.num_sequences,
                num_groups=step.num_groups,
            )
            for step in steps
        )
        held.append(tuple(place))
        plans.append(RankPlan(mini_batches * repeats, is_tree=rows.shared is not None))
    return BatchPlan(rows=tuple(held), ranks=tuple(plans), ranks_each=limits.ranks)


def plan_pairs(
    rows: RowLengths, world_size: int, limits: MicroBatchLimits, *, mini_batch_pairs: int, epochs: int = 1
) -> BatchPlan:
    """Plan the optimizer steps of a batch of N pairs, in which rows 2i and 2i + 1 are a pair.

    Args:
        rows: All 2N rows of the batch, each a group of its own; both answers of a pair have one prompt, and count (and
            compute) it once if the rows share prefixes.
        world_size: Number of ranks.
        limits: Of a micro-batch, and how many ranks run it; `max_rows` counts pairs.
        mini_batch_pairs: Pairs per optimizer step, over all ranks.
        epochs: Passes over the batch.

    Returns:
        A plan of rows. `num_groups` counts pairs, the divisor of a loss per pair; `num_sequences` counts answers.

    Raises:
        ValueError: An odd number of rows, an answer without trained tokens, two prompts in a pair, or a pair that alone
            exceeds `limits.max_tokens`; the pair is named.
    """
    if len(rows) % 2:
        raise ValueError(f"{len(rows)} rows are no pairs")
    prompt, response, trained = (column.reshape(-1, 2) for column in (rows.prompt, rows.response, rows.trained))
    for wrong, what in (
        (prompt[:, 0] != prompt[:, 1], "has two prompts of different length"),
        ((trained == 0).any(1), "has an answer without a trained token"),
    ):
        if wrong.any():
            raise ValueError(f"pair {int(np.argmax(wrong))} {what}")
    once, responses = prompt[:, 0] if rows.share_prefix else prompt.sum(1), response.sum(1)
    if rows.is_padded:  # both to the longer one, so that pairs can be padded like rows
        once, responses = 2 * prompt[:, 0], 2 * response.max(1)
    tokens = once + responses
    if (tokens > limits.token_cap).any():
        pair = int(np.argmax(tokens > limits.token_cap))
        raise ValueError(
            f"the answers of pair {pair} have {tokens[pair]} tokens with their prompt, more than the "
            f"{limits.max_tokens} that one micro-batch may hold; set {limits.budget_key} to at least "
            f"{limits.least_budget(int(tokens[pair]))}"
        )
    pairs = RowLengths.of(once, responses, trained.sum(1), None, share_prefix=False, is_padded=rows.is_padded)
    return _both_rows(plan_update(pairs, world_size, limits, mini_batch_rows=mini_batch_pairs, epochs=epochs))


def _both_rows(pairs: BatchPlan) -> BatchPlan:
    """Return a plan of pairs as a plan of their rows: pair i is rows 2i and 2i + 1."""

    def both(items: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(row for item in items for row in (2 * item, 2 * item + 1))

    ranks = [
        RankPlan(
            tuple(
                replace(
                    step,
                    micro_batches=tuple(map(both, step.micro_batches)),
                    num_sequences=2 * step.num_groups,
                )
                for step in rank.mini_batches
            )
        )
        for rank in pairs.ranks
    ]
    return replace(pairs, rows=tuple(map(both, pairs.rows)), ranks=tuple(ranks))


def _cut_micro_batches(
    rows: RowLengths, positions: np.ndarray, world_size: int, limits: MicroBatchLimits
) -> _MicroBatches:
    """Cut one mini-batch: every position once, as many micro-batches on every rank, none above the limits.

    Ranks are balanced first, because all of them wait for the slowest; then each rank's micro-batches, because ranks
    meet in every layer of every micro-batch; the costliest comes first on every rank, so that equals meet.
    """
    limits.check_rows(rows, positions)
    if not len(positions):
        return [[] for _ in range(world_size)]
    if rows.is_padded:
        length = (rows.prompt + rows.response)[positions]
        cut = cut_padded(length, world_size, max_tokens=limits.token_cap, max_rows=limits.max_rows)
        ranks = [[positions[places] for places in share] for share in cut]
    elif limits.max_rows is not None:
        shares = _share_by_count(rows, positions, world_size)
        ranks = [list(_in_order(rows, share, limits.max_rows, limits.token_cap)) for share in shares]
    else:
        ranks = _pack_ranks(rows, _share_by_cost(rows, positions, world_size, limits.token_cap), limits.token_cap)
    steps = max(map(len, ranks))
    nothing = np.zeros(0, dtype=np.int64)
    return [share + [nothing] * (steps - len(share)) for share in ranks]


def _share_by_cost(rows: RowLengths, positions: np.ndarray, world_size: int, max_tokens: int) -> list[_Units]:
    """Give every rank units of about the same cost.

    Whole groups are cheapest, as each computes its prompt once; where they are too few or too uneven to balance, they
    are cut into 2, 4, ... parts, as long as the heaviest rank gets lighter by it.
    """
    groups = rows.runs(positions) if rows.share_prefix else positions[:, None]
    if world_size == 1:
        return [_cut_groups(rows, groups, 1, max_tokens)]
    largest = max(map(len, groups), default=0)
    parts, lightest, shares = 1, np.inf, list[_Units]()
    while True:
        units = _cut_groups(rows, groups, parts, max_tokens)
        cost = rows.cost(units)
        bins = balance(cost, world_size)
        heaviest = max(float(cost[units_of_rank].sum()) for units_of_rank in bins)
        if heaviest < lightest:
            lightest, shares = heaviest, [_pick(units, units_of_rank) for units_of_rank in bins]
        if parts >= largest or heaviest <= _CLOSE_ENOUGH * cost.sum() / world_size:
            return shares
        parts *= 2


def _cut_groups(rows: RowLengths, groups: _Units, parts: int, max_tokens: int) -> _Units:
    """Cut every group into at most `parts` units of about equal length, and into more where the budget asks for it."""
    units = groups if parts == 1 else [unit for group in groups for unit in _split_evenly(rows, group, parts)]
    fits = rows.tokens(units) <= max_tokens
    if fits.all():
        return units
    return [
        unit
        for whole, fit in zip(units, fits, strict=True)
        for unit in ([whole] if fit else _split_to_fit(rows, whole, max_tokens))
    ]


def _split_evenly(rows: RowLengths, group: np.ndarray, parts: int) -> list[np.ndarray]:
    if parts >= len(group):
        return list(group[:, None])
    if rows.shared is not None:
        return _split_tree_evenly(rows, group, parts)
    return [np.sort(group[part]) for part in longest_first(rows.response[group], parts)]


def _split_tree_evenly(rows: RowLengths, group: np.ndarray, parts: int) -> list[np.ndarray]:
    """Cut a tree into about `parts` units of about equal length: subtrees whole, those that are too large cut again."""
    units: list[np.ndarray] = []
    waiting = [(group, parts)]
    while waiting:
        tree, wanted = waiting.pop()
        if wanted == 1 or len(tree) == 1:
            units.append(tree)
            continue
        subtrees, common = rows.subtrees(tree)
        sizes = rows.tokens(subtrees) - common
        in_parts = sizes * wanted / max(int(sizes.sum()), 1)
        is_large = in_parts > 1
        cuts = np.maximum(np.rint(in_parts), 1).astype(np.int64)
        waiting += [(subtrees[at], int(cuts[at])) for at in np.flatnonzero(is_large).tolist()]
        small = [subtree for subtree, large in zip(subtrees, is_large, strict=True) if not large]
        bins = longest_first(sizes[~is_large], max(wanted - int(cuts[is_large].sum()), 1))
        units += [_merged(small, part) for part in bins if part]
    return units


def _split_to_fit(rows: RowLengths, group: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    if rows.shared is not None:
        return _split_tree_to_fit(rows, group, max_tokens)
    room = max_tokens - int(rows.prompt[group[0]])
    return [np.sort(group[part]) for part in pack(rows.response[group], room)]


def _split_tree_to_fit(rows: RowLengths, group: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Cut a tree that exceeds the budget into units that don't: subtrees whole, those that are too large cut again."""
    units: list[np.ndarray] = []
    waiting = [group]
    while waiting:
        subtrees, common = rows.subtrees(waiting.pop())
        tokens = rows.tokens(subtrees)
        fits = tokens <= max_tokens  # always so for one row
        waiting += [subtree for subtree, fit in zip(subtrees, fits, strict=True) if not fit]
        fitting = [subtree for subtree, fit in zip(subtrees, fits, strict=True) if fit]
        # All of them begin with what they have in common, which a unit counts once.
        units += [_merged(fitting, part) for part in pack(tokens[fits] - common, max_tokens - common)]
    return units


def _merged(parts: list[np.ndarray], chosen: list[int]) -> np.ndarray:
    return np.sort(np.concatenate([parts[at] for at in chosen]))


def _pack_ranks(rows: RowLengths, shares: list[_Units], max_tokens: int) -> _MicroBatches:
    """Pack each rank's units into the number of micro-batches that the fullest rank needs, evenly if they still fit."""
    tokens, costs = ([weigh(units) for units in shares] for weigh in (rows.tokens, rows.cost))
    steps = max(1, *(-(-int(of_rank.sum()) // max_tokens) for of_rank in tokens))  # there can't be fewer
    chosen = _dealt_evenly(costs, steps)
    fit = _fit(tokens, chosen, max_tokens)
    if not all(fit):
        packed = [pack(of_rank, max_tokens) for of_rank in tokens]
        needed = max(map(len, packed))
        if needed > steps:
            chosen = _dealt_evenly(costs, needed)
            fit = _fit(tokens, chosen, max_tokens)
        chosen = [even if fits else bins for even, fits, bins in zip(chosen, fit, packed, strict=True)]
    return [
        _joined(units, [bins[b] for b in np.argsort(-_sums(cost, bins), kind="stable").tolist()])
        for units, cost, bins in zip(shares, costs, chosen, strict=True)
    ]


def _dealt_evenly(costs: list[np.ndarray], steps: int) -> list[list[list[int]]]:
    """Return per rank its units in at most `steps` parts of about equal cost, none of them empty."""
    return [[part for part in longest_first(cost, steps) if part] for cost in costs]


def _fit(tokens: list[np.ndarray], parts: list[list[list[int]]], max_tokens: int) -> list[bool]:
    """Return per rank whether each of its parts is within the budget."""
    return [bool((_sums(*of_rank) <= max_tokens).all()) for of_rank in zip(tokens, parts, strict=True)]


def _joined(units: _Units, parts: list[list[int]]) -> list[np.ndarray]:
    """Return the rows of each part, ascending; each unit is in one part."""
    rows = _flat(units)
    part = np.empty(len(units), dtype=np.int64)
    for number, chosen in enumerate(parts):
        part[chosen] = number
    if len(rows) > len(units):
        part = part.repeat([len(unit) for unit in units])
    # One sort for all parts: by part, then by row.
    bound = rows.max(initial=0) + 1
    ascending = np.sort(part * bound + rows) % bound
    ends = np.bincount(part, minlength=len(parts)).cumsum().tolist()
    return [ascending[start:end] for start, end in pairwise([0, *ends])]


def _flat(units: _Units) -> np.ndarray:
    """Return the rows of all units, one after another."""
    if isinstance(units, np.ndarray):
        return units.reshape(-1)
    return np.concatenate(units) if units else np.zeros(0, dtype=np.int64)


def _pick(units: _Units, chosen: list[int]) -> _Units:
    return units[chosen] if isinstance(units, np.ndarray) else [units[u] for u in chosen]


def _starts(parts: Sequence[Sized] | np.ndarray) -> np.ndarray:
    """Return where each part begins if all stand one after the other."""
    lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
    return np.cumsum(lengths) - lengths


def _sums(values: np.ndarray, parts: list[list[int]]) -> np.ndarray:
    """Return the sum of the values of each part, none of which is empty."""
    if not parts:
        return values[:0]
    return np.add.reduceat(values[np.fromiter(chain.from_iterable(parts), dtype=np.int64)], _starts(parts))


def _share_by_count(rows: RowLengths, positions: np.ndarray, world_size: int) -> list[np.ndarray]:
    """Give every rank the same number of rows, give or take one, so that the heaviest rank is as light as was found.

    Groups stay whole where that is even; else they are cut into neighbours, which have the most in common, as many as
    an even deal needs.
    """
    groups = rows.runs(positions) if rows.share_prefix else []
    size = len(groups[0]) if len({len(group) for group in groups}) == 1 else 1
    found = [np.array_split(positions, world_size)] if rows.shared is not None else []
    for length in (length for length in range(size, 0, -1) if size % length == 0):
        units = positions.reshape(-1, length)
        if length == 1 or len(units) % world_size == 0:
            bins = balance(rows.cost(units), world_size, equal_size=True)
            found.append([np.sort(_flat(units[share])) for share in bins])
    return min(found, key=lambda shares: max(float(rows.cost(rows.runs(share)).sum()) for share in shares))


def _in_order(rows: RowLengths, share: np.ndarray, max_rows: int, max_tokens: int) -> Iterator[np.ndarray]:
    """Cut a rank's rows (ascending) into runs of `max_rows`, shorter where the token budget ends a run."""
    tokens = (rows.prompt + rows.response)[share]
    ends = np.cumsum(tokens - rows.in_common(share))  # tokens up to and with each row
    start = 0
    while start < len(share):
        # The first row of a run brings all of its tokens, wherever its group began.
        before = int(ends[start] - tokens[start])
        fitting = int(np.searchsorted(ends - before, max_tokens, side="right"))
        end = min(start + max_rows, fitting)
        yield share[start:end]
        start = end


# ---- checks of arguments ---------------------------------------------------------------------------------------


def _counts(values: Any, name: str, num_rows: int | None = None) -> np.ndarray:
    """Return `values` as (B,) int64.

    Raises:
        ValueError: They are not one whole, non-negative number for each row.
    """
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or (num_rows is not None and len(array) != num_rows):
        raise ValueError(f"{name} has shape {array.shape}, it needs one number for each of the {num_rows or ''} rows")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} counts tokens and must be integers, got {array.dtype}")
    if (array < 0).any():
        raise ValueError(f"{name} of row {int(np.argmax(array < 0))} is negative: {array[array < 0][0]}")
    return array.astype(np.int64)


def _group_numbers(group_ids: Sequence[Hashable] | np.ndarray | None, num_rows: int) -> np.ndarray:
    """Number the groups by first appearance; without ids every row is a group of its own."""
    if group_ids is None:
        return np.arange(num_rows)
    if len(group_ids) != num_rows:
        raise ValueError(f"group_ids has {len(group_ids)} entries, it needs one for each of {num_rows} rows")
    return number_groups(group_ids)


def _mask(skip: Sequence[bool] | np.ndarray, num_rows: int) -> np.ndarray:
    mask = np.asarray(skip)
    if mask.shape != (num_rows,) or mask.dtype != bool:
        raise ValueError(f"skip must be {num_rows} booleans, got shape {mask.shape} of {mask.dtype}")
    return mask
