"""The gradient of a mini-batch does not depend on how it is cut: every registered loss x every aggregation."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hrl.algos.aggregation import AGGREGATION_MODES, Counts, aggregate
from hrl.algos.kl import KL_ESTIMATORS, kl_penalty
from hrl.algos.policy_losses import POLICY_LOSSES, PolicyLossInput, policy_loss
from hrl.algos.preference import (
    PAIR_LOSSES,
    REFERENCE_FREE_LOSSES,
    PairInput,
    PairOptions,
    mean_over_pairs,
    preference_loss,
    reward_model_loss,
    sft_loss,
)
from hrl.algos.token_selection import TOKEN_SELECTORS, select_tokens
from hrl.algos.value_loss import value_loss
from tests.algos.batches import ACTOR, Batch

CUTS = (1, 2, 3, 8)
KL_KINDS = sorted({*KL_ESTIMATORS, *(f"{kind}+" for kind in KL_ESTIMATORS)})
LossOf = Callable[[Batch, Tensor], Tensor]
"""From the columns of some rows and the tensor that carries the gradient to a loss per token."""


def gradient(batch: Batch, leaf: Tensor, loss_of: LossOf, mode: str, pieces: int) -> tuple[Tensor, Tensor]:
    """Loss and gradient accumulated over micro-batches of shuffled rows, each cut to its own padding."""
    counts = Counts.of(batch.mask)
    parameter = leaf.clone().requires_grad_()
    order = torch.randperm(len(leaf), generator=torch.Generator().manual_seed(pieces))
    total = torch.zeros((), dtype=leaf.dtype)
    for rows in order.tensor_split(pieces):
        piece = batch.rows(rows).without_trailing_padding()
        loss_mat = loss_of(piece, parameter[rows][:, : piece.mask.shape[1]])
        loss = aggregate(loss_mat, piece.mask, mode, counts, norm=6.0)
        loss.backward()
        total += loss.detach()
    assert parameter.grad is not None
    return total, parameter.grad


def assert_invariant(batch: Batch, leaf: Tensor, loss_of: LossOf, mode: str) -> None:
    tolerance = 1e-12 if leaf.dtype == torch.float64 else 1e-6
    whole_loss, whole_gradient = gradient(batch, leaf, loss_of, mode, 1)
    assert whole_gradient.abs().max() > 0
    assert (whole_gradient[~batch.mask.bool()] == 0).all()
    for pieces in CUTS[1:]:
        loss, grad = gradient(batch, leaf, loss_of, mode, pieces)
        scale = whole_gradient.abs().max().item()
        torch.testing.assert_close(loss, whole_loss, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(grad, whole_gradient, rtol=tolerance, atol=tolerance * scale)


def selection_as_column(name: str, batch: Batch) -> Batch:
    """For losses that choose tokens over the whole batch: the choice travels in the otherwise unused `values`."""
    generator = torch.Generator().manual_seed(1)
    chosen = select_tokens(name, batch.old_log_prob, batch.advantages, batch.mask, ACTOR, generator)
    assert 0 < chosen.sum() < batch.mask.sum()
    return replace(batch, values=chosen)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("mode", sorted(AGGREGATION_MODES))
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_policy_loss(name: str, mode: str, dtype: torch.dtype, weighted: bool) -> None:
    batch = Batch.random(seed=3, dtype=dtype)
    if name in TOKEN_SELECTORS:
        batch = selection_as_column(name, batch)

    def loss_of(piece: Batch, log_prob: Tensor) -> Tensor:
        selected = piece.values if name in TOKEN_SELECTORS else None
        weights = piece.weights if weighted else None
        inp = PolicyLossInput(log_prob, piece.old_log_prob, piece.advantages, piece.mask, weights, selected)
        return policy_loss(name, inp, ACTOR).loss_mat

    assert_invariant(batch, batch.log_prob, loss_of, mode)


@pytest.mark.parametrize("mode", sorted(AGGREGATION_MODES))
def test_value_loss(mode: str) -> None:
    batch = Batch.random(seed=4)

    def loss_of(piece: Batch, vpreds: Tensor) -> Tensor:
        return value_loss(vpreds, piece.values, piece.returns, piece.mask, cliprange_value=0.3)[0]

    assert_invariant(batch, batch.log_prob, loss_of, mode)


@pytest.mark.parametrize("mode", sorted(AGGREGATION_MODES))
@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_loss(kind: str, mode: str) -> None:
    batch = Batch.random(seed=5)
    assert_invariant(batch, batch.log_prob, lambda piece, x: kl_penalty(x, piece.old_log_prob, kind), mode)


@pytest.mark.parametrize("mode", sorted(AGGREGATION_MODES))
def test_sft_and_entropy_losses(mode: str) -> None:
    batch = Batch.random(seed=6)
    assert_invariant(batch, batch.log_prob, lambda piece, x: sft_loss(x, piece.mask), mode)
    assert_invariant(batch, batch.log_prob, lambda piece, x: -x.exp() * x, mode)


@pytest.mark.parametrize("name", [*sorted(PAIR_LOSSES), "reward_model"])
def test_pair_losses(name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    policy, reference = torch.randn(2, 2, 8, generator=generator, dtype=torch.float64)

    def gradient_over(pieces: int) -> Tensor:
        parameter = policy.clone().requires_grad_()
        for rows in torch.arange(8).tensor_split(pieces):
            chosen, rejected = parameter[:, rows]
            if name == "reward_model":
                losses, _ = reward_model_loss(chosen, rejected)
            else:
                references = (None, None) if name in REFERENCE_FREE_LOSSES else reference[:, rows]
                losses, _ = preference_loss(name, PairInput(chosen, rejected, *references), PairOptions(beta=0.5))
            mean_over_pairs(losses, num_pairs=8).backward()
        assert parameter.grad is not None
        return parameter.grad

    whole = gradient_over(1)
    assert whole.abs().max() > 0
    for pieces in CUTS[1:]:
        torch.testing.assert_close(gradient_over(pieces), whole, rtol=1e-12, atol=1e-12)
