"""A user's own member of every family: a function and a line, from outside the package."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from hrl.algos import (
    advantages,
    aggregation,
    groups,
    kl,
    policy_filtration,
    policy_losses,
    preference,
    reward_shaping,
    rollout_correction,
    token_selection,
    value_loss,
)
from hrl.algos.advantages import AdvantageConfig, AdvantageInput
from hrl.algos.policy_losses import PolicyLossInput, PolicyLossOutput
from hrl.algos.registry import POLICY_LOSS_TRAITS
from hrl.reward.combine import RewardShaping
from tests.algos.registries import REGISTRIES

pytestmark = pytest.mark.usefixtures("own_registries")

FAMILIES: dict[str, Any] = REGISTRIES | {"rejection": rollout_correction.REJECTION_RULES}
MUST_EXIST = {
    "advantage": "gae grpo rloo reinforce_plus_plus reinforce_plus_plus_baseline remax opo gpg grpo_passk "
    "best_of_n gdpo optimal_token_baseline",
    "policy loss": "vanilla gspo cispo sapo gpg clip_cov kl_cov geo_mean dppo_tv dppo_kl dro",
    "aggregation": "token-mean token-sum seq-mean-token-sum seq-mean-token-mean seq-mean-token-sum-norm",
    "value loss": "clipped",
    "distillation": "k1 k2 k3 reverse_kl_topk forward_kl_topk",
    "kl": "k1 abs k2 k3 kl mse low_var_kl",
    "correction": "token sequence",
    "rejection": "token_k1 token_k2 token_k3 seq_mean_k1 seq_mean_k2 seq_mean_k3 seq_max_k2 seq_max_k3",
    "group filter": "spread",
    "preference": "sigmoid ipo simpo orpo",
    "labelled": "kto apo_zero_unpaired",
    "reward model": "bradley_terry",
    "sft": "nll",
    "reward shaping": "clip standardise",
    "policy filtration": "pow max_min max_random",
    "token selection": "clip_cov kl_cov",
}
ONES = torch.ones(2, 3)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_members(family: str) -> None:
    assert set(MUST_EXIST[family].split()) <= FAMILIES[family].keys()


PAPER = r"arXiv:\d{4}\.\d{4,5}"
PLACE = r"""[^`]{0,60}?(equation|section|Algorithm|"[A-Za-z])"""
"""Where in the paper: an equation, a section, or in quotes what the paper calls it (or itself)."""
# Corrections are documented at their function, selectors at their losses; these need no paper.
NO_PAPER = {"token-sum", "abs", "nll", "standardise", "pow", "max_min", "max_random"}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (family, name)
        for family, registry in REGISTRIES.items()
        if family not in ("correction", "token selection")
        for name in registry
    ],
)
def test_every_member_has_its_formula_and_its_source_in_its_docstring(family: str, name: str) -> None:
    member = REGISTRIES[family][name]
    text = inspect.getdoc(member)
    assert text is not None
    assert "`" in text, "no formula"
    assert name in NO_PAPER or re.search(rf"{PAPER}{PLACE}|https?://|et al\.", text, re.S), "no source"


def test_an_advantage_estimator() -> None:
    @advantages.register_adv_est("mine", min_group_size=2)
    def mine(inp: AdvantageInput, config: Any) -> tuple[Tensor, Tensor]:
        advantage = inp.spread(inp.scores() * config.gamma)
        return advantage, advantage

    inp = AdvantageInput(ONES, MASK)
    got, _ = advantages.compute_advantages("mine", inp, AdvantageConfig(gamma=0.5))
    assert got.tolist() == [[1.0, 1.0, 0.0], [0.5, 0.0, 0.0]]


def test_a_policy_loss() -> None:
    @policy_losses.register_policy_loss("mine", zero_at_zero_advantage=True)
    def mine(inp: PolicyLossInput, config: Any) -> PolicyLossOutput:
        return PolicyLossOutput(-inp.advantages * inp.log_prob * inp.response_mask, {})

    output = policy_losses.policy_loss("mine", PolicyLossInput(-ONES, -ONES, 2 * ONES, MASK), None)
    assert output.loss_mat.tolist() == [[2.0, 2.0, 0.0], [2.0, 0.0, 0.0]]
    assert POLICY_LOSS_TRAITS["mine"].zero_at_zero_advantage


def test_an_aggregation() -> None:
    def root_mean(row_sums: Tensor, row_tokens: Tensor, counts: aggregation.Counts, norm: float | None) -> Tensor:
        return row_sums.sum() / counts.tokens**0.5

    aggregation.AGGREGATION_MODES["root-mean"] = root_mean
    counts = aggregation.Counts(tokens=9, sequences=2)
    assert aggregation.aggregate(ONES, MASK, "root-mean", counts).item() == 1.0


def test_a_value_loss() -> None:
    value_loss.VALUE_LOSSES["absolute"] = lambda v, old, target, clip: ((v - target).abs(), (v - old).abs() > clip)
    loss_mat, metrics = value_loss.value_loss(3 * ONES, 2 * ONES, ONES, MASK, 0.5, name="absolute")
    assert loss_mat.tolist() == [[2.0, 2.0, 0.0], [2.0, 0.0, 0.0]]
    assert [number.item() for number in metrics["critic/vf_clipfrac"]] == [3.0, 3]


def test_a_kl_estimator_and_its_plus() -> None:
    kl.KL_ESTIMATORS["quartic"] = lambda difference: difference**4
    log_prob = torch.tensor([-1.0], requires_grad=True)
    value = kl.kl_penalty(log_prob, torch.tensor([-3.0]), "quartic+")
    value.sum().backward()
    assert value.item() == 16.0
    assert log_prob.grad is not None
    assert log_prob.grad.item() == 2.0  # k2's


def test_a_level_of_correction_and_a_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    def geometric(log_ratio: Tensor) -> Tensor:
        return log_ratio.mean(dim=-1, keepdim=True).exp().expand(log_ratio.shape)

    rollout_correction.IMPORTANCE_LEVELS["row"] = (geometric, lambda weights, mask: weights[mask.bool()].mean())
    full = torch.ones(1, 2)
    log_ratio = torch.tensor([[1.0, -1.0]])
    weights = rollout_correction.importance_weights(log_ratio, full, "row", rollout_correction.Interval(2.0))
    assert weights.tolist() == [[1.0, 1.0]]
    monkeypatch.setitem(rollout_correction.REJECTION_RULES, "worst", ("seq_max", "k2"))
    assert rollout_correction.rejection_mask(log_ratio, full, "worst", 0.4).tolist() == [[0.0, 0.0]]


def test_a_group_filter() -> None:
    groups.GROUP_FILTERS["solvable"] = lambda scores, ids, counted: groups.group_sum(scores, ids) > 0
    scores, ids, counted = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool)
    assert groups.filter_groups("solvable", scores, ids, counted).tolist() == [True, True, False]
    groups.GROUP_FILTERS["right"] = lambda scores, ids, counted: scores > 0
    with pytest.raises(ValueError, match="'right' keeps row 1 and drops others"):
        groups.filter_groups("right", scores, ids, counted)
    with pytest.raises(ValueError, match=r"'solved'.*'right', 'solvable', 'spread'"):
        groups.filter_groups("solved", scores, ids, counted)


def test_losses_of_pairs_scores_and_data() -> None:
    two, one = torch.tensor([2.0]), torch.tensor([1.0])
    preference.PAIR_LOSSES["linear"] = lambda chosen, rejected, options: options.beta * (rejected - chosen)
    assert preference.preference_loss("linear", two, one, preference.PairOptions(beta=0.5))[0].tolist() == [-0.5]
    preference.REWARD_MODEL_LOSSES["hinge"] = lambda lead: torch.relu(3.0 - lead)
    assert preference.reward_model_loss(two, one, name="hinge")[0].tolist() == [2.0]
    preference.SFT_LOSSES["twice"] = lambda log_prob: -2.0 * log_prob
    assert preference.sft_loss(-ONES, MASK, name="twice").tolist() == [[2.0, 2.0, 0.0], [2.0, 0.0, 0.0]]


def test_a_loss_of_pairs_says_what_it_takes() -> None:
    preference.PAIR_LOSSES["linear"] = lambda chosen, rejected, options: rejected - chosen
    sums, lengths = torch.tensor([-6.0, -4.0]), torch.tensor([3, 1])
    reference = torch.tensor([-3.0, -1.0])

    def loss() -> list[float]:
        margins = preference.pair_margins("linear", sums, lengths, [0], [1], reference)
        return preference.preference_loss("linear", *margins, preference.PairOptions())[0].tolist()

    assert loss() == [-3.0 - -3.0]  # sums, less the reference's
    register = preference.PAIR_LOSSES.register
    register("linear", reference=False)(preference.PAIR_LOSSES["linear"])
    assert loss() == [-4.0 - -6.0]
    register("linear", reference=False, mean_log_prob=True)(preference.PAIR_LOSSES["linear"])
    assert loss() == [-4.0 - -2.0]


def test_a_shape_of_rewards_and_a_filtration() -> None:
    reward_shaping.REWARD_SHAPERS["halve"] = lambda rewards, seen, limit: rewards / 2
    assert RewardShaping({"halve": None})(torch.tensor([3.0]), torch.tensor([True])).tolist() == [1.5]
    policy_filtration.REWEIGHT_METHODS["positive"] = lambda scores, power: scores.clamp(min=0) ** power
    weights = policy_filtration.filtration_weights(torch.tensor([-1.0, 3.0]), torch.ones(2).bool(), "positive")
    assert weights.tolist() == [0.0, 1.0]


def test_a_choice_of_tokens() -> None:
    token_selection.TOKEN_SELECTORS["rare"] = lambda log_probs, adv, trained, config, generator: (
        trained & (log_probs < -2)
    )
    chosen = token_selection.select_tokens("rare", torch.tensor([[-3.0, -1.0, -9.0]]), ONES[:1], MASK[:1], None)
    assert chosen.tolist() == [[True, False, False]]
