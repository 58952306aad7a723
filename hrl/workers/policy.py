"""The policy: log-probs of what was sampled, and the update that moves them.

A `Policy` is an actor, which learns, or a frozen reference. It needs an initialised `torch.distributed` world, of one
rank or many, and knows nothing of Ray or of the sampler.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hrl.algos.bypass import bypass_loss
from hrl.algos.kl import kl_penalty
from hrl.algos.masked import keep
from hrl.algos.policy_losses import PolicyLossInput, policy_loss
from hrl.metrics import Metric
from hrl.models.loading import dtype_of, load_causal_lm
from hrl.models.packed_model import PackedCausalLM, PackedMicroBatch, TokenRows
from hrl.protocol import DataProto
from hrl.workers.engine.engine import Engine, ForwardedMicroBatch, UpdateNames
from hrl.workers.mismatch import measure_mismatch
from hrl.workers.requests import LogProbRequest, OldLogProbs, PolicyUpdate, Training

if TYPE_CHECKING:
    from hrl.batching.plan import RankPlan
    from hrl.config.model import ForwardShardingConfig, FsdpConfig
    from hrl.models.loading import ModelSource

NAMES = UpdateNames("actor", "actor/grad_norm", "actor/lr", "actor/skipped_steps", "perf/mfu/actor")


class Policy:
    """A sharded causal language model that scores and learns from sampled responses.

    Args:
        model: Which model, and how it is loaded.
        training: How it learns; `None` for a frozen reference.
        fsdp: The sharding's configuration.
        device: Of this rank.
    """

    def __init__(
        self,
        model: ModelSource,
        training: Training | None,
        fsdp: FsdpConfig | ForwardShardingConfig,
        *,
        device: torch.device,
    ) -> None:
        dtype = dtype_of(fsdp.model_dtype)
        self.engine = Engine(
            lambda meta: load_causal_lm(model, dtype, meta=meta),
            PackedCausalLM,
            share_prefix=model.share_prefix,
            training=training,
            fsdp=fsdp,
            device=device,
        )

    def compute_log_prob(self, batch: DataProto, request: LogProbRequest[RankPlan]) -> DataProto:
        """Compute log-probs of the trained response tokens under the current weights, without gradients.

        Args:
            batch: `prompts`, `responses`, `attention_mask` and `response_mask`.
            request: Its plan has one mini-batch that covers every row.

        Returns:
            `old_log_probs (B, R)` and, where asked, `entropys (B, R)` and `sum_pi_squared (B, R)`, float32, zero
            outside `response_mask`.
        """
        with_entropy, with_square = request.with_entropy, request.with_sum_pi_squared

        def run(packed: PackedMicroBatch) -> tuple[Tensor, ...]:
            statistics = self.engine.module(packed, request.temperature, with_entropy, with_square)
            return tuple(column for column in statistics if column is not None)

        asked = {"old_log_probs": True, "entropys": with_entropy, "sum_pi_squared": with_square}
        names = [name for name, is_asked in asked.items() if is_asked]
        columns = self.engine.forward(TokenRows.of(batch), request.plan, run, num_outputs=len(names))
        return DataProto.from_dict(tensors=dict(zip(names, columns, strict=True)))

    def update(self, batch: DataProto, request: PolicyUpdate[RankPlan]) -> dict[str, Metric]:
        """Take every optimizer step of the plan.

        Args:
            batch: The columns that the request names.
            request: Mini-batches with the counts of all ranks, and what the loss is made of.

        Returns:
            Metrics under verl's names, `actor/...`.

        Raises:
            NonFiniteStepError: Several steps in a row were not finite.
        """

        def run(packed: PackedMicroBatch) -> tuple[Tensor, ...]:
            statistics = self.engine.module(packed, request.temperature, True)
            return statistics.log_prob, statistics.entropy

        return self.engine.learn(batch, request, run, partial(_loss, request), NAMES, with_head=True)


def _loss(request: PolicyUpdate[RankPlan], piece: ForwardedMicroBatch) -> Tensor:
    """One micro-batch's share of the mini-batch's loss."""
    config, mask, meter = request.loss, piece.mask, piece.meter
    log_prob, entropy = piece.result(0), piece.result(1)
    columns = piece.tokens(*request.token_columns)
    share = partial(piece.aggregate, mode=config.loss_agg_mode, norm=config.loss_scale_factor or piece.width)

    if request.measures_mismatch and not piece.moved:
        measure_mismatch(meter, log_prob, columns["rollout_log_probs"], mask, piece.packed.of_tokens)
    inputs = PolicyLossInput(
        log_prob,
        log_prob.detach() if request.old_log_probs is OldLogProbs.OWN else columns[request.old_log_probs],
        columns["advantages"],
        mask,
        columns["rollout_is_weights"] if request.is_weighted else None,
        columns["selected_tokens"] if request.selects_tokens else None,
    )
    if request.correction is None:
        result = policy_loss(config.policy_loss.loss_mode, inputs, config)
    else:
        sampler = columns["rollout_log_probs"]
        result, _, correction = bypass_loss(config.policy_loss.loss_mode, inputs, config, request.correction, sampler)
        meter.add_all(correction)
    loss = share(result.loss_mat)
    meter.add_share("actor/pg_loss", loss)
    meter.add_all(result.metrics)
    meter.add("actor/entropy", piece.flat[1].sum(), piece.flat[1].numel())
    if config.entropy_coeff != 0:
        loss = loss - config.entropy_coeff * share(entropy)
    if config.use_kl_loss:
        divergence = kl_penalty(log_prob, keep(columns["ref_log_prob"], mask), config.kl_loss_type)
        meter.add("actor/kl_loss", (divergence * mask).sum(), mask.sum())
        loss = loss + config.kl_loss_coef * share(divergence)
    return loss
