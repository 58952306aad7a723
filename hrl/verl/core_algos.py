"""The names and signatures of `verl.trainer.ppo.core_algos` (0.9), as wrappers of `hrl.algos`.

Code written against that module ports by changing the import. Nothing is computed here; deliberate differences from
verl's results are documented in `hrl.algos`. A member of a registry is wrapped in one line, from verl's names of
its columns and verl's defaults of its options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import StrEnum
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hrl.algos import advantages as native_advantages
from hrl.algos import policy_losses as native_losses
from hrl.algos.advantages import GROUP_EPSILON, AdvantageConfig, AdvantageInput, compute_advantages
from hrl.algos.aggregation import Counts, aggregate
from hrl.algos.bypass import REINFORCE, bypass_loss
from hrl.algos.groups import group_codes
from hrl.algos.kl import AdaptiveKLController as AdaptiveKLController
from hrl.algos.kl import FixedKLController as FixedKLController
from hrl.algos.kl import get_kl_controller as get_kl_controller
from hrl.algos.kl import kl_penalty as estimate_kl
from hrl.algos.masked import keep
from hrl.algos.policy_filtration import draw_rows
from hrl.algos.policy_losses import PolicyLossInput, PolicyLossOutput
from hrl.algos.registry import ESTIMATOR_TRAITS, Registry, Traits
from hrl.algos.token_selection import TOKEN_SELECTORS, select_tokens
from hrl.algos.value_loss import value_loss

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]
PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Any]]]
_Given = Mapping[str, Any]
"""The arguments of a call by verl's names, defaults filled in."""
_Result = TypeVar("_Result")

ADV_ESTIMATOR_REGISTRY: Registry[AdvantageFn, Traits] = Registry("advantage estimator")
"""Estimators in verl's form, to be read. `register_adv_est` adds one that `algorithm.adv_estimator` may name."""
POLICY_LOSS_REGISTRY: Registry[PolicyLossFn, Traits] = Registry("policy loss")
"""Policy losses in verl's form, to be read. `register_policy_loss` adds one that `loss_mode` may name."""

_REQUIRED = Parameter.empty
_TYPES = {"index": np.ndarray, "gamma": float, "lam": float, "rollout_is_weights": Tensor | None}
"""Types of arguments that are not tensors and have no default that shows the type."""


def _door(
    compute: Callable[[_Given], _Result],
    doc: str | None,
    returns: object,
    arguments: Mapping[str, Any],
    *,
    is_open: bool = False,
) -> Callable[..., _Result]:
    """Return a function that gives all its arguments to `compute`.

    Args:
        compute: Takes the arguments by name.
        doc: The docstring.
        returns: The annotation of the result.
        arguments: Name → default, `_REQUIRED` for none.
        is_open: Whether the function takes other keywords too, and ignores them.
    """
    parameters = []
    for name, default in arguments.items():
        annotation = Tensor if default is _REQUIRED else Any if default is None else type(default)
        annotation = _TYPES.get(name, annotation)
        parameters.append(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation))
    if is_open:
        parameters.append(Parameter("kwargs", Parameter.VAR_KEYWORD, annotation=Any))
    signature = Signature(parameters, return_annotation=returns)

    def door(*args: Any, **kwargs: Any) -> _Result:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:  # which does not say whose arguments they are
            raise TypeError(f"{door.__name__}(): {error}") from None
        given.apply_defaults()
        return compute(given.arguments)

    door.__doc__ = doc
    door.__signature__ = signature  # type: ignore[attr-defined]
    return door


def _option(config: Any, name: str, default: Any) -> Any:
    """Return `config.<name>`, or verl's default if the configuration lacks it or leaves it empty."""
    value = getattr(config, name, None)
    return default if value is None else value


# ---------------------------------------------------------------------------------------------------- advantages


class AdvantageEstimator(StrEnum):
    """Names of the built-in advantage estimators."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    GDPO = "gdpo"


_COLUMNS = {field.name for field in fields(AdvantageInput)}
_EPSILON: dict[str, Any] = {"epsilon": GROUP_EPSILON}
_FIXED = {
    "epsilon": "it only guards a division",
    "handle_zero_tail": "the baseline is 0 where only one response of a group is left",
}
"""Options of verl that have one value here, and why."""


def _estimator(
    name: AdvantageEstimator,
    native: str | None = None,
    *,
    is_open: bool = True,
    config_first: bool = False,
    **options: Any,
) -> AdvantageFn:
    """Return the door to an estimator and put it into the registry; its columns are those that the estimator reads.

    Args:
        name: The estimator's name in verl.
        native: Its name in hrl, if that is another one.
        is_open: Whether the door takes other keywords too, and ignores them.
        config_first: Whether `norm_adv_by_std_in_grpo` of the configuration overrides the argument.
        options: The arguments after the columns with verl's defaults, if they are not the usual ones.
    """
    traits = ESTIMATOR_TRAITS[native or name.value]
    reads = {
        "token_level_rewards": True,
        "values": traits.needs_critic,
        "reward_baselines": traits.needs_baseline,
        "response_mask": True,
        "index": traits.min_group_size > 1,
        "old_log_probs": traits.needs_old_log_probs,
        "sum_pi_squared": traits.needs_sum_pi_squared,
    }
    options = options or (_EPSILON if reads["index"] else {}) | {"config": None}

    def compute(given: _Given) -> tuple[Tensor, Tensor]:
        for option in _FIXED.keys() & options.keys():
            if given[option] != options[option]:
                raise ValueError(f"{option} is fixed at {options[option]} ({_FIXED[option]}), got {given[option]}")
        config, divide = given.get("config"), given.get("norm_adv_by_std_in_grpo", True)
        settings = AdvantageConfig(
            gamma=float(given.get("gamma", _option(config, "gamma", 1.0))),
            lam=float(given.get("lam", 1.0)),
            norm_adv_by_std_in_grpo=_option(config, "norm_adv_by_std_in_grpo", divide) if config_first else divide,
            gdpo_reward_weights=_option(config, "gdpo_reward_weights", None),
        )
        inputs = {column: value for column, value in given.items() if column in _COLUMNS}
        if "index" in given:
            inputs["group_ids"] = group_codes(given["index"])
        if "non_tensor_batch" in given:
            inputs["reward_parts"] = _reward_parts(given)
        advantages, returns = compute_advantages(native or name, AdvantageInput(**inputs), settings)
        f_norm = given.get("f_norm", 1.0)  # only GPG has it; its returns are its advantages
        return (advantages, returns) if f_norm == 1.0 else (advantages / f_norm, returns / f_norm)

    doc = f"See `hrl.algos.advantages.{native or name}_advantage`."
    columns = dict.fromkeys((column for column, is_read in reads.items() if is_read), _REQUIRED)
    door = _door(compute, doc, tuple[Tensor, Tensor], columns | options, is_open=is_open)
    ADV_ESTIMATOR_REGISTRY[name.value] = door
    return door


def _reward_parts(given: _Given) -> Tensor:
    """Return the rewards `(B, K)` that `config.gdpo_reward_keys` names; without names, the one that is trained on."""
    rewards, columns = given["token_level_rewards"], given["non_tensor_batch"]
    keys = _option(given["config"], "gdpo_reward_keys", None)
    if not keys or columns is None:
        return AdvantageInput(rewards, given["response_mask"]).scores().unsqueeze(1)
    missing = [key for key in keys if key not in columns]
    if missing:
        raise ValueError(f"the batch lacks the rewards {missing} that algorithm.gdpo_reward_keys names")
    parts = [torch.as_tensor(np.asarray(columns[key], dtype=np.float64)) for key in keys]
    return torch.stack(parts, dim=1).to(rewards.device)


_BY_STD: dict[str, Any] = _EPSILON | {"norm_adv_by_std_in_grpo": True, "config": None}
_TAIL: dict[str, Any] = {"rollout_is_weights": None, "handle_zero_tail": True, "epsilon": 1e-8}
_E = AdvantageEstimator

compute_gae_advantage_return = _estimator(_E.GAE, is_open=False, gamma=_REQUIRED, lam=_REQUIRED)
compute_grpo_outcome_advantage = _estimator(_E.GRPO, is_open=False, **_BY_STD)
compute_grpo_vectorized_outcome_advantage = _estimator(_E.GRPO_VECTORIZED, "grpo", is_open=False, **_BY_STD)
compute_grpo_passk_outcome_advantage = _estimator(_E.GRPO_PASSK, config_first=True, **_BY_STD)
compute_gdpo_outcome_advantage = _estimator(_E.GDPO, **_BY_STD, non_tensor_batch=None, batch=None)
# `alpha` is computed from the batch, as in verl.
compute_gpg_outcome_advantage = _estimator(_E.GPG, **_EPSILON, f_norm=1.0, alpha=1.0, config=None)
compute_rloo_outcome_advantage = _estimator(_E.RLOO)
compute_rloo_vectorized_outcome_advantage = _estimator(_E.RLOO_VECTORIZED, "rloo")
compute_opo_outcome_advantage = _estimator(_E.OPO)
compute_reinforce_plus_plus_baseline_outcome_advantage = _estimator(_E.REINFORCE_PLUS_PLUS_BASELINE)
compute_reinforce_plus_plus_outcome_advantage = _estimator(_E.REINFORCE_PLUS_PLUS)
compute_remax_outcome_advantage = _estimator(_E.REMAX)
compute_optimal_token_baseline_advantage = _estimator(_E.OPTIMAL_TOKEN_BASELINE, **_TAIL)
compute_multi_turn_optimal_token_baseline_advantage = _estimator(
    _E.TIR_OPTIMAL_TOKEN_BASELINE, "optimal_token_baseline", **_TAIL
)


def register_adv_est(name_or_enum: str) -> Callable[[AdvantageFn], AdvantageFn]:
    """Register an advantage estimator of verl's form under a name that `algorithm.adv_estimator` then takes.

    It is called with `token_level_rewards`, `response_mask` and `config`, and with those of `index`, `values`,
    `reward_baselines`, `old_log_probs` and `sum_pi_squared` that the batch has. `index` holds integer codes of the
    groups.

    Raises:
        ValueError: The name is taken by another function.
    """
    name = str(name_or_enum)

    def decorator(function: AdvantageFn) -> AdvantageFn:
        if ADV_ESTIMATOR_REGISTRY.get(name) is function:
            return function

        def adapted(inp: AdvantageInput, config: Any) -> tuple[Tensor, Tensor]:
            optional = ("values", "reward_baselines", "old_log_probs", "sum_pi_squared")
            columns = {column: getattr(inp, column) for column in optional}
            columns["index"] = None if inp.group_ids is None else inp.group_ids.numpy()
            given = {column: value for column, value in columns.items() if value is not None}
            return function(
                token_level_rewards=inp.token_level_rewards, response_mask=inp.response_mask, config=config, **given
            )

        native_advantages.register_adv_est(name)(adapted)
        ADV_ESTIMATOR_REGISTRY[name] = function
        return function

    return decorator


def get_adv_estimator_fn(name_or_enum: str) -> AdvantageFn:
    """Return the estimator of that name in verl's form.

    Raises:
        ValueError: Unknown name.
    """
    return ADV_ESTIMATOR_REGISTRY.find(str(name_or_enum))


def compute_pf_ppo_reweight_data(data: Any, reweight_method: str = "pow", weight_pow: float = 2.0) -> Any:
    """Return rows of a batch (`DataProto`) drawn by their scores; see `hrl.algos.policy_filtration.draw_rows`.

    Draws from torch's global generator, as verl's does. Rows without a trained token are never drawn.
    """
    counted = data.batch["response_mask"].bool().any(-1)
    scores = data.batch["token_level_scores"].sum(-1)
    rows = draw_rows(scores, counted, reweight_method, weight_pow, generator=torch.default_generator)
    return data.select_idxs(rows)


# ---------------------------------------------------------------------------------------------------- rewards and KL


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Return the scores less `kl_ratio` times the k1 estimate of the KL to the reference, per token."""
    return token_level_scores - kl_ratio * estimate_kl(old_log_prob, ref_log_prob, "k1")


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """See `hrl.algos.kl.kl_penalty`, whose `kind` is called `kl_penalty` here."""
    return estimate_kl(logprob, ref_logprob, kl_penalty)


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Return the estimate of `hrl.algos.kl.kl_penalty` with its own gradient: `+` is left out of the name."""
    return estimate_kl(logprob, ref_logprob, kl_penalty.removesuffix("+"))


# ---------------------------------------------------------------------------------------------------- losses

_PER_TOKEN = "none"
"""The `loss_agg_mode` under which `agg_loss` leaves the loss per token."""


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """See `hrl.algos.aggregation.aggregate`.

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
    if loss_agg_mode == _PER_TOKEN:
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


_ACTOR: dict[str, Any] = {
    "clip_ratio": 0.2,
    "clip_ratio_low": None,
    "clip_ratio_high": None,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
}
_POLICY_LOSS: dict[str, Any] = {
    "clip_cov_ratio": 2e-4,
    "clip_cov_lb": 1.0,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 2e-4,
    "ppo_kl_coef": 1.0,
    "dro_beta": None,
}
_CORRECTION: dict[str, Any] = {
    "loss_type": "ppo_clip",
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
}


def _section(config: Any, defaults: Mapping[str, Any], **more: Any) -> Any:
    """Return the values of a section over verl's defaults, which differ from those of hrl's schema."""
    return SimpleNamespace(**{name: _option(config, name, default) for name, default in defaults.items()}, **more)


def _mean(metric: tuple[Tensor, Tensor]) -> Tensor:
    total, count = metric
    return total / count.clamp(min=1)


def _settings(config: Any, defaults: dict[str, Any]) -> Any:
    """Return the settings that a loss reads from verl's actor configuration."""
    constants = _section(_option(config, "policy_loss", None), _POLICY_LOSS)
    return _section(config, _ACTOR | defaults, policy_loss=constants)


def _reduced(output: PolicyLossOutput, mask: Tensor, given: _Given, **metrics: float) -> tuple[Tensor, dict[str, Any]]:
    counts = _option(given["config"], "global_batch_info", {})
    loss = agg_loss(output.loss_mat, mask, given["loss_agg_mode"], **counts)
    return loss, {key: _mean(metric).item() for key, metric in output.metrics.items()} | metrics


def _loss_door(
    name: str,
    compute: Callable[[_Given], tuple[Tensor, dict[str, Any]]],
    doc: str | None,
    mode: str = "token-mean",
) -> PolicyLossFn:
    """Return the door to a policy loss and put it into the registry; `mode` is verl's default aggregation."""
    columns = dict.fromkeys(("old_log_prob", "log_prob", "advantages", "response_mask"), _REQUIRED)
    options = {"loss_agg_mode": mode, "config": None, "rollout_is_weights": None}
    door = POLICY_LOSS_REGISTRY[name] = _door(compute, doc, tuple[Tensor, dict[str, Any]], columns | options)
    return door


def _policy_loss(name: str, mode: str = "token-mean", **defaults: Any) -> PolicyLossFn:
    """Return the door to a registered policy loss; `defaults` are verl's where the loss has its own."""

    def compute(given: _Given) -> tuple[Tensor, dict[str, Any]]:
        settings, mask = _settings(given["config"], defaults), given["response_mask"]
        log_prob, advantages, selected = given["log_prob"], given["advantages"], None
        if name in TOKEN_SELECTORS:
            selected = select_tokens(name, log_prob, advantages, mask, settings)
        inp = PolicyLossInput(log_prob, given["old_log_prob"], advantages, mask, given["rollout_is_weights"], selected)
        return _reduced(native_losses.policy_loss(name, inp, settings), mask, given)

    return _loss_door(name, compute, f"See `hrl.algos.policy_losses.{name}`.", mode)


def _bypass_mode(given: _Given) -> tuple[Tensor, dict[str, Any]]:
    """See `hrl.algos.bypass.bypass_loss`; `old_log_prob` is the sampler's.

    `config.policy_loss.rollout_correction` has the keys of `algorithm.rollout_correction`. Rejected tokens don't count
    in the divisor, unless the counts of the whole batch are given. As in verl, `rollout_is_weights` are not read: the
    weights are those of the policy in training.

    Raises:
        ValueError: There is no `rollout_correction`.
    """
    correction = _option(_option(given["config"], "policy_loss", None), "rollout_correction", None)
    if correction is None:
        raise ValueError("bypass mode needs config.policy_loss.rollout_correction")
    inp = PolicyLossInput(given["log_prob"], given["old_log_prob"], given["advantages"], given["response_mask"])
    settings = _settings(given["config"], {})
    output, kept, corrected = bypass_loss("vanilla", inp, settings, _section(correction, _CORRECTION))
    metrics = {key: _mean(metric).item() for key, metric in corrected.items()}
    return _reduced(output, kept, given, **metrics)


_SEQUENCES = "seq-mean-token-mean"

compute_policy_loss_vanilla = _policy_loss("vanilla")
compute_policy_loss_dppo_tv = _policy_loss("dppo_tv", clip_ratio_c=20.0)
compute_policy_loss_dppo_kl = _policy_loss("dppo_kl", clip_ratio_c=20.0)
compute_policy_loss_gspo = _policy_loss("gspo", _SEQUENCES)
compute_policy_loss_sapo = _policy_loss("sapo", _SEQUENCES)
compute_policy_loss_gpg = _policy_loss("gpg")
compute_policy_loss_clip_cov = _policy_loss("clip_cov")
compute_policy_loss_kl_cov = _policy_loss("kl_cov")
# verl's default is token-mean, which its function then does not read: it takes the mean over sequences.
compute_policy_loss_geo_mean = _policy_loss("geo_mean", _SEQUENCES)
compute_policy_loss_dro = _policy_loss("dro")
compute_policy_loss_cispo = _policy_loss("cispo")
compute_policy_loss_bypass_mode = _loss_door("bypass_mode", _bypass_mode, _bypass_mode.__doc__)


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
    columns = (rollout_log_prob, log_prob, advantages, response_mask)
    return POLICY_LOSS_REGISTRY[REINFORCE](*columns, loss_agg_mode, config, rollout_is_weights)


class _ActorConfig:
    """A configuration as a loss of verl's form reads one: with `get`, and `global_batch_info` empty.

    The trainer divides by the counts of the mini-batch itself.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self.global_batch_info: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return `config.<name>`, or the default where there is none."""
        return _option(self._config, name, default)


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Register a policy loss of verl's form under a name that `actor.policy_loss.loss_mode` then takes.

    It must reduce with `agg_loss(..., loss_agg_mode=loss_agg_mode, **config.global_batch_info)`, as verl's own do.
    The trainer asks it for the loss per token and divides by the counts of the whole mini-batch itself.

    Raises:
        ValueError: The name is taken by another function.
    """

    def decorator(function: PolicyLossFn) -> PolicyLossFn:
        if POLICY_LOSS_REGISTRY.get(name) is not function:
            native_losses.register_policy_loss(name)(_per_token(name, function))
            POLICY_LOSS_REGISTRY[name] = function
        return function

    return decorator


def _per_token(name: str, function: PolicyLossFn) -> native_losses.PolicyLoss:
    def adapted(inp: PolicyLossInput, config: Any) -> PolicyLossOutput:
        loss_mat, metrics = function(
            old_log_prob=inp.old_log_prob,
            log_prob=inp.log_prob,
            advantages=inp.advantages,
            response_mask=inp.response_mask,
            loss_agg_mode=_PER_TOKEN,
            config=_ActorConfig(config),
            rollout_is_weights=inp.rollout_is_weights,
        )
        if loss_mat.shape != inp.response_mask.shape:
            raise ValueError(
                f"policy loss {name!r} reduced its tokens to shape {tuple(loss_mat.shape)} by itself; end it with "
                "agg_loss(..., loss_agg_mode=loss_agg_mode, **config.global_batch_info)"
            )
        tokens = inp.response_mask.sum()
        means = {key if "/" in key else f"actor/{key}": torch.as_tensor(value) for key, value in metrics.items()}
        return PolicyLossOutput(loss_mat, {key: (value * tokens, tokens) for key, value in means.items()})

    return adapted


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """Return the policy loss of that name in verl's form.

    Raises:
        ValueError: Unknown name.
    """
    return POLICY_LOSS_REGISTRY.find(name)


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
    if cliprange is None and (cliprange_low is None or cliprange_high is None):
        raise ValueError("give cliprange, or both cliprange_low and cliprange_high")
    given = {
        "clip_ratio": cliprange,
        "clip_ratio_low": cliprange_low,
        "clip_ratio_high": cliprange_high,
        "clip_ratio_c": clip_ratio_c,
    }
    inp = PolicyLossInput(log_prob, old_log_prob, advantages, response_mask)
    output = native_losses.policy_loss("vanilla", inp, _settings(None, given))
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    clipped, drift, floored = (_mean(output.metrics[key]) for key in names)
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
    """See `hrl.algos.value_loss.value_loss`. Gives the loss and the share of clipped tokens."""
    loss_mat, metrics = value_loss(vpreds, values, returns, response_mask, cliprange_value)
    counts = (dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    return agg_loss(loss_mat, response_mask, loss_agg_mode, *counts), _mean(metrics["critic/vf_clipfrac"])


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Return the entropy of the distributions `softmax(logits)`, `(B, R, V)`, aggregated over trained tokens."""
    log_probs = torch.log_softmax(logits, dim=-1)
    # A forbidden token has log-prob -inf and probability 0; its term is 0, not NaN.
    entropy = -(log_probs.exp() * log_probs.clamp(min=torch.finfo(logits.dtype).min)).sum(dim=-1)
    return agg_loss(entropy, response_mask, loss_agg_mode)


def _name_doors() -> None:
    """Give each door the name under which it stands here: messages show it, and a pickle finds the function by it."""
    for name, value in globals().items():
        if getattr(value, "__qualname__", "") == f"{_door.__name__}.<locals>.door":
            value.__name__ = value.__qualname__ = name


_name_doors()
__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageFn",
    "FixedKLController",
    "PolicyLossFn",
    "get_kl_controller",
    *(name for name, value in globals().items() if name[0] != "_" and getattr(value, "__module__", "") == __name__),
]
