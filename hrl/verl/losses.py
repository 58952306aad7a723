"""Losses of :mod:`hrl.algos` under verl's names and signatures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hrl.algos import policy_losses as native
from hrl.algos.aggregation import Counts, aggregate
from hrl.algos.bypass import REINFORCE, bypass_loss
from hrl.algos.kl import kl_penalty as estimate_kl
from hrl.algos.masked import keep
from hrl.algos.policy_losses import PolicyLossInput, PolicyLossOutput
from hrl.algos.token_selection import TOKEN_SELECTORS, select_tokens
from hrl.algos.value_loss import value_loss

PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Any]]]

PER_TOKEN = "none"
"""The `loss_agg_mode` under which :func:`agg_loss` leaves the loss per token."""


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Score minus `kl_ratio` times the k1 estimate of the KL to the reference, per token."""
    return token_level_scores - kl_ratio * estimate_kl(old_log_prob, ref_log_prob, "k1")


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """See :func:`hrl.algos.kl.kl_penalty`, whose `kind` is called `kl_penalty` here."""
    return estimate_kl(logprob, ref_logprob, kl_penalty)


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Return the estimate of :func:`hrl.algos.kl.kl_penalty` with its own gradient: `+` is left out of the name."""
    return estimate_kl(logprob, ref_logprob, kl_penalty.removesuffix("+"))


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """See :func:`hrl.algos.aggregation.aggregate`.

    Args:
        loss_mat: `(B, R)`.
        loss_mask: `(B, R)`.
        loss_agg_mode: An aggregation mode, or `none` for the masked matrix itself.
        dp_size: Ranks whose gradients will be averaged; the result is multiplied by it.
        batch_num_tokens: Trained tokens of the mini-batch over all ranks; None for those given here.
        global_batch_size: Its sequences, likewise.
        loss_scale_factor: Constant of `seq-mean-token-sum-norm`; None for the number of columns.

    Raises:
        ValueError: Several ranks and no global count.
    """
    if loss_agg_mode == PER_TOKEN:
        return keep(loss_mat, loss_mask)
    needed = batch_num_tokens if loss_agg_mode == "token-mean" else global_batch_size
    if dp_size > 1 and needed is None and loss_agg_mode != "token-sum":
        raise ValueError(f"loss_agg_mode={loss_agg_mode!r} over {dp_size} ranks needs the counts of the whole batch")
    own = Counts.of(loss_mask)
    counts = Counts(
        tokens=own.tokens if batch_num_tokens is None else float(batch_num_tokens),
        sequences=own.sequences if global_batch_size is None else float(global_batch_size),
    )
    norm = loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
    return aggregate(loss_mat, loss_mask, loss_agg_mode, counts, norm) * dp_size


_LOSS_DEFAULTS: dict[str, Any] = {
    "clip_ratio_low": None,
    "clip_ratio_high": None,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "clip_cov_ratio": 2e-4,
    "clip_cov_lb": 1.0,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 2e-4,
    "ppo_kl_coef": 1.0,
    "dro_beta": None,
}


class _ActorConfig:
    """An actor configuration as verl's losses read one: `get`, `global_batch_info`, defaults where it is silent."""

    def __init__(self, config: Any, defaults: Mapping[str, Any]) -> None:
        self._config = config
        self._defaults = defaults

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name, None)
        if name == "policy_loss":
            return _ActorConfig(value, self._defaults)
        if value is None and name in self._defaults:
            return self._defaults[name]
        return getattr(self._config, name) if value is None else value

    def get(self, name: str, default: Any = None) -> Any:
        """`config.<name>`, or the default where there is none."""
        value = getattr(self._config, name, None)
        return default if value is None else value


def _mean(metric: tuple[Tensor, Tensor]) -> Tensor:
    total, count = metric
    return total / count.clamp(min=1)


def _policy_loss_door(name: str, default_mode: str = "token-mean", **defaults: Any) -> PolicyLossFn:
    def compute(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = default_mode,
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        settings = _ActorConfig(config, _LOSS_DEFAULTS | defaults)
        selected = None
        if name in TOKEN_SELECTORS:
            selected = select_tokens(name, log_prob, advantages, response_mask, settings)
        inp = PolicyLossInput(log_prob, old_log_prob, advantages, response_mask, rollout_is_weights, selected)
        output = native.policy_loss(name, inp, settings)
        loss = agg_loss(output.loss_mat, response_mask, loss_agg_mode, **settings.get("global_batch_info", {}))
        return loss, {f"actor/{key}": _mean(metric).item() for key, metric in output.metrics.items()}

    compute.__doc__ = f"See :func:`hrl.algos.policy_losses.{name}`."
    return compute


compute_policy_loss_vanilla = _policy_loss_door("vanilla")
compute_policy_loss_dppo_tv = _policy_loss_door("dppo_tv", clip_ratio_c=20.0)
compute_policy_loss_dppo_kl = _policy_loss_door("dppo_kl", clip_ratio_c=20.0)
compute_policy_loss_gspo = _policy_loss_door("gspo", "seq-mean-token-mean")
compute_policy_loss_sapo = _policy_loss_door("sapo", "seq-mean-token-mean")
compute_policy_loss_gpg = _policy_loss_door("gpg")
compute_policy_loss_clip_cov = _policy_loss_door("clip_cov")
compute_policy_loss_kl_cov = _policy_loss_door("kl_cov")
compute_policy_loss_geo_mean = _policy_loss_door("geo_mean", "seq-mean-token-mean")
compute_policy_loss_dro = _policy_loss_door("dro")
compute_policy_loss_cispo = _policy_loss_door("cispo")


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """`-A log p` per token, times the weights. `actor/ppo_kl` compares with the sampler's log-probs."""
    settings = _ActorConfig(config, _LOSS_DEFAULTS)
    inp = PolicyLossInput(log_prob, rollout_log_prob, advantages, response_mask, rollout_is_weights)
    output = native.policy_loss(REINFORCE, inp, settings)
    loss = agg_loss(output.loss_mat, response_mask, loss_agg_mode, **settings.get("global_batch_info", {}))
    return loss, {f"actor/{key}": _mean(metric).item() for key, metric in output.metrics.items()}


_CORRECTION_DEFAULTS: dict[str, Any] = {
    "loss_type": "ppo_clip",
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
}


def compute_policy_loss_bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """See :func:`hrl.algos.bypass.bypass_loss`; `old_log_prob` is the sampler's.

    `config.policy_loss.rollout_correction` has the keys of `algorithm.rollout_correction`. What is rejected leaves
    the divisor too, unless the counts of the whole batch are given. As in verl `rollout_is_weights` are not read: the
    weights are those of the policy in training.

    Raises:
        ValueError: There is no `rollout_correction`.
    """
    settings = _ActorConfig(config, _LOSS_DEFAULTS)
    given = settings.policy_loss.get("rollout_correction")
    if given is None:
        raise ValueError("bypass mode needs config.policy_loss.rollout_correction")
    correction = SimpleNamespace(
        **{name: getattr(given, name, default) for name, default in _CORRECTION_DEFAULTS.items()}
    )
    inp = PolicyLossInput(log_prob, old_log_prob, advantages, response_mask)
    output, kept, corrected = bypass_loss("vanilla", inp, settings, correction)
    loss = agg_loss(output.loss_mat, kept, loss_agg_mode, **settings.get("global_batch_info", {}))
    metrics = {f"actor/{key}": _mean(metric).item() for key, metric in output.metrics.items()}
    return loss, metrics | {f"rollout_corr/{key}": _mean(metric).item() for key, metric in corrected.items()}


POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {
    "vanilla": compute_policy_loss_vanilla,
    "dppo_tv": compute_policy_loss_dppo_tv,
    "dppo_kl": compute_policy_loss_dppo_kl,
    "gspo": compute_policy_loss_gspo,
    "sapo": compute_policy_loss_sapo,
    "gpg": compute_policy_loss_gpg,
    "clip_cov": compute_policy_loss_clip_cov,
    "kl_cov": compute_policy_loss_kl_cov,
    "geo_mean": compute_policy_loss_geo_mean,
    "dro": compute_policy_loss_dro,
    "cispo": compute_policy_loss_cispo,
    "bypass_mode": compute_policy_loss_bypass_mode,
}
"""Policy losses in verl's form. To read: what is to be chosen by `actor.policy_loss.loss_mode` goes through
:func:`register_policy_loss`."""


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Register a policy loss of verl's form under a name that `actor.policy_loss.loss_mode` then takes.

    It must reduce with `agg_loss(..., loss_agg_mode=loss_agg_mode, **config.global_batch_info)`, as verl's own do.
    The trainer asks it for the loss per token and divides by the counts of the whole mini-batch itself.

    Raises:
        ValueError: The name is taken by another function.
    """

    def decorator(function: PolicyLossFn) -> PolicyLossFn:
        if POLICY_LOSS_REGISTRY.get(name) is not function:
            native.register_policy_loss(name)(_per_token(name, function))
            POLICY_LOSS_REGISTRY[name] = function
        return function

    return decorator


def _per_token(name: str, function: PolicyLossFn) -> native.PolicyLoss:
    def adapted(inp: PolicyLossInput, config: Any) -> PolicyLossOutput:
        loss_mat, metrics = function(
            old_log_prob=inp.old_log_prob,
            log_prob=inp.log_prob,
            advantages=inp.advantages,
            response_mask=inp.response_mask,
            loss_agg_mode=PER_TOKEN,
            config=_ActorConfig(config, {"global_batch_info": {}}),
            rollout_is_weights=inp.rollout_is_weights,
        )
        if loss_mat.shape != inp.response_mask.shape:
            raise ValueError(
                f"policy loss {name!r} reduced its tokens to shape {tuple(loss_mat.shape)} by itself; end it with "
                "agg_loss(..., loss_agg_mode=loss_agg_mode, **config.global_batch_info)"
            )
        tokens = inp.response_mask.sum()
        means = {key.removeprefix("actor/"): torch.as_tensor(value) for key, value in metrics.items()}
        return PolicyLossOutput(loss_mat, {key: (value * tokens, tokens) for key, value in means.items()})

    return adapted


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """Return the policy loss of that name in verl's form.

    Raises:
        ValueError: Unknown name.
    """
    if name not in POLICY_LOSS_REGISTRY:
        raise ValueError(f"unknown policy loss {name!r}; choose one of {sorted(POLICY_LOSS_REGISTRY)}")
    return POLICY_LOSS_REGISTRY[name]


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the `vanilla` loss with its settings as arguments.

    Returns:
        Loss, share of clipped tokens, mean of old minus new log-prob, share of tokens at the second clip.

    Raises:
        ValueError: Neither `cliprange` nor both of its sides are given.
    """
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ValueError("give cliprange, or both cliprange_low and cliprange_high")
    settings = SimpleNamespace(clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=clip_ratio_c)
    output = native.policy_loss("vanilla", PolicyLossInput(log_prob, old_log_prob, advantages, response_mask), settings)
    clipped, drift, floored = (_mean(output.metrics[key]) for key in ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower"))
    return agg_loss(output.loss_mat, response_mask, loss_agg_mode), clipped, drift, floored


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`hrl.algos.value_loss.value_loss`. Gives the loss and the share of clipped tokens."""
    loss_mat, metrics = value_loss(vpreds, values, returns, response_mask, cliprange_value)
    loss = agg_loss(
        loss_mat, response_mask, loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor
    )
    return loss, _mean(metrics["vf_clipfrac"])


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Entropy of the distributions `softmax(logits)`, `(B, R, V)`, aggregated over trained tokens."""
    log_probs = torch.log_softmax(logits, dim=-1)
    # A forbidden token has log-prob -inf and probability 0; its term is 0, not NaN.
    entropy = -(log_probs.exp() * log_probs.clamp(min=torch.finfo(logits.dtype).min)).sum(dim=-1)
    return agg_loss(entropy, response_mask, loss_agg_mode)
