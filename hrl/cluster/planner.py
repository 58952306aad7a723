"""The driver's plans: which rows every rank runs, in which micro-batches, decided once from the lengths alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hrl.batching import BatchPlan, RankPlan, plan_forward, plan_pairs, plan_update
from hrl.batching.rows import lengths_of
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.section import Section
from hrl.protocol import DataProto


@dataclass(frozen=True)
class MicroBatchLimits:
    """How large a micro-batch of one rank may be.

    Attributes:
        max_tokens: Hard cap on its tokens; `None` where micro-batches have a fixed number of rows.
        max_rows: Fixed number of its rows; `None` where they are filled up to `max_tokens`.
        budget_key: The key that sets `max_tokens`, for errors.
    """

    max_tokens: int | None
    max_rows: int | None
    budget_key: str

    @classmethod
    def of(cls, section: Section, name: str, dynamic: str, tokens: str, rows: str) -> MicroBatchLimits:
        """Read the three keys that verl's scripts set.

        Args:
            section: A section of the configuration.
            name: Its name, for errors.
            dynamic: Its key that says whether micro-batches are filled up to a number of tokens.
            tokens: Its key with that number.
            rows: Its key with the number of rows otherwise.
        """
        filled = getattr(section, dynamic)
        return cls(
            getattr(section, tokens) if filled else None, None if filled else getattr(section, rows), f"{name}.{tokens}"
        )


@dataclass(frozen=True)
class Planner:
    """Plans a batch for the worker groups.

    Attributes:
        share_prefix: The samples of a group compute their prompt once.
    """

    share_prefix: bool

    def forward(self, batch: DataProto, world_size: int, limits: MicroBatchLimits) -> BatchPlan:
        """Every row once, balanced over ranks: for log-probs, values and reward models."""
        prompt, response = (lengths.numpy() for lengths in lengths_of(batch))
        return plan_forward(
            prompt,
            response,
            world_size=world_size,
            max_tokens=limits.max_tokens,
            max_rows=limits.max_rows,
            budget_key=limits.budget_key,
            group_ids=batch.non_tensor_batch["uid"],
            share_prefix=self.share_prefix,
        )

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
        """`epochs` passes over mini-batches of `mini_batch_rows` rows; rows in `skip` count but do not run."""
        prompt, response = (lengths.numpy() for lengths in lengths_of(batch))
        return plan_update(
            prompt,
            response,
            batch.batch["response_mask"].sum(-1).numpy(),
            world_size=world_size,
            mini_batch_rows=mini_batch_rows,
            epochs=epochs,
            max_tokens=limits.max_tokens,
            max_rows=limits.max_rows,
            budget_key=limits.budget_key,
            group_ids=batch.non_tensor_batch["uid"],
            share_prefix=self.share_prefix,
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
        """As `update`, of a batch whose rows 2i and 2i + 1 are a pair; `limits.max_rows` counts pairs."""
        prompt, response = (lengths.numpy() for lengths in lengths_of(batch))
        return plan_pairs(
            prompt,
            response,
            batch.batch["response_mask"].sum(-1).numpy(),
            world_size=world_size,
            mini_batch_pairs=mini_batch_pairs,
            max_tokens=limits.max_tokens,
            max_pairs=limits.max_rows,
            epochs=epochs,
            share_prefix=self.share_prefix,
            budget_key=limits.budget_key,
        )


def rows_of_first_step(plan: BatchPlan) -> list[int]:
    """Return the rows of the batch that the first optimizer step of an update runs, over all ranks."""
    return [
        held[place]
        for held, rank in zip(plan.rows, plan.ranks, strict=True)
        if rank is not None
        for mini_batch in rank.mini_batches[:1]
        for micro_batch in mini_batch.micro_batches
        for place in micro_batch
    ]


def plan_generation(group_ids: np.ndarray, world_size: int, tensor_parallel_size: int) -> BatchPlan:
    """Whole groups, in turn, to the ranks that drive an engine; their tensor-parallel peers get no row.

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


_LOG_PROB_KEYS = (
    "log_prob_use_dynamic_bsz",
    "log_prob_max_token_len_per_gpu",
    "log_prob_micro_batch_size_per_gpu",
)
_UPDATE_KEYS = ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
_VALUE_KEYS = ("use_dynamic_bsz", "forward_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
_SCORE_KEYS = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu")


@dataclass(frozen=True)
class AllLimits:
    """The limits of every pass of a run, read from the configuration once."""

    update_actor: MicroBatchLimits
    log_prob: MicroBatchLimits
    ref: MicroBatchLimits
    update_critic: MicroBatchLimits
    values: MicroBatchLimits
    rm: MicroBatchLimits

    @classmethod
    def of(cls, config: PPOTrainerConfig) -> AllLimits:
        """From the whole configuration."""
        policy = config.actor_rollout_ref
        read = MicroBatchLimits.of
        return cls(
            update_actor=read(policy.actor, "actor_rollout_ref.actor", *_UPDATE_KEYS),
            log_prob=read(policy.rollout, "actor_rollout_ref.rollout", *_LOG_PROB_KEYS),
            ref=read(policy.ref, "actor_rollout_ref.ref", *_LOG_PROB_KEYS),
            update_critic=read(config.critic, "critic", *_UPDATE_KEYS),
            values=read(config.critic, "critic", *_VALUE_KEYS),
            rm=read(config.reward.reward_model, "reward.reward_model", *_SCORE_KEYS),
        )
