"""What the columns hold at tokens that the policy did not sample changes nothing, whatever is chosen by name.

Members are found by their registries, so a new one is tested by existing, and a new family has to be named here.
`tests/trainer/ppo/test_samples.py` says the same of what the driver makes of a batch, metrics among it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import hrl.algos
from hrl.algos.advantages import AdvantageConfig, compute_advantages
from hrl.algos.aggregation import AGGREGATION_MODES, aggregate
from hrl.algos.bypass import LOSS_TYPES, bypass_loss
from hrl.algos.distillation import sampled_divergence, with_teacher_advantages
from hrl.algos.groups import group_codes
from hrl.algos.kl import kl_penalty, penalise_rewards
from hrl.algos.masked import Metrics
from hrl.algos.policy_losses import PolicyLossInput, policy_loss
from hrl.algos.preference import pair_margins, sequence_log_prob, sft_loss
from hrl.algos.ratio_bounds import REJECTION_RULES, Interval
from hrl.algos.registry import DISTILLATION_TRAITS, Registry
from hrl.algos.rollout_correction import correct, importance_weights, mismatch
from hrl.algos.token_selection import TOKEN_SELECTORS, select_tokens
from hrl.algos.value_loss import value_loss
from tests.algos.batches import ACTOR, MASK_WITH_EVERYTHING, Batch, advantage_input
from tests.algos.registries import REGISTRIES

MASK = MASK_WITH_EVERYTHING
GROUPS = group_codes(["a", "b", "a", "b", "a", "c", "c", "b"])
RUBBISH = (-40.0, 3.0)
"""In place of the numbers of tokens that were not sampled: a log-prob of next to nothing, and what can be none."""

Outcome = dict[str, Tensor]
OutcomeOf = Callable[[str, Batch], Outcome]


def of_metrics(metrics: Metrics) -> Outcome:
    return {name: torch.stack([total.double(), count.double()]) for name, (total, count) in metrics.items()}


def of_loss(per_token: Tensor, leaf: Tensor) -> Outcome:
    """Under every aggregation: what is reported, and what the policy learns from."""
    found: Outcome = {}
    for mode in AGGREGATION_MODES:
        loss = aggregate(per_token, MASK, mode, norm=6.0)
        found[mode] = loss.detach()
        found[f"gradient of {mode}"] = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    return found


def advantages(name: str, batch: Batch) -> Outcome:
    columns = advantage_input(MASK, GROUPS)
    noisy = {"values": batch.values, "old_log_probs": batch.old_log_prob, "sum_pi_squared": batch.returns.abs()}
    noisy["rollout_is_weights"] = batch.weights
    noisy["token_level_rewards"] = torch.where(MASK == 1, columns.token_level_rewards, batch.values)
    noisy["turn_index"] = torch.where(MASK == 1, columns.need("turn_index"), batch.values.long())
    there = {field.name for field in fields(columns)}
    inp = replace(columns, **{key: column for key, column in noisy.items() if key in there})
    found = compute_advantages(name, inp, AdvantageConfig(gamma=0.9, lam=0.8, gdpo_reward_weights=(1.0, 0.5, 2.0)))
    return dict(zip(("advantages", "returns"), found, strict=True))


def policy_losses(name: str, batch: Batch) -> Outcome:
    selected = token_selection(name, batch)["selected"] if name in TOKEN_SELECTORS else None
    leaf = batch.log_prob.clone().requires_grad_()
    found: Outcome = {}
    for weights in (None, batch.weights):
        inp = PolicyLossInput(leaf, batch.old_log_prob, batch.advantages, MASK, weights, selected)
        output = policy_loss(name, inp, ACTOR)
        found |= {f"{key}, {weights is None}": one for key, one in of_loss(output.loss_mat, leaf).items()}
        found |= of_metrics(output.metrics)
    for loss_type in LOSS_TYPES:
        settings = correction("token", "seq_mean_k2,token_k1", "2.0,0.1_9.0", loss_type=loss_type)
        inp = PolicyLossInput(leaf, batch.old_log_prob, batch.advantages, MASK, selected_tokens=selected)
        output, kept, metrics = bypass_loss(name, inp, ACTOR, settings, batch.values)
        found |= {f"{key} in bypass mode": one for key, one in of_loss(output.loss_mat, leaf).items()}
        found |= {f"kept by {loss_type}": kept} | of_metrics(output.metrics | metrics)
    return found


def aggregations(name: str, batch: Batch) -> Outcome:
    leaf = batch.log_prob.clone().requires_grad_()
    loss = aggregate(leaf.square(), MASK, name, norm=6.0)
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, leaf)[0]}


def distillation_losses(name: str, batch: Batch) -> Outcome:
    if not DISTILLATION_TRAITS[name].is_sampled:
        return {}  # what the teacher says there is of sampled tokens alone
    leaf = batch.log_prob.clone().requires_grad_()
    found = of_loss(sampled_divergence(name, leaf, batch.old_log_prob, MASK), leaf)
    columns = (batch.advantages, batch.log_prob, batch.old_log_prob, MASK)
    changed = with_teacher_advantages(*columns, name=name, weight=0.5)
    return found | dict(zip(("advantages", "divergence"), changed, strict=True))


def value_losses(name: str, batch: Batch) -> Outcome:
    leaf = batch.log_prob.clone().requires_grad_()
    per_token, metrics = value_loss(leaf, batch.values, batch.returns, MASK, 0.3, name=name)
    return of_loss(per_token, leaf) | of_metrics(metrics)


def kl_estimators(name: str, batch: Batch) -> Outcome:
    scores = torch.where(MASK == 1, 1.0, batch.values)
    rewards, mean = penalise_rewards(scores, batch.log_prob, batch.old_log_prob, MASK, 0.1, name)
    found = {"rewards": rewards, "mean": torch.tensor(mean)}
    for kind in (name, f"{name}+"):
        leaf = batch.log_prob.clone().requires_grad_()
        divergence = kl_penalty(leaf, batch.old_log_prob, kind)
        found |= {f"{kind}: {key}": one for key, one in of_loss(divergence, leaf).items()}
    return found


def corrections(name: str, batch: Batch) -> Outcome:
    log_ratio = batch.log_prob - batch.old_log_prob
    found = of_metrics(mismatch(batch.log_prob, batch.old_log_prob, MASK))
    for normalise in (False, True):
        weights = importance_weights(log_ratio, MASK, name, Interval.parse("0.5_2.0"), normalise=normalise)
        found[f"weights, {normalise}"] = weights
    for rule in REJECTION_RULES:
        bounds = "0.8_1.2" if rule.endswith("k1") else "0.05"
        weights, kept, metrics = correct(log_ratio, MASK, correction(name, rule, bounds))
        assert weights is not None
        found |= {f"weights beside {rule}": weights, f"kept by {rule}": kept}
        found |= {f"{rule}: {key}": one for key, one in of_metrics(metrics).items()}
    return found


def correction(level: str, rules: str, thresholds: str, *, loss_type: str = "ppo_clip") -> SimpleNamespace:
    return SimpleNamespace(
        rollout_is=level,
        rollout_is_threshold="0.5_2.0",
        rollout_is_batch_normalize=True,
        rollout_rs=rules,
        rollout_rs_threshold=thresholds,
        loss_type=loss_type,
    )


def token_selection(name: str, batch: Batch) -> Outcome:
    generator = torch.Generator().manual_seed(0)
    return {"selected": select_tokens(name, batch.old_log_prob, batch.advantages, MASK, ACTOR, generator)}


def pair_losses(name: str, batch: Batch) -> Outcome:
    sums, reference = (sequence_log_prob(column, MASK) for column in (batch.log_prob, batch.old_log_prob))
    margins = pair_margins(name, sums, MASK.sum(-1), [0, 1], [3, 4], reference)
    return dict(zip(("chosen", "rejected"), margins, strict=True))


def sft_losses(name: str, batch: Batch) -> Outcome:
    leaf = batch.log_prob.clone().requires_grad_()
    return of_loss(sft_loss(leaf, MASK, name=name), leaf)


FAMILIES: dict[str, OutcomeOf] = {
    "advantage": advantages,
    "policy loss": policy_losses,
    "aggregation": aggregations,
    "value loss": value_losses,
    "distillation": distillation_losses,
    "kl": kl_estimators,
    "correction": corrections,
    "token selection": token_selection,
    "preference": pair_losses,
    "sft": sft_losses,
}
"""What each family makes of a batch; tokens of which the mask is 0 have rubbish in every column, or have not."""

OF_SAMPLES = {"group filter", "reward shaping", "policy filtration", "reward model", "labelled"}
"""Families that see one number for each sample."""


def registries() -> Iterator[Registry]:
    for module in pkgutil.iter_modules(hrl.algos.__path__, "hrl.algos."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Registry):
                yield value


def test_every_family_is_here() -> None:
    assert FAMILIES.keys() | OF_SAMPLES == REGISTRIES.keys()
    assert not FAMILIES.keys() & OF_SAMPLES
    known = {id(registry) for registry in REGISTRIES.values()}
    assert all(id(registry) in known for registry in registries()), "tests.algos.registries has all of them"


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in FAMILIES for name in REGISTRIES[family]])
def test_what_stands_at_an_environments_tokens_changes_nothing(family: str, name: str) -> None:
    batch = Batch.random(seed=3, mask=MASK)
    expected = FAMILIES[family](name, batch)
    for rubbish in RUBBISH:
        columns = {one.name: getattr(batch, one.name) for one in fields(batch) if one.name != "mask"}
        noisy = Batch(
            **{key: column.masked_fill(MASK == 0, rubbish) for key, column in columns.items()}, mask=batch.mask
        )
        found = FAMILIES[family](name, noisy)
        assert found.keys() == expected.keys()
        for key, one in expected.items():
            assert torch.equal(found[key], one), key
            assert torch.isfinite(one.double()).all(), key
