"""Divergences from a teacher, by hand and against sums over the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hrl.algos.distillation import distillation_loss, sampled_divergence, with_teacher_advantages
from hrl.algos.registry import DISTILLATION_TRAITS


def distributions(seed: int, tokens: int, words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of a policy and a teacher ``(N, V)``."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, tokens, words, generator=generator, dtype=torch.float64).log_softmax(-1)
    return student, teacher


def reverse_kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return (student.exp() * (student - teacher)).sum(-1)


def top_of(student: torch.Tensor, teacher: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    top = teacher.topk(count, -1)
    return student.gather(-1, top.indices), top.values


def test_hand_computed_divergences():
    """The policy gives 1/2 and 1/4 to the teacher's two tokens of 5/8 and 1/4, and 1/4 and 1/8 are left."""
    student, teacher = torch.tensor([[0.5, 0.25]]).double().log(), torch.tensor([[0.625, 0.25]]).double().log()
    reverse = 0.5 * math.log(0.5 / 0.625) + 0.25 * math.log(0.25 / 0.125)
    assert distillation_loss("reverse_kl_topk", student, teacher).item() == pytest.approx(reverse, rel=1e-12)
    assert distillation_loss("forward_kl_topk", student, teacher).item() == pytest.approx(
        0.625 * math.log(1.25), rel=1e-12
    )
    assert distillation_loss("forward_kl_topk", teacher, student).item() == 0.0  # 1/2 log(4/5) is negative
    with pytest.raises(ValueError, match="unknown distillation loss"):
        distillation_loss("jsd", student, teacher)
    with pytest.raises(ValueError, match="student has shape"):
        distillation_loss("reverse_kl_topk", student, teacher[:, :1])


def test_hand_computed_clamps():
    """The policy gives e^-4 and the teacher e^-12 to the second token; with a floor of -10 that is e^-10."""
    student, teacher = torch.tensor([[-0.5, -4.0]]).double(), torch.tensor([[-0.25, -12.0]]).double()
    student.requires_grad_()
    ends = math.exp(-0.25) * 0.25
    plain = ends + math.exp(-12.0) * -8.0
    assert distillation_loss("forward_kl_topk", student, teacher).item() == pytest.approx(plain, rel=1e-12)
    floored = ends + math.exp(-10.0) * -6.0
    found = distillation_loss("forward_kl_topk", student, teacher, floor=-10.0)
    assert found.item() == pytest.approx(floored, rel=1e-12)
    low = distillation_loss("forward_kl_topk", student, teacher, floor=-3.0)
    assert low.item() == pytest.approx(ends, rel=1e-12)  # both are raised to the same
    (gradient,) = torch.autograd.grad(low.sum(), student)
    assert gradient[0, 1] == 0 and gradient[0, 0] == pytest.approx(-math.exp(-0.25), rel=1e-12)
    one, other = torch.tensor([[-20.0, -0.5, -1.0]]).double(), torch.tensor([[-0.5, -20.0, -1.25]]).double()
    sampled = sampled_divergence("k1", one, other, torch.ones(1, 3), limit=10.0)
    assert sampled.tolist() == [[-10.0, 10.0, 0.25]]
    assert torch.equal(distillation_loss("k1", one, other, floor=-10.0), one - other), "as in verl, of the _topk alone"
    advantages, _ = with_teacher_advantages(None, one, other, torch.ones(1, 3), name="k1", weight=2.0, limit=10.0)
    assert advantages.tolist() == [[20.0, -20.0, -0.5]]


@given(seed=st.integers(0, 1000), words=st.integers(3, 12), data=st.data())
def test_the_likeliest_tokens_bound_the_whole_divergence_from_below(seed, words, data):
    student, teacher = distributions(seed, 4, words)
    whole = reverse_kl(student, teacher)
    found = [distillation_loss("reverse_kl_topk", *top_of(student, teacher, count)) for count in range(1, words)]
    for smaller, larger in zip(found, [*found[1:], whole], strict=True):  # every token more tells more
        assert (smaller <= larger + 1e-12).all() and (smaller >= -1e-12).all()
    torch.testing.assert_close(found[-1], whole, rtol=1e-9, atol=1e-12)  # the rest is one token
    assert (distillation_loss("reverse_kl_topk", *top_of(student, student, 2)).abs() < 1e-12).all()


def test_the_expected_gradient_of_k2_and_of_k1_as_a_reward_is_that_of_the_reverse_kl():
    """Over all tokens of the vocabulary, each as often as the policy samples it."""
    logits, (_, teacher) = torch.tensor([[0.3, -1.0, 0.7, 0.1]]).double().requires_grad_(), distributions(1, 1, 4)
    student = logits.log_softmax(-1)
    often = student.detach().exp()
    (wanted,) = torch.autograd.grad(reverse_kl(student, teacher).sum(), logits, retain_graph=True)
    (of_k2,) = torch.autograd.grad((often * distillation_loss("k2", student, teacher)).sum(), logits, retain_graph=True)
    advantages, _ = with_teacher_advantages(None, student.detach(), teacher, torch.ones(1, 4), name="k1", weight=1.0)
    (of_k1,) = torch.autograd.grad(-(often * advantages * student).sum(), logits)
    torch.testing.assert_close(of_k2, wanted)
    torch.testing.assert_close(of_k1, wanted)


def test_a_divergence_is_subtracted_from_advantages_inside_the_mask():
    student, teacher = torch.tensor([[-1.0, -2.0, math.nan]]), torch.tensor([[-1.5, -1.0, -3.0]])
    mask, own = torch.tensor([[1, 1, 0]]), torch.tensor([[0.5, 0.5, 0.0]])
    both, found = with_teacher_advantages(own, student, teacher, mask, name="k1", weight=0.1)
    torch.testing.assert_close(found, torch.tensor([[0.5, -1.0, 0.0]]))
    torch.testing.assert_close(both, torch.tensor([[0.45, 0.6, 0.0]]))
    alone, _ = with_teacher_advantages(None, student, teacher, mask, name="k1", weight=1.0)
    torch.testing.assert_close(alone, -found)


@pytest.mark.parametrize("name", [name for name, traits in DISTILLATION_TRAITS.items() if not traits.is_sampled])
def test_a_loss_that_reads_more_than_the_sampled_token_is_refused(name):
    with pytest.raises(ValueError, match="reads more of the teacher"):
        sampled_divergence(name, torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2))
