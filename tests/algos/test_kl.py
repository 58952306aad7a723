import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hrl.algos.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    check_kl_loss_type,
    get_kl_controller,
    kl_penalty,
    penalise_rewards,
)

FIVE = st.lists(st.floats(-3.0, 3.0), min_size=5, max_size=5)
"""Logits of a softmax over five tokens."""


def expected(kind: str, logits: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Expectation over the five tokens, drawn from the policy, of an estimator's value and of its gradient."""
    logits = logits.clone().requires_grad_()
    log_probs = torch.log_softmax(logits, dim=0)
    value = (log_probs.detach().exp() * kl_penalty(log_probs, reference, kind)).sum()
    value.backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


def exact(divergence: str, logits: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    log_probs = torch.log_softmax(logits, dim=0)
    value = {
        "policy to reference": (log_probs.exp() * (log_probs - reference)).sum(),
        "reference to policy": (reference.exp() * (reference - log_probs)).sum(),
        "l1": (log_probs.exp() - reference.exp()).abs().sum(),
        "nothing": (log_probs * 0.0).sum(),
    }[divergence]
    value.backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


GRADIENT_OF = {
    "k1": "nothing",
    "kl": "nothing",
    "abs": "l1",
    "k2": "policy to reference",
    "mse": "policy to reference",
    "k3": "reference to policy",
    "low_var_kl": "reference to policy",
} | {f"{kind}+": "policy to reference" for kind in KL_ESTIMATORS}


@pytest.mark.parametrize("kind", sorted({*KL_ESTIMATORS, *(f"{kind}+" for kind in KL_ESTIMATORS)}))
@settings(max_examples=10, deadline=None)
@given(logits=FIVE, reference=FIVE)
def test_expected_gradient_by_enumeration(kind: str, logits: list[float], reference: list[float]) -> None:
    policy = torch.tensor(logits, dtype=torch.float64)
    other = torch.log_softmax(torch.tensor(reference, dtype=torch.float64), dim=0)
    if kind == "abs":  # it has a kink where a token is equally likely under both
        assume(float((torch.log_softmax(policy, dim=0) - other).abs().min()) > 1e-9)
    got, want = expected(kind, policy, other)[1], exact(GRADIENT_OF[kind], policy, other)[1]
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", ["k1", "k3", "k1+", "k3+"])
@settings(max_examples=10, deadline=None)
@given(logits=FIVE, reference=FIVE)
def test_k1_and_k3_are_unbiased(kind: str, logits: list[float], reference: list[float]) -> None:
    policy = torch.tensor(logits, dtype=torch.float64)
    other = torch.log_softmax(torch.tensor(reference, dtype=torch.float64), dim=0)
    got, want = expected(kind, policy, other)[0], exact("policy to reference", policy, other)[0]
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


def test_k2_of_the_value_is_half_the_square() -> None:
    assert kl_penalty(torch.tensor(-1.0), torch.tensor(-4.0), "mse").item() == 4.5
    assert kl_penalty(torch.tensor(-4.0), torch.tensor(-1.0), "abs").item() == 3.0


def test_plus_has_the_value_of_its_kind_and_the_gradient_of_k2() -> None:
    def at(kind: str) -> tuple[float, float]:
        log_prob = torch.tensor(-2.0, dtype=torch.float64, requires_grad=True)
        value = kl_penalty(log_prob, torch.tensor(-0.5, dtype=torch.float64), kind)
        value.backward()
        assert log_prob.grad is not None
        return value.item(), log_prob.grad.item()

    assert at("k3+") == (pytest.approx(at("k3")[0]), pytest.approx(at("k2")[1]))
    assert at("k2")[1] == pytest.approx(-1.5)


@pytest.mark.parametrize("kind", ["k2", "k3", "k3+", "k1+"])
@pytest.mark.parametrize("distance", [9.0, 30.0, 500.0])
def test_gradient_grows_with_distance_and_stays_finite(kind: str, distance: float) -> None:
    log_prob = torch.tensor([-distance, -distance - 1.0], requires_grad=True)
    kl_penalty(log_prob, torch.zeros(2), kind).sum().backward()
    assert log_prob.grad is not None
    assert torch.isfinite(log_prob.grad).all()
    near, far = log_prob.grad.abs().tolist()
    assert far >= near > 1.0


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'k4'.*k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


def test_k1_is_refused_as_a_loss() -> None:
    for kind in ("k1", "kl"):
        with pytest.raises(ValueError, match="expected gradient of zero"):
            check_kl_loss_type(kind)
    for kind in ("k2", "k3", "abs", "k1+", "low_var_kl"):
        check_kl_loss_type(kind)


def test_penalised_rewards_ignore_masked_tokens_and_empty_rows() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 0]])
    log_prob = torch.tensor([[-1.0, -2.0, math.nan], [0.0, 0.0, 0.0], [9.0, -4.0, 9.0]])
    scores = torch.tensor([[0.0, 1.0, 7.0], [5.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    rewards, current_kl = penalise_rewards(scores, log_prob, torch.full((3, 3), -2.5), mask, 0.1, "k1")
    torch.testing.assert_close(rewards, torch.tensor([[-0.15, 0.95, 0.0], [0.0, 0.0, 0.0], [0.0, 2.15, 0.0]]))
    assert current_kl == pytest.approx((1.0 - 1.5) / 2)
    assert penalise_rewards(scores, log_prob, scores, mask * 0, 0.1, "k1")[1] == 0.0


def test_adaptive_controller_clips_the_error() -> None:
    controller = AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=1000)
    controller.update(current_kl=0.5, n_steps=64)
    assert controller.value == pytest.approx(0.2 * (1 + 0.2 * 64 / 1000))
    controller.update(current_kl=0.0, n_steps=1000)
    assert controller.value == pytest.approx(0.2 * (1 + 0.2 * 64 / 1000) * 0.8)


def test_a_kl_that_is_not_finite_does_not_enter_the_weight() -> None:
    controller = AdaptiveKLController(0.2, 0.1, 1000)
    with pytest.raises(ValueError, match="nan"):
        controller.update(math.nan, 1)
    assert controller.value == 0.2


def test_controllers_from_configuration() -> None:
    fixed = get_kl_controller(SimpleNamespace(type="fixed", kl_coef=0.3))
    assert isinstance(fixed, FixedKLController)
    fixed.update(current_kl=5.0, n_steps=100)
    assert fixed.value == 0.3
    adaptive = get_kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.3, target_kl=0.1, horizon=100))
    assert isinstance(adaptive, AdaptiveKLController)
    with pytest.raises(ValueError, match="horizon"):
        get_kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.3, target_kl=0.1, horizon=0))
    with pytest.raises(ValueError, match="target_kl"):
        get_kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.3, target_kl=0.0, horizon=10))
    with pytest.raises(ValueError, match="'pid'"):
        get_kl_controller(SimpleNamespace(type="pid"))
