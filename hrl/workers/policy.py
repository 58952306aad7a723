"""The policy: log-probs of what was sampled, and the update that moves them.

A `Policy` is an actor (with a training configuration) or a frozen reference (without). It needs an initialised
`torch.distributed` world, of one rank or many, and knows nothing of Ray or of the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hrl.algos.aggregation import Counts, aggregate
from hrl.algos.bypass import bypass_loss
from hrl.algos.kl import check_kl_loss_type, kl_penalty
from hrl.algos.masked import keep
from hrl.algos.policy_losses import PolicyLossInput, PolicyLossOutput, policy_loss
from hrl.algos.rollout_correction import mismatch
from hrl.batching import MiniBatchPlan, RankPlan
from hrl.metrics import Metric
from hrl.models.loading import dtype_of, load_causal_lm
from hrl.models.micro_batch import PackedMicroBatch, TokenRows, take_columns
from hrl.models.packed_model import PackedCausalLM
from hrl.protocol import DataProto
from hrl.workers.engine.engine import Engine, Meter, require_plan
from hrl.workers.engine.model import EngineModel

#: Columns a loss may read beside the mask, where the batch has them.
OPTIONAL_COLUMNS = ("rollout_is_weights", "selected_tokens")


@dataclass(frozen=True)
class _Update:
    """What the micro-batches of one update share.

    Attributes:
        batch: The columns.
        rows: Its tokens.
        meter: Collects metrics.
        num_mini_batches: Optimizer steps of the update.
        steps_before: Optimizer steps taken before it.
        bypass: `algorithm.rollout_correction` in bypass mode.
        old_is_sampler: The sampler's log-probs are the old ones, as bypass mode has them unless they drifted too far.
    """

    batch: DataProto
    rows: TokenRows
    meter: Meter
    num_mini_batches: int
    steps_before: int
    bypass: Any | None
    old_is_sampler: bool


class Policy(EngineModel):
    """A sharded causal language model that scores and learns from sampled responses.

    Args:
        model: `path` (a local folder), `share_prefix`, `enable_gradient_checkpointing`, `override_config`,
            `trust_remote_code`.
        train: The `actor` configuration; `None` for a frozen reference.
        fsdp: The sharding's configuration.
        device: Of this rank.
        total_steps: Length of the run in optimizer steps, for schedules that need it.
        run_folder: Where batches are kept whose loss or gradient is not finite; `None` outside of a run.
        seed: Of the run, by which bfloat16 masters are rounded.
    """

    def __init__(
        self,
        model: Any,
        train: Any | None,
        fsdp: Any,
        *,
        device: torch.device,
        total_steps: int | None,
        run_folder: Path | None = None,
        seed: int = 0,
    ) -> None:
        dtype = dtype_of(fsdp.model_dtype)
        if train is not None and train.use_kl_loss:
            check_kl_loss_type(train.kl_loss_type)
        self.config: Any = train
        self.engine = Engine(
            lambda meta: load_causal_lm(model, dtype, meta=meta),
            PackedCausalLM,
            share_prefix=model.share_prefix,
            train=train,
            fsdp=fsdp,
            device=device,
            total_steps=total_steps,
            run_folder=run_folder,
            seed=seed,
        )

    @property
    def steps_taken(self) -> int:
        """Optimizer steps that moved the weights; 0 for a reference."""
        return 0 if self.engine.optimizer is None else self.engine.optimizer.steps_taken

    # ------------------------------------------------------------------ scoring

    def compute_log_prob(
        self,
        batch: DataProto,
        plan: RankPlan | None,
        *,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
    ) -> DataProto:
        """Log-probs of the trained response tokens under the current weights, without gradients.

        Args:
            batch: `prompts`, `responses`, `attention_mask`, `response_mask` and `meta_info["temperature"]`.
            plan: One mini-batch that covers every row; `None` runs all rows at once.
            with_entropy: Also the entropy of each token's distribution.
            with_sum_pi_squared: Also the sum of its squared probabilities.

        Returns:
            `old_log_probs (B, R)` and, where asked, `entropys (B, R)` and `sum_pi_squared (B, R)`, float32, zero
            outside `response_mask`.
        """
        temperature = _temperature(batch)

        def run(packed: PackedMicroBatch) -> tuple[Tensor, ...]:
            statistics = self.engine.module(packed, temperature, with_entropy, with_sum_pi_squared)
            return tuple(column for column in statistics if column is not None)

        wanted = {"old_log_probs": True, "entropys": with_entropy, "sum_pi_squared": with_sum_pi_squared}
        names = [name for name, is_wanted in wanted.items() if is_wanted]
        columns = self.engine.forward(TokenRows.of(batch), plan, run, num_outputs=len(names))
        return DataProto.from_dict(tensors=dict(zip(names, columns, strict=True)))

    # ------------------------------------------------------------------ learning

    def update(self, batch: DataProto, plan: RankPlan | None) -> dict[str, Metric]:
        """Run every optimizer step of the plan.

        Args:
            batch: The columns of `compute_log_prob` and `advantages`; `old_log_probs`, unless
                `meta_info["on_policy"]` makes them the update's own or, else, `meta_info["bypass"]` the sampler's;
                with `bypass` always `rollout_log_probs`; `ref_log_prob` where the KL loss is on. With
                `rollout_log_probs` the update measures how far sampler and trainer are apart, until its first step
                moves the weights; not where `bypass` has other old log-probs, which were compared before.
            plan: Mini-batches with the counts of all ranks.

        Returns:
            Metrics under verl's names, `actor/...`.

        Raises:
            ValueError: No plan, or old log-probs are missing where the policy moves before they are used.
            NonFiniteStepError: Several steps in a row were not finite.
        """
        plan = require_plan(plan)
        _check_columns(batch, plan, self.config)
        update = _Update(
            batch,
            TokenRows.of(batch),
            Meter(self.engine, dist.get_world_size()),
            len(plan.mini_batches),
            self.steps_taken,
            batch.meta_info.get("bypass"),
            _old_is_sampler(batch),
        )

        def loss_of(mini_batch: MiniBatchPlan, picked: tuple[int, ...]) -> Tensor:
            return self._loss(update, picked, mini_batch)

        return self.engine.update(plan, loss_of, name="actor", batch=batch, meter=update.meter)

    def _loss(self, update: _Update, picked: tuple[int, ...], mini_batch: MiniBatchPlan) -> Tensor:
        """One micro-batch's share of the mini-batch's loss."""
        config, batch, meter = self.config, update.batch, update.meter
        packed = self.engine.pack(update.rows, picked)
        flat = self.engine.module(packed, _temperature(batch), True)
        if packed.is_empty:
            return flat.log_prob.sum() * 0.0
        meter.add_work(packed, with_head=True)
        mask, log_prob, entropy = packed.mask, packed.unpack(flat.log_prob), packed.unpack(flat.entropy)
        read = {"advantages", "rollout_log_probs", *OPTIONAL_COLUMNS}
        read |= set() if update.old_is_sampler else {"old_log_probs"}
        read |= {"ref_log_prob"} if config.use_kl_loss else set()
        columns = take_columns(batch, sorted(read & set(batch.batch.keys())), picked, packed)

        def share(loss_mat: Tensor) -> Tensor:
            counts = Counts(mini_batch.num_tokens, mini_batch.num_sequences, mini_batch.num_groups)
            norm = config.loss_scale_factor or update.rows.responses.shape[1]
            return aggregate(loss_mat, mask, config.loss_agg_mode, counts, norm)

        sampler = columns.get("rollout_log_probs")
        is_compared = update.bypass is not None and not update.old_is_sampler
        if sampler is not None and not is_compared and self.steps_taken == update.steps_before:
            _measure_mismatch(meter, packed, log_prob, sampler)
        old_log_prob = sampler if update.old_is_sampler else columns.get("old_log_probs")
        optional = {name: columns[name] for name in OPTIONAL_COLUMNS if name in columns}
        inputs = PolicyLossInput(
            log_prob,
            log_prob.detach() if old_log_prob is None else old_log_prob,
            columns["advantages"],
            mask,
            **optional,
        )
        result = self._policy_loss(inputs, sampler, update)
        loss = policy_share = share(result.loss_mat)
        meter.add_share("actor/pg_loss", policy_share, update.num_mini_batches)
        for name, (total, count) in result.metrics.items():
            meter.add(f"actor/{name}", total, count)
        meter.add("actor/entropy", flat.entropy.sum(), flat.entropy.numel())
        if config.entropy_coeff != 0:
            loss = loss - config.entropy_coeff * share(entropy)
        if config.use_kl_loss:
            divergence = kl_penalty(log_prob, keep(columns["ref_log_prob"], mask), config.kl_loss_type)
            meter.add("actor/kl_loss", (divergence * mask).sum(), mask.sum())
            loss = loss + config.kl_loss_coef * share(divergence)
        return loss

    def _policy_loss(self, inp: PolicyLossInput, sampler: Tensor | None, update: _Update) -> PolicyLossOutput:
        loss_mode = self.config.policy_loss.loss_mode
        if update.bypass is None:
            return policy_loss(loss_mode, inp, self.config)
        result, _, correction = bypass_loss(loss_mode, inp, self.config, update.bypass, sampler)
        for name, (total, count) in correction.items():
            update.meter.add(f"rollout_corr/{name}", total, count)
        return result


def _measure_mismatch(meter: Meter, packed: PackedMicroBatch, log_prob: Tensor, sampler_log_prob: Tensor) -> None:
    meter.add_distances("rollout/logprob_diff", packed.of_tokens(log_prob.detach() - sampler_log_prob).abs())
    for name, (total, count) in mismatch(log_prob, sampler_log_prob, packed.mask).items():
        meter.add(f"rollout_corr/{name}", total, count)


def _old_is_sampler(batch: DataProto) -> bool:
    """Return whether bypass mode left the batch no other old log-probs than the sampler's."""
    has_own = "old_log_probs" in batch.batch.keys() or batch.meta_info.get("on_policy") is True
    return batch.meta_info.get("bypass") is not None and not has_own


def _temperature(batch: DataProto) -> float:
    if "temperature" not in batch.meta_info:
        raise ValueError(
            "meta_info['temperature'] is missing: log-probs are those of the distribution that was sampled"
        )
    return float(batch.meta_info["temperature"])


def _check_columns(batch: DataProto, plan: RankPlan, config: Any) -> None:
    wanted = {"advantages"} | ({"ref_log_prob"} if config.use_kl_loss else set())
    missing = sorted(wanted - set(batch.batch.keys()))
    if missing:
        raise ValueError(f"update_actor lacks the columns {missing}; the batch has {sorted(batch.batch.keys())}")
    if batch.meta_info.get("bypass") is not None and "rollout_log_probs" not in batch.batch.keys():
        raise ValueError("update_actor lacks rollout_log_probs, which bypass mode takes for the old log-probs")
    if "old_log_probs" in batch.batch.keys() or _old_is_sampler(batch):
        return
    if batch.meta_info.get("on_policy") is not True or len(plan.mini_batches) != 1:
        raise ValueError(
            f"update_actor lacks old_log_probs. They may only be left out for one optimizer step on the weights that "
            f"sampled (meta_info['on_policy'] is {batch.meta_info.get('on_policy')}, steps in the plan: "
            f"{len(plan.mini_batches)}); otherwise run compute_log_prob first"
        )
