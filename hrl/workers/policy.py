"""The policy: log-probs of responses, and the updates that move them.

A `Policy` is an actor, which learns, or a frozen reference. It needs an initialised `torch.distributed` world, of one
rank or many, and knows nothing of Ray or of the sampler. It learns from its own samples, from pairs of answers of which
one is preferred, or from answers to imitate. Every loss is a share of the mini-batch's loss, divided by counts over all
ranks, so that no cut into micro-batches or ranks changes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hrl.algos.bypass import bypass_loss
from hrl.algos.distillation import clamped, distillation_loss, sampled_divergence
from hrl.algos.kl import kl_penalty
from hrl.algos.masked import keep
from hrl.algos.policy_losses import PolicyLossInput, policy_loss
from hrl.algos.preference import (
    labelled_loss,
    mean_over_pairs,
    pair_margins,
    preference_loss,
    sequence_log_prob,
    sft_loss,
)
from hrl.columns import object_column
from hrl.metrics import Metric
from hrl.models.adapter import adapter_off
from hrl.models.loading import load_causal_lm
from hrl.models.ops.divergence import TeacherHead
from hrl.models.ops.layout import to_device
from hrl.models.packed_model import PackedCausalLM, PackedMicroBatch, Taught, TokenRows
from hrl.protocol import DataProto
from hrl.routing import ROUTED_EXPERTS
from hrl.workers.engine.engine import FROM_DATA, Engine, ForwardedMicroBatch, UpdateNames
from hrl.workers.mismatch import measure_difference, measure_mismatch
from hrl.workers.requests import (
    TEACHER_IDS,
    TEACHER_LOG_PROBS,
    TEACHER_STATES,
    LabelledUpdate,
    LogProbRequest,
    OldLogProbs,
    PolicyUpdate,
    PreferenceUpdate,
    SupervisedUpdate,
    Training,
)

if TYPE_CHECKING:
    from hrl.batching.plan import RankPlan
    from hrl.config.distillation import DistillationLossConfig
    from hrl.config.model import ForwardShardingConfig, FsdpConfig
    from hrl.models.loading import ModelSource
    from hrl.workers.requests import AnyPolicyUpdate

NAMES = UpdateNames(
    "actor", "actor/grad_norm", "actor/lr", "actor/skipped_steps", "actor/weights_checksum", "perf/mfu/actor", True
)


class Policy:
    """A sharded causal language model that scores and learns from sampled responses.

    Args:
        model: Which model, and how it is loaded.
        training: How it learns; `None` for a frozen reference.
        fsdp: The sharding's configuration.
        device: Of this rank.
        vocabulary: Of a teacher, the number of tokens that the policy's head has. Beyond it lie rows that fill up the
            teacher's own head and stand for no token; its distribution is taken without them.
    """

    def __init__(
        self,
        model: ModelSource,
        training: Training | None,
        fsdp: FsdpConfig | ForwardShardingConfig,
        *,
        device: torch.device,
        vocabulary: int | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self.teacher_head: TeacherHead | None = None
        self.engine = Engine(load_causal_lm, PackedCausalLM, model, training, fsdp, device=device)

    def compute_log_prob(self, batch: DataProto, request: LogProbRequest[RankPlan]) -> DataProto:
        """Compute log-probs of the trained response tokens under the current weights, without gradients.

        Args:
            batch: `prompts`, `responses`, `attention_mask` and `response_mask`.
            request: Its plan has one mini-batch that covers every row.

        Returns:
            `old_log_probs (B, R)` and, where asked, `entropys (B, R)` and `sum_pi_squared (B, R)`, float32, zero
            outside `response_mask`; where asked, `routed_experts (B,)`, `teacher_log_probs (B,)`, `teacher_ids (B,)`,
            `teacher_states (B,)`.

        Raises:
            RoutingError: The model has no experts that could be recorded or replayed.
        """
        asked = {"old_log_probs": True, "entropys": request.with_entropy, "sum_pi_squared": request.with_sum_pi_squared}
        names = [name for name, is_asked in asked.items() if is_asked]
        count, top = len(names), request.num_top
        width = self.engine.module.width if request.with_states else 0

        def run(packed: PackedMicroBatch) -> tuple[Tensor, ...]:
            found = self.engine.module(
                packed,
                request.temperature,
                request.with_entropy,
                request.with_sum_pi_squared,
                num_top=top,
                vocabulary=self.vocabulary,
                with_states=request.with_states,
            )
            results = [column for column in found[:3] if column is not None]
            if top:  # ids are below 2^24, which float32 holds exactly
                results += [*found.top_log_prob.unbind(1), *found.top_ids.to(found.top_log_prob).unbind(1)]
            if found.states is not None:
                results += found.states.to(results[0]).unbind(1)
            return tuple(results)

        rows = TokenRows.of(batch, routed=request.replays_experts, pictures=request.with_pictures)
        routed: list[np.ndarray] | None = [] if request.records_experts else None
        if request.replays_experts or request.records_experts:
            self.engine.experts.require_some()
        with adapter_off(self.engine.module) if request.without_adapter else nullcontext():
            outputs = count + 2 * top + width
            columns = self.engine.forward(rows, request.plan, run, num_outputs=outputs, routed=routed)
        others = {} if routed is None else {ROUTED_EXPERTS: object_column(routed)}
        of_teacher: dict[str, tuple[list[Tensor], type[np.generic]]] = {}
        if top:
            likeliest = columns[count : count + top], columns[count + top : count + 2 * top]
            of_teacher = {TEACHER_LOG_PROBS: (likeliest[0], np.float32), TEACHER_IDS: (likeliest[1], np.int32)}
        if width:
            of_teacher[TEACHER_STATES] = columns[-width:], np.float32
        for name, (parts, dtype) in of_teacher.items():
            of_rows = torch.stack(parts, -1).numpy().astype(dtype, copy=False)
            others[name] = object_column([row[mask] for row, mask in zip(of_rows, rows.trained, strict=True)])
        return DataProto.from_dict(tensors=dict(zip(names, columns[:count], strict=True)), non_tensors=others)

    def update(self, batch: DataProto, request: AnyPolicyUpdate) -> dict[str, Metric]:
        """Take every optimizer step of the plan, on the loss that the request is for.

        Args:
            batch: The columns that the request names; `uid (B,)` is the pair of a `PreferenceUpdate`.
            request: Mini-batches with the counts of all ranks, and what the loss is made of. Those of a
                `PreferenceUpdate` hold whole pairs, and their `num_groups` counts pairs.

        Returns:
            Metrics under verl's names: `actor/...`. Of answers that are compared or imitated: `train/...`,
            `rewards/{chosen,rejected,margins,accuracies}` and `logps/{chosen,rejected}`.

        Raises:
            ValueError: A pair is torn apart, or the loss or a constant of it is unknown.
            NonFiniteStepError: Several steps in a row were not finite.
        """
        if request.replays_experts:
            self.engine.experts.require_some()
        loss_of, names = _LOSSES[type(request)]
        with_entropy = isinstance(request, PolicyUpdate)
        teacher: Likeliest | States | None = None
        if isinstance(request, PolicyUpdate) and request.reads_top:
            teacher = Likeliest.of(batch, request)
        elif isinstance(request, PolicyUpdate) and request.reads_all:
            teacher = States.of(batch, request, self._head_of_teacher())

        def run(packed: PackedMicroBatch) -> tuple[Tensor, ...]:
            if teacher is None:
                found = self.engine.module(packed, request.temperature, with_entropy)
                return tuple(column for column in found[:2] if column is not None)
            if isinstance(teacher, States):
                taught = teacher.of_micro_batch(packed)
                found = self.engine.module(packed, request.temperature, with_entropy, teacher=taught)
                return found.log_prob, found.entropy, clamped(found.divergence, teacher.settings.loss_max_clamp)
            ids, log_probs = teacher.of_micro_batch(packed)
            found = self.engine.module(packed, request.temperature, with_entropy, at=ids)
            return found.log_prob, found.entropy, *teacher.divergence(found.log_prob_at, log_probs)

        return self.engine.learn(batch, request, run, partial(loss_of, request), names, with_head=True)

    def _head_of_teacher(self) -> TeacherHead:
        if self.teacher_head is None:
            raise RuntimeError("a divergence over all tokens is asked for, and no teacher's head was given")
        return self.teacher_head.to(self.engine.device)


def _of_teacher(batch: DataProto, *names: str) -> list[list[np.ndarray]]:
    """Return what a teacher said of each row's trained tokens, column by column.

    Raises:
        ValueError: A row has another number of trained tokens than the teacher scored.
    """
    columns = [list(batch.non_tensor_batch[name]) for name in names]
    trained = batch.batch["response_mask"].bool().sum(1).tolist()
    for row, (scored, count) in enumerate(zip(columns[0], trained, strict=True)):
        if len(scored) != count:
            raise ValueError(
                f"row {row} has {count} trained tokens, and the teacher scored {len(scored)}: response_mask may "
                "not change after compute_ref_log_prob"
            )
    return columns


def _of_results(
    packed: PackedMicroBatch, width: int, *columns: tuple[Sequence[np.ndarray], type[np.generic]]
) -> tuple[Tensor, ...]:
    """Return columns of rows, `(n, K)` each, at the results that are computed here, `(M, K)` on the device.

    A rank without rows computes along with the others: its columns are `(0, width)`.
    """
    host = []
    for column, dtype in columns:
        width = column[0].shape[1] if len(column) else width
        of_rows = [column[row] for row in packed.picked]
        host.append(torch.from_numpy(np.concatenate([np.zeros((0, width), dtype), *of_rows]).astype(dtype)))
    return tuple(packed.own_results(column) for column in to_device(host, packed.mask.device))


@dataclass(frozen=True)
class States:
    """A teacher's last hidden states at each trained token, and the head that makes its distributions of them.

    Attributes:
        states: Of each row `(n, H)` float32, n being the number of its trained tokens.
        head: On the device.
        settings: Which divergence, and its clamp.
    """

    states: Sequence[np.ndarray]
    head: TeacherHead
    settings: DistillationLossConfig

    @classmethod
    def of(cls, batch: DataProto, request: PolicyUpdate[RankPlan], head: TeacherHead) -> States:
        """Read the column of a batch.

        Raises:
            ValueError: A row has another number of trained tokens than the teacher scored.
        """
        assert request.distillation is not None, "a teacher is asked for"
        (states,) = _of_teacher(batch, TEACHER_STATES)
        return cls(states, head, request.distillation)

    def of_micro_batch(self, packed: PackedMicroBatch) -> Taught:
        """Return what the model compares its own distributions with."""
        (states,) = _of_results(packed, self.head.weight.shape[1], (self.states, np.float32))
        return Taught(states, self.head, self.settings.loss_mode == "reverse_kl")


@dataclass(frozen=True)
class Likeliest:
    """What a teacher says of its most likely tokens at each trained token.

    Attributes:
        ids: Of each row `(n, K)` int32, n being the number of its trained tokens.
        log_probs: Likewise, float32.
        settings: Which divergence, and its clamps.
    """

    ids: Sequence[np.ndarray]
    log_probs: Sequence[np.ndarray]
    settings: DistillationLossConfig

    @classmethod
    def of(cls, batch: DataProto, request: PolicyUpdate[RankPlan]) -> Likeliest:
        """Read the columns of a batch.

        Raises:
            ValueError: A row has another number of trained tokens than the teacher scored.
        """
        assert request.distillation is not None, "a teacher is asked for"
        ids, log_probs = _of_teacher(batch, TEACHER_IDS, TEACHER_LOG_PROBS)
        return cls(ids, log_probs, request.distillation)

    def of_micro_batch(self, packed: PackedMicroBatch) -> tuple[Tensor, Tensor]:
        """Return ids and log-probs of the results that are computed here, `(M, K)` each, on the device."""
        ids, log_probs = _of_results(packed, self.settings.topk, (self.ids, np.int64), (self.log_probs, np.float32))
        return ids, log_probs

    def divergence(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the divergence at each token, and the probability of these tokens under both, `(M,)` each."""
        masses = (log_probs.detach().exp().sum(1) for log_probs in (student, teacher.to(student.dtype)))
        divergence = distillation_loss(
            self.settings.loss_mode,
            student,
            teacher.to(student.dtype),
            limit=self.settings.loss_max_clamp,
            floor=self.settings.log_prob_min_clamp,
        )
        return divergence, *masses


def _policy_loss(request: PolicyUpdate[RankPlan], piece: ForwardedMicroBatch) -> Tensor:
    """Return one micro-batch's share of the mini-batch's loss."""
    config, mask, meter = request.loss, piece.mask, piece.meter
    log_prob = piece.result()
    columns = piece.tokens(*request.token_columns)
    share = partial(
        piece.aggregate,
        mode=config.loss_agg_mode,
        norm=config.loss_scale_factor or piece.width,
        has_branches=request.has_branches,
    )

    if request.measures_mismatch and not piece.moved:
        measure_mismatch(meter, log_prob, columns["rollout_log_probs"], mask, piece.packed.of_tokens)
    loss = log_prob.new_zeros(())
    if request.learns_from_rewards:
        loss = share(_reward_loss(request, piece, log_prob, columns))
        meter.add_share("actor/pg_loss", loss)
    meter.add("actor/entropy", piece.flat[1].sum(), piece.flat[1].numel())
    if config.entropy_coeff != 0:
        loss = loss - config.entropy_coeff * share(piece.result(1))
    if config.use_kl_loss:
        divergence = kl_penalty(log_prob, keep(columns["ref_log_prob"], mask), config.kl_loss_type)
        meter.add("actor/kl_loss", (divergence * mask).sum(), mask.sum())
        loss = loss + config.kl_loss_coef * share(divergence)
    if request.distillation is not None:
        loss = loss + request.distillation.weight * share(_divergence(request.distillation, piece, log_prob, columns))
    return loss


def _divergence(
    settings: DistillationLossConfig, piece: ForwardedMicroBatch, log_prob: Tensor, columns: Mapping[str, Tensor]
) -> Tensor:
    """Return the divergence from the teacher at each token, `(b, r)`, 0 outside the mask."""
    mask, meter = piece.mask, piece.meter
    if settings.traits.is_sampled:
        found = sampled_divergence(
            settings.loss_mode, log_prob, columns["ref_log_prob"], mask, limit=settings.loss_max_clamp
        )
    else:
        found = piece.result(2)
        masses = ("student_mass", "teacher_mass") if settings.traits.reads_top else ()
        for name, column in zip(masses, piece.flat[3:], strict=True):
            meter.add(f"distillation/{name}", column.sum(), column.numel())
    meter.add("distillation/loss", found.detach().sum(), mask.sum())
    return found


def _reward_loss(
    request: PolicyUpdate[RankPlan], piece: ForwardedMicroBatch, log_prob: Tensor, columns: Mapping[str, Tensor]
) -> Tensor:
    """Return the policy loss of each token, `(b, r)`."""
    config, mask, meter = request.loss, piece.mask, piece.meter
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
    meter.add_all(result.metrics)
    return result.loss_mat


def _pair_loss(request: PreferenceUpdate[RankPlan], piece: ForwardedMicroBatch) -> Tensor:
    """Return one micro-batch's share of the loss that moves a policy towards chosen and away from rejected answers."""
    (chosen, rejected), log_prob, meter = piece.pairs(), piece.result(), piece.meter
    if request.measures_mismatch and not piece.moved:
        sampler = piece.tokens("rollout_log_probs")["rollout_log_probs"]
        measure_difference(meter, log_prob, sampler, piece.packed.of_tokens)
    sums = sequence_log_prob(log_prob, piece.mask)
    reference = piece.rows("ref_sequence_log_prob") if request.has_reference else None
    margins = pair_margins(request.loss_type, sums, piece.mask.sum(-1), chosen, rejected, reference)
    losses, metrics = preference_loss(request.loss_type, *margins, request.options)
    meter.add_all(metrics)
    meter.add("logps/chosen", sums[chosen].sum(), len(chosen))
    meter.add("logps/rejected", sums[rejected].sum(), len(rejected))
    loss = mean_over_pairs(losses, piece.mini_batch.num_groups)
    meter.add_share("train/loss", loss)
    return loss


def _labelled_loss(request: LabelledUpdate[RankPlan], piece: ForwardedMicroBatch) -> Tensor:
    """Return one micro-batch's share of the loss that moves a policy towards good and away from bad answers."""
    sums, meter, is_desirable = sequence_log_prob(piece.result(), piece.mask), piece.meter, piece.rows("is_desirable")
    ratios = sums - piece.rows("ref_sequence_log_prob").to(sums.dtype)
    losses, metrics = labelled_loss(request.loss_type, ratios, is_desirable, request.baseline, request.options)
    meter.add_all(metrics)
    for name, labelled in (("chosen", is_desirable), ("rejected", ~is_desirable)):
        meter.add(f"logps/{name}", (sums * labelled).sum(), labelled.sum())
    loss = losses.sum() / max(piece.mini_batch.num_sequences, 1)
    meter.add_share("train/loss", loss)
    return loss


def _imitation_loss(request: SupervisedUpdate[RankPlan], piece: ForwardedMicroBatch) -> Tensor:
    """Return one micro-batch's share of the loss that makes a policy more likely to give the answers."""
    log_prob, mask = piece.result(), piece.mask
    losses = sft_loss(log_prob, mask, name=request.loss_type)
    piece.meter.add("train/nll", -log_prob.sum(), mask.sum())
    loss = piece.aggregate(losses, request.loss_agg_mode, request.loss_scale_factor)
    piece.meter.add_share("train/loss", loss)
    return loss


_LOSSES: dict[type, tuple[Callable[..., Tensor], UpdateNames]] = {
    PolicyUpdate: (_policy_loss, NAMES),
    PreferenceUpdate: (_pair_loss, FROM_DATA),
    LabelledUpdate: (_labelled_loss, FROM_DATA),
    SupervisedUpdate: (_imitation_loss, FROM_DATA),
}
