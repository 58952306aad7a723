"""Losses of a whole mini-batch from one padded forward of a plain transformers model: nothing of hrl's engine is here.

What an update must find in any packing and cut, the gradients of these numbers say.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hrl.algos.aggregation import Counts, aggregate
from hrl.algos.bypass import bypass_loss
from hrl.algos.distillation import distillation_loss
from hrl.algos.kl import kl_penalty
from hrl.algos.policy_losses import PolicyLossInput, policy_loss
from hrl.algos.preference import (
    LabelledOptions,
    PairOptions,
    labelled_loss,
    preference_loss,
    reward_model_loss,
    sft_loss,
)
from hrl.algos.registry import pair_loss_traits
from hrl.algos.value_loss import value_loss
from hrl.protocol import DataProto

HEAD = 0.1
"""Every weight of a scalar head: at zero, as it starts, a head passes no gradient to the backbone."""


class Plain:
    """A causal model and a classifier of one folder in float64, norms included, which transformers has in float32."""

    def __init__(self, path: Path) -> None:
        options: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "sdpa"}
        self.actor = AutoModelForCausalLM.from_pretrained(path, **options)
        self.critic = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, **options)
        nn.init.constant_(self.critic.score.weight, HEAD)
        for module in (*self.actor.modules(), *self.critic.modules()):
            if type(module).__name__.endswith("RMSNorm"):
                shape, epsilon = module.weight.shape, module.variance_epsilon
                module.forward = partial(rms_norm, normalized_shape=shape, weight=module.weight, eps=epsilon)

    def statistics(self, batch: DataProto) -> tuple[Tensor, Tensor]:
        """Log-probs of the responses' tokens and entropies ``(B, R)``."""
        log_probs = self.log_probs(batch)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(-1, batch.batch["responses"].unsqueeze(-1))[..., 0], entropy

    def log_probs(self, batch: DataProto) -> Tensor:
        """Of the whole vocabulary ``(B, R, V)``."""
        logits = self.actor(**_inputs(batch)).logits[:, batch.batch["prompts"].shape[1] - 1 : -1]
        return (logits / batch.meta_info["temperature"]).log_softmax(-1)

    def values(self, batch: DataProto) -> Tensor:
        """Of the states before each token of the responses ``(B, R)``."""
        return self._head(batch)[:, batch.batch["prompts"].shape[1] - 1 : -1]

    def scores(self, batch: DataProto) -> Tensor:
        """At the last token of each row ``(B,)``."""
        mask = batch.batch["attention_mask"]
        last = (mask * torch.arange(mask.shape[1])).argmax(-1, keepdim=True)
        return self._head(batch).gather(1, last)[:, 0]

    def _head(self, batch: DataProto) -> Tensor:
        return self.critic.score(self.critic.model(**_inputs(batch)).last_hidden_state)[..., 0]


def _inputs(batch: DataProto) -> dict[str, Tensor]:
    mask = batch.batch["attention_mask"]
    length = mask.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool).tril() & mask.bool().unsqueeze(1)
    seen |= torch.eye(length, dtype=torch.bool)  # padding sees itself: a softmax of nothing is NaN
    return {
        "input_ids": torch.cat([batch.batch["prompts"], batch.batch["responses"]], dim=1),
        "attention_mask": torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf).unsqueeze(1),
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }


Gradients = dict[str, Tensor]


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Of every parameter, under the names of an engine's."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters)
    return {f"model.{name}": gradient for name, gradient in zip(names, found, strict=True)}


def _whole(loss_mat: Tensor, batch: DataProto, mode: str) -> Tensor:
    mask = batch.batch["response_mask"]
    return aggregate(loss_mat, mask, mode, Counts.of(mask), norm=mask.shape[1])


def policy_gradients(
    plain: Plain,
    batch: DataProto,
    config: Any,
    *,
    correction: Any | None,
    old_log_probs: str = "old_log_probs",
) -> dict[str, Tensor]:
    """Of the configured policy loss, entropy and KL."""
    log_prob, entropy = plain.statistics(batch)
    columns = batch.batch
    optional = {name: columns[name] for name in ("rollout_is_weights", "selected_tokens") if name in columns.keys()}
    inp = PolicyLossInput(log_prob, columns[old_log_probs], columns["advantages"], columns["response_mask"], **optional)
    name = config.policy_loss.loss_mode
    if correction is None:
        output = policy_loss(name, inp, config)
    else:
        output, _, _ = bypass_loss(name, inp, config, correction, columns["rollout_log_probs"])
    loss = _whole(output.loss_mat - config.entropy_coeff * entropy, batch, config.loss_agg_mode)
    if config.use_kl_loss:
        divergence = kl_penalty(log_prob, columns["ref_log_prob"], config.kl_loss_type)
        loss = loss + config.kl_loss_coef * _whole(divergence, batch, config.loss_agg_mode)
    return gradients(plain.actor, loss)


def distillation_gradients(plain: Plain, batch: DataProto, teacher: Tensor, settings: Any, config: Any) -> Gradients:
    """Of a divergence from the teacher's log-probs ``(B, R, V)`` alone."""
    student, count = plain.log_probs(batch), settings.topk
    if settings.traits.is_sampled:
        tokens = batch.batch["responses"].unsqueeze(-1)
        found = distillation_loss(
            settings.loss_mode, *(column.gather(-1, tokens)[..., 0] for column in (student, teacher))
        )
    else:
        ids = teacher.topk(count if settings.traits.reads_top else teacher.shape[-1], -1).indices
        found = distillation_loss(
            settings.loss_mode, *(column.gather(-1, ids).flatten(0, 1) for column in (student, teacher))
        )
    return gradients(plain.actor, _whole(found.view(student.shape[:2]), batch, config.loss_agg_mode))


def value_gradients(plain: Plain, batch: DataProto, config: Any, name: str) -> dict[str, Tensor]:
    """Of the named value loss."""
    old, returns, mask = (batch.batch[column] for column in ("values", "returns", "response_mask"))
    loss_mat, _ = value_loss(plain.values(batch), old, returns, mask, config.cliprange_value, name=name)
    return gradients(plain.critic, _whole(loss_mat, batch, config.loss_agg_mode))


def preference_gradients(plain: Plain, batch: DataProto, name: str, options: PairOptions) -> dict[str, Tensor]:
    """Of the named loss of pairs, rows 2i and 2i + 1 being the chosen and the rejected answer of pair i."""
    mask = batch.batch["response_mask"]
    sums = (plain.statistics(batch)[0] * mask).sum(-1)
    scale = mask.sum(-1).clamp(min=1) if pair_loss_traits(name).mean_log_prob else 1
    reference = batch.batch["ref_sequence_log_prob"] if pair_loss_traits(name).reference else 0.0
    leads = (sums - reference) / scale
    losses, _ = preference_loss(name, leads[0::2], leads[1::2], options)
    return gradients(plain.actor, losses.mean())


def labelled_gradients(
    plain: Plain, batch: DataProto, name: str, baseline: float, options: LabelledOptions
) -> dict[str, Tensor]:
    """Of the named loss of labelled answers."""
    columns = batch.batch
    ratios = (plain.statistics(batch)[0] * columns["response_mask"]).sum(-1) - columns["ref_sequence_log_prob"]
    losses, _ = labelled_loss(name, ratios, columns["is_desirable"], baseline, options)
    return gradients(plain.actor, losses.sum() / columns["response_mask"].bool().any(-1).sum())


def supervised_gradients(plain: Plain, batch: DataProto, name: str, mode: str) -> dict[str, Tensor]:
    """Of the named loss of demonstrations."""
    loss_mat = sft_loss(plain.statistics(batch)[0], batch.batch["response_mask"], name=name)
    return gradients(plain.actor, _whole(loss_mat, batch, mode))


def reward_model_gradients(plain: Plain, batch: DataProto, name: str) -> dict[str, Tensor]:
    """Of the named loss of scores."""
    scores = plain.scores(batch)
    losses, _ = reward_model_loss(scores[0::2], scores[1::2], batch.batch["margin"][0::2], name=name)
    return gradients(plain.critic, losses.mean())
