import math
from copy import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hrl.algos.aggregation import aggregate
from hrl.algos.policy_losses import (
    POLICY_LOSSES,
    PolicyLossInput,
    PolicyLossOutput,
    policy_loss,
    register_policy_loss,
)
from hrl.algos.registry import POLICY_LOSS_TRAITS
from hrl.algos.token_selection import TOKEN_SELECTORS, select_tokens
from tests.algos.batches import ACTOR, Batch

EVERY_LOSS = pytest.mark.parametrize("name", sorted(POLICY_LOSSES))


def loss_input(batch: Batch, name: str = "vanilla", log_prob: Tensor | None = None) -> PolicyLossInput:
    selected = None
    if name in TOKEN_SELECTORS:
        generator = torch.Generator().manual_seed(0)
        selected = select_tokens(name, batch.old_log_prob, batch.advantages, batch.mask, ACTOR, generator)
    leaf = batch.log_prob.clone().requires_grad_() if log_prob is None else log_prob
    return PolicyLossInput(leaf, batch.old_log_prob, batch.advantages, batch.mask, selected_tokens=selected)


def one_token(name: str, ratio: float, advantage: float, **settings: Any) -> tuple[float, float]:
    """Loss and gradient of a single token of old probability 1/4."""
    config = copy(ACTOR)
    config.__dict__.update(settings)
    old = torch.tensor([[math.log(0.25)]], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    inp = PolicyLossInput(new, old, torch.tensor([[advantage]], dtype=torch.float64), torch.ones(1, 1))
    loss = policy_loss(name, inp, config).loss_mat.sum()
    loss.backward()
    assert new.grad is not None
    return loss.item(), new.grad.item()


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Random masks, empty rows among them, and columns of any spread."""
    rows, width, seed = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(0, 1 << 16))
    mask = (torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < 0.6).long()
    return Batch.random(seed, mask)


@EVERY_LOSS
@settings(max_examples=20, deadline=None)
@given(batch=batches(), data=st.data())
def test_inserted_masked_tokens_change_nothing(name: str, batch: Batch, data: st.DataObject) -> None:
    """Wherever they stand and whatever they hold: loss, gradient and metrics are those without them."""
    places = data.draw(st.lists(st.integers(0, batch.mask.shape[1]), min_size=1, max_size=4))
    filler = st.sampled_from([-7.0, -0.1, 3.0, 1e30, math.inf, math.nan])
    inp = replace(loss_input(batch, name), rollout_is_weights=batch.weights)
    fillers = {field.name: data.draw(filler) for field in fields(inp)}
    fillers |= {"response_mask": 0, "selected_tokens": data.draw(st.booleans())}

    def widen(column: Tensor, fill: float) -> Tensor:
        for place in places:
            inserted = torch.full_like(column[:, :1], fill)
            column = torch.cat([column[:, :place], inserted, column[:, place:]], dim=1)
        return column

    columns = {key: getattr(inp, key) for key in fillers if getattr(inp, key) is not None}
    wide = PolicyLossInput(**{key: widen(column.detach(), fillers[key]) for key, column in columns.items()})
    wide = replace(wide, log_prob=wide.log_prob.requires_grad_())
    before, after = policy_loss(name, inp, ACTOR), policy_loss(name, wide, ACTOR)
    for each in (before, after):
        each.loss_mat.sum().backward()
    trained, inserted = batch.mask.bool(), wide.response_mask.bool()
    assert inp.log_prob.grad is not None
    assert wide.log_prob.grad is not None
    for narrow, widened in ((before.loss_mat, after.loss_mat), (inp.log_prob.grad, wide.log_prob.grad)):
        torch.testing.assert_close(widened[inserted], narrow[trained], rtol=1e-12, atol=1e-12)
        assert (widened[~inserted] == 0).all()
    for key, (total, count) in before.metrics.items():
        assert after.metrics[key][0].item() == pytest.approx(total.item(), rel=1e-12, abs=1e-12)
        assert after.metrics[key][1].item() == count.item() == trained.sum().item()


@EVERY_LOSS
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e30])
def test_rubbish_outside_the_mask_reaches_neither_gradient_nor_metrics(name: str, rubbish: float) -> None:
    batch = Batch.random(seed=9)
    outside = ~batch.mask.bool()
    clean = replace(loss_input(batch, name), rollout_is_weights=batch.weights)
    columns = ("log_prob", "old_log_prob", "advantages", "rollout_is_weights")
    dirty = replace(clean, **{key: getattr(clean, key).detach().masked_fill(outside, rubbish) for key in columns})
    dirty.log_prob.requires_grad_()
    expected, output = (policy_loss(name, inp, ACTOR) for inp in (clean, dirty))
    for each in (expected, output):
        aggregate(each.loss_mat, batch.mask, "token-mean").backward()
    torch.testing.assert_close(dirty.log_prob.grad, clean.log_prob.grad, rtol=0, atol=0)
    assert clean.log_prob.grad is not None
    assert clean.log_prob.grad.abs().max() > 0
    assert (clean.log_prob.grad[outside] == 0).all()
    assert output.metrics == expected.metrics


def test_a_loss_of_ones_own_sees_zeros_outside_the_mask_and_is_cut_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def mine(inp: PolicyLossInput, config: Any) -> PolicyLossOutput:
        seen.append(inp)
        return PolicyLossOutput(inp.ratio(), {})  # 1 outside

    monkeypatch.setitem(POLICY_LOSSES, "mine", mine)
    nan, mask = torch.tensor([[0.0, math.nan]]), torch.tensor([[1, 0]])
    output = policy_loss("mine", PolicyLossInput(nan, nan, nan, mask, nan, nan), None)
    assert output.loss_mat.tolist() == [[1.0, 0.0]]
    for field in fields(PolicyLossInput):
        assert getattr(seen[0], field.name)[0, 1] == 0, field.name


def test_a_loss_of_ones_own_may_give_a_number_per_token_as_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch.random(1, torch.tensor([[1, 1, 0], [1, 0, 0]]))
    per_token = torch.tensor([[1.0, 2.0, 50.0], [4.0, 50.0, 50.0]])
    mine = {"actor/mine": per_token, "actor/above_1": per_token > 1}
    monkeypatch.setitem(POLICY_LOSSES, "mine", lambda inp, config: PolicyLossOutput(inp.log_prob, mine))
    metrics = policy_loss("mine", loss_input(batch), ACTOR).metrics
    assert [part.item() for part in metrics["actor/mine"]] == [7.0, 3]
    assert [part.item() for part in metrics["actor/above_1"]] == [2.0, 3]
    mine["actor/mine"] = per_token[0]
    with pytest.raises(ValueError, match="actor/mine"):
        policy_loss("mine", loss_input(batch), ACTOR)


def test_a_loss_that_reduced_its_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICY_LOSSES, "mine", lambda inp, config: PolicyLossOutput(inp.log_prob.sum(), {}))
    with pytest.raises(ValueError, match="loss_mat has shape"):
        policy_loss("mine", loss_input(Batch.random()), None)


@EVERY_LOSS
def test_drift_is_the_same_signed_number_for_every_loss(name: str) -> None:
    """Old minus new log-probs: 0.5 and -2 at the trained tokens. verl's kl_cov reports their magnitudes, 2.5."""
    log_prob = torch.tensor([[-1.5, -1.0, -9.0]])
    inp = PolicyLossInput(log_prob, torch.tensor([[-1.0, -3.0, -1.0]]), torch.ones(1, 3), torch.tensor([[1, 1, 0]]))
    inp = replace(inp, selected_tokens=torch.tensor([[True, False, False]]))
    total, count = policy_loss(name, inp, ACTOR).metrics["actor/ppo_kl"]
    assert (total.item(), count.item()) == (-1.5, 2)


@EVERY_LOSS
def test_extreme_ratios_give_finite_gradients(name: str) -> None:
    log_prob = torch.tensor([[-0.01, -800.0, -0.01, -800.0]], requires_grad=True)
    old = torch.tensor([[-800.0, -0.01, -800.0, -0.01]])
    inp = PolicyLossInput(log_prob, old, torch.tensor([[1.0, 1.0, -1.0, -1.0]]), torch.ones(1, 4))
    inp = replace(inp, selected_tokens=torch.tensor([[True, False, False, True]]))
    policy_loss(name, inp, ACTOR).loss_mat.sum().backward()
    assert log_prob.grad is not None
    assert torch.isfinite(log_prob.grad).all()


@EVERY_LOSS
def test_on_policy_every_loss_is_the_policy_gradient(name: str) -> None:
    """At ratio 1 with one advantage per row the gradient of each is that of -A log p, and the drift exactly 0."""
    batch = Batch.random(seed=10)
    row_advantages = batch.advantages[:, :1].expand(batch.mask.shape).contiguous()
    log_prob = batch.old_log_prob.clone().requires_grad_()
    inp = PolicyLossInput(log_prob, log_prob.detach(), row_advantages, batch.mask)
    inp = replace(inp, selected_tokens=torch.zeros_like(batch.mask, dtype=torch.bool))
    output = policy_loss(name, inp, ACTOR)
    assert output.metrics["actor/ppo_kl"][0].item() == 0.0
    for key in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
        if key in output.metrics:
            assert output.metrics[key][0].item() == 0.0
    aggregate(output.loss_mat, batch.mask, "seq-mean-token-sum").backward()
    rows = batch.mask.any(dim=1).sum()
    torch.testing.assert_close(log_prob.grad, -row_advantages * batch.mask / rows, rtol=1e-12, atol=1e-15)


@EVERY_LOSS
def test_exactly_the_losses_that_declare_it_have_no_gradient_at_zero_advantage(name: str) -> None:
    """The trainer does not run such rows; it may spare only what would not have moved a weight."""
    moved = False
    for seed, spread in enumerate((1e-3, 0.1, 1.0, 10.0, 100.0)):
        batch = Batch.random(seed=seed)
        batch = replace(batch, log_prob=batch.old_log_prob + spread * batch.returns)
        inp = loss_input(batch, name)
        still = replace(inp, advantages=torch.zeros_like(inp.advantages), rollout_is_weights=batch.weights)
        policy_loss(name, still, ACTOR).loss_mat.sum().backward()
        assert inp.log_prob.grad is not None
        moved |= bool((inp.log_prob.grad != 0).any())
    assert moved == (not POLICY_LOSS_TRAITS[name].zero_at_zero_advantage)


@EVERY_LOSS
def test_exactly_the_losses_that_declare_it_give_a_token_another_loss_where_its_row_is_cut(name: str) -> None:
    """An episode of several rows is that to the update: the same tokens, cut."""
    log_ratio = torch.tensor([[0.1, 0.05, -0.15, -0.1]], dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)
    cut = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]], dtype=torch.bool)

    def losses(mask: torch.Tensor) -> torch.Tensor:
        old = torch.full(mask.shape, -1.0, dtype=torch.float64)
        selected = torch.zeros_like(mask)
        inp = PolicyLossInput(old + log_ratio, old, torch.ones_like(old), mask, selected_tokens=selected)
        return policy_loss(name, inp, ACTOR).loss_mat.sum(0)

    assert torch.allclose(losses(cut), losses(mask)) == (not POLICY_LOSS_TRAITS[name].has_row_ratio)


@EVERY_LOSS
def test_correction_weights_scale_the_loss(name: str) -> None:
    batch = Batch.random(seed=11)
    inp = loss_input(batch, name)
    doubled = replace(inp, rollout_is_weights=torch.full_like(batch.weights, 2.0))
    torch.testing.assert_close(
        policy_loss(name, doubled, ACTOR).loss_mat, 2.0 * policy_loss(name, inp, ACTOR).loss_mat, rtol=1e-12, atol=0
    )


def test_vanilla_clips_each_side_by_its_own_range() -> None:
    bounds = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}
    assert one_token("vanilla", 1.2, 2.0, **bounds) == (pytest.approx(-2.4), pytest.approx(-2.4))
    assert one_token("vanilla", 1.4, 2.0, **bounds) == (pytest.approx(-2.6), 0.0)
    assert one_token("vanilla", 0.8, -2.0, **bounds) == (pytest.approx(1.8), 0.0)
    assert one_token("vanilla", 2.0, -2.0, **bounds) == (pytest.approx(4.0), pytest.approx(4.0))
    assert one_token("vanilla", 5.0, -2.0, **bounds) == (pytest.approx(6.0), 0.0)


def test_clip_ratio_stands_in_for_a_missing_side() -> None:
    bounds = {"clip_ratio": 0.5, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0}
    assert one_token("vanilla", 1.8, 1.0, **bounds)[0] == pytest.approx(-1.5)
    assert one_token("vanilla", 0.2, -1.0, **bounds)[0] == pytest.approx(0.5)


def test_gspo_clips_by_the_geometric_mean() -> None:
    """Ratios 2 and 1/2: their geometric mean is 1, so nothing is clipped though both tokens are far outside."""
    old = torch.zeros(1, 2, dtype=torch.float64)
    new = torch.tensor([[math.log(2.0), -math.log(2.0)]], dtype=torch.float64, requires_grad=True)
    output = policy_loss("gspo", PolicyLossInput(new, old, torch.ones(1, 2), torch.ones(1, 2)), ACTOR)
    output.loss_mat.sum().backward()
    assert output.loss_mat.tolist() == [[-1.0, -1.0]]
    assert output.metrics["actor/pg_clipfrac"][0].item() == 0
    assert new.grad is not None
    assert new.grad.tolist() == [[-1.0, -1.0]]


def test_geo_mean_is_one_number_per_sequence() -> None:
    config = copy(ACTOR)
    config.clip_ratio_low = config.clip_ratio_high = 1.0
    old = torch.zeros(1, 3, dtype=torch.float64)
    new = torch.tensor([[0.4, -0.2, 9.9]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0]])
    output = policy_loss("geo_mean", PolicyLossInput(new, old, torch.full((1, 3), 2.0), mask), config)
    expected = -2.0 * math.exp(0.1)
    assert output.loss_mat[0].tolist() == pytest.approx([expected, expected, 0.0])


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "kept"),
    [(0.5, 1.0, 0.3), (-0.5, 1.0, -0.5), (0.5, -1.0, 0.5), (-0.5, -1.0, -0.1)],
    ids=["rose, good", "fell, good", "rose, bad", "fell, bad"],
)
def test_geo_mean_clips_each_token_the_way_its_advantage_pulls(log_ratio: float, advantage: float, kept: float) -> None:
    bounds = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
    value, gradient = one_token("geo_mean", math.exp(log_ratio), advantage, **bounds)
    assert value == pytest.approx(-advantage * math.exp(kept))
    assert gradient == pytest.approx(-advantage * math.exp(kept) if kept == log_ratio else 0.0)


def test_geo_mean_weighs_a_sequence_by_the_geometric_mean_of_its_weights() -> None:
    zeros, mask = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[1, 1, 0]])
    inp = PolicyLossInput(zeros, zeros, torch.ones(1, 3), mask, torch.tensor([[4.0, 1.0, 99.0]]))
    assert policy_loss("geo_mean", inp, ACTOR).loss_mat.tolist() == [[-2.0, -2.0, 0.0]]


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    assert one_token("cispo", 5.0, 2.0, clip_ratio_high=0.3)[1] == pytest.approx(-1.3 * 2.0)


def test_sapo_by_hand() -> None:
    tau = 1.05
    value, gradient = one_token("sapo", 2.0, -3.0, tau_neg=tau)
    gate = 1 / (1 + math.exp(-tau))
    assert value == pytest.approx(3.0 * gate * 4 / tau)
    assert gradient == pytest.approx(3.0 * 4 * gate * (1 - gate) * 2.0)


def test_dppo_drops_what_moved_too_far_the_way_the_advantage_pulls() -> None:
    thresholds = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "clip_ratio_c": 20.0}
    assert one_token("dppo_tv", 1.6, 1.0, **thresholds)[1] == 0.0  # 0.25 -> 0.40
    assert one_token("dppo_tv", 1.3, 1.0, **thresholds)[1] == pytest.approx(-1.3)
    assert one_token("dppo_tv", 0.4, 1.0, **thresholds)[1] == pytest.approx(-0.4)
    assert one_token("dppo_tv", 0.4, -1.0, **thresholds)[1] == 0.0  # 0.25 -> 0.10
    truncated = thresholds | {"clip_ratio_c": 1.2}
    assert one_token("dppo_tv", 1.3, 1.0, **truncated)[1] == pytest.approx(-1.2)
    # A good token that has fallen far is pulled back by the divergence's other side as well.
    assert one_token("dppo_kl", 0.01, 1.0, **thresholds)[1] == pytest.approx(-0.01)
    assert one_token("dppo_kl", 3.9, -1.0, **thresholds)[1] == pytest.approx(3.9)
    divergence = 0.25 * math.log(0.25 / 0.4) + 0.75 * math.log(0.75 / 0.6)
    for threshold, gradient in ((divergence - 1e-6, 0.0), (divergence + 1e-6, -1.6)):
        got = one_token("dppo_kl", 1.6, 1.0, clip_ratio_low=0.0, clip_ratio_high=threshold, clip_ratio_c=20.0)
        assert got[1] == pytest.approx(gradient)


def test_dro_by_hand() -> None:
    value, gradient = one_token("dro", 2.0, 3.0)
    beta, log_ratio, log_prob = ACTOR.policy_loss.dro_beta, math.log(2.0), math.log(0.5)
    assert value == pytest.approx(-3.0 * log_prob + 0.5 * beta * log_ratio**2)
    assert gradient == pytest.approx(-3.0 + beta * log_ratio)


def test_selected_tokens_of_covariance_losses() -> None:
    batch = Batch.random(seed=12)
    mask = batch.mask.bool()
    everything = replace(loss_input(batch), selected_tokens=mask)
    nothing = replace(loss_input(batch), selected_tokens=torch.zeros_like(mask))
    penalty = policy_loss("kl_cov", everything, ACTOR).loss_mat - policy_loss("kl_cov", nothing, ACTOR).loss_mat
    distance = (batch.log_prob - batch.old_log_prob).abs() * batch.mask
    torch.testing.assert_close(penalty, ACTOR.policy_loss.ppo_kl_coef * distance, rtol=1e-9, atol=1e-12)
    policy_loss("clip_cov", everything, ACTOR).loss_mat.sum().backward()
    assert (everything.log_prob.grad == 0).all()


@pytest.mark.parametrize("name", sorted(TOKEN_SELECTORS))
def test_a_choice_over_a_micro_batch_is_never_made_silently(name: str) -> None:
    with pytest.raises(ValueError, match="selected_tokens"):
        policy_loss(name, loss_input(Batch.random()), ACTOR)


def test_bad_settings_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="clip_ratio_c must be above 1"):
        one_token("vanilla", 1.0, 1.0, clip_ratio_c=1.0)
    with pytest.raises(ValueError, match="dro_beta"):
        policy = copy(ACTOR.policy_loss)
        policy.dro_beta = None
        one_token("dro", 1.0, 1.0, policy_loss=policy)
    batch = Batch.random()
    with pytest.raises(ValueError, match=r"'vanila'.*vanilla"):
        policy_loss("vanila", loss_input(batch), ACTOR)
    with pytest.raises(ValueError, match="advantages has shape"):
        policy_loss("vanilla", replace(loss_input(batch), advantages=batch.advantages[:, 1:]), ACTOR)


@pytest.mark.usefixtures("own_registries")
def test_a_name_is_registered_once() -> None:
    def mine(inp: PolicyLossInput, config: Any) -> PolicyLossOutput:
        return PolicyLossOutput(-inp.log_prob, {})

    register_policy_loss("mine")(mine)
    register_policy_loss("mine")(mine)
    assert not POLICY_LOSS_TRAITS["mine"].zero_at_zero_advantage  # nobody has said so
    with pytest.raises(ValueError, match="'vanilla' is already registered"):
        register_policy_loss("vanilla")(mine)
