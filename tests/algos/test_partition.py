"""The gradient of a mini-batch does not depend on how it is cut: every registered loss x every aggregation.

Losses are found by their registries, so a new one is tested by existing. `tests/workers/test_partition.py` repeats this
over real models and ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hrl.algos.aggregation import AGGREGATION_MODES, Counts, aggregate
from hrl.algos.kl import KL_ESTIMATORS, kl_penalty
from hrl.algos.masked import pad_segments
from hrl.algos.policy_losses import POLICY_LOSSES, PolicyLossInput, policy_loss
from hrl.algos.preference import (
    PAIR_LOSSES,
    REWARD_MODEL_LOSSES,
    SFT_LOSSES,
    PairOptions,
    mean_over_pairs,
    pair_margins,
    preference_loss,
    reward_model_loss,
    sequence_log_prob,
    sft_loss,
)
from hrl.algos.token_selection import TOKEN_SELECTORS, select_tokens
from hrl.algos.value_loss import VALUE_LOSSES, value_loss
from tests.algos.batches import ACTOR, Batch

CUTS = (2, 3, 8)
NORM = 6.0
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
BOTH_PRECISIONS = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["f64", "f32"])

LossOf = Callable[[Batch, Tensor], Tensor]
"""From the columns of some rows and the tensor that carries the gradient to a loss per token."""


# ------------------------------------------------------------------------------------------- what is cut


def of_policy(name: str, weighted: bool, piece: Batch, log_prob: Tensor) -> Tensor:
    selected = piece.values > 0 if name in TOKEN_SELECTORS else None
    weights = piece.weights if weighted else None
    inp = PolicyLossInput(log_prob, piece.old_log_prob, piece.advantages, piece.mask, weights, selected)
    return policy_loss(name, inp, ACTOR).loss_mat


def of_value(name: str, piece: Batch, vpreds: Tensor) -> Tensor:
    return value_loss(vpreds, piece.values, piece.returns, piece.mask, cliprange_value=0.3, name=name)[0]


def of_kl(kind: str, piece: Batch, log_prob: Tensor) -> Tensor:
    return kl_penalty(log_prob, piece.old_log_prob, kind)


def of_entropy(piece: Batch, logit: Tensor) -> Tensor:
    """Of a token and its alternative, whose logit is 0."""
    log_p = torch.log_softmax(torch.stack([logit, torch.zeros_like(logit)], dim=-1), dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)


def of_sft(name: str, piece: Batch, log_prob: Tensor) -> Tensor:
    return sft_loss(log_prob, piece.mask, name=name)


LOSSES: dict[str, LossOf] = (
    {f"policy {name}": partial(of_policy, name, False) for name in POLICY_LOSSES}
    | {f"policy {name} weighted": partial(of_policy, name, True) for name in POLICY_LOSSES}
    | {f"value {name}": partial(of_value, name) for name in VALUE_LOSSES}
    | {f"kl {kind}{plus}": partial(of_kl, kind + plus) for kind in KL_ESTIMATORS for plus in ("", "+")}
    | {f"sft {name}": partial(of_sft, name) for name in SFT_LOSSES}
    | {"entropy": of_entropy}
)


def prepared(name: str, batch: Batch) -> Batch:
    """Losses that choose tokens do so over the whole batch; their choice travels as a column (here `values`)."""
    loss = name.removeprefix("policy ").removesuffix(" weighted")
    if loss not in TOKEN_SELECTORS:
        return batch
    generator = torch.Generator().manual_seed(1)
    chosen = select_tokens(loss, batch.old_log_prob, batch.advantages, batch.mask, ACTOR, generator)
    return replace(batch, values=chosen.to(batch.values.dtype))


# ------------------------------------------------------------------------------------------- how it is cut


def losses_and_gradients(loss_mat: Tensor, leaf: Tensor, mask: Tensor, counts: Counts) -> dict[str, tuple]:
    """Per aggregation mode this piece's loss, and its gradient with respect to the leaf."""
    found = {}
    for mode in AGGREGATION_MODES:
        loss = aggregate(loss_mat, mask, mode, counts, NORM)
        found[mode] = (loss.detach(), torch.autograd.grad(loss, leaf, retain_graph=True)[0])
    return found


def over_pieces(batch: Batch, leaf: Tensor, loss_of: LossOf, pieces: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Accumulated over micro-batches of shuffled rows, each cut to its own padding."""
    counts = Counts.of(batch.mask)
    order = torch.randperm(len(leaf), generator=torch.Generator().manual_seed(pieces))
    totals = {mode: (leaf.new_zeros(()), torch.zeros_like(leaf)) for mode in AGGREGATION_MODES}
    for rows in order.tensor_split(pieces):
        if not len(rows):
            continue
        piece = batch.rows(rows).without_trailing_padding()
        width = piece.mask.shape[1]
        part = leaf[rows, :width].clone().requires_grad_()
        found = losses_and_gradients(loss_of(piece, part), part, piece.mask, counts)
        for mode, (loss, gradient) in found.items():
            totals[mode][0].add_(loss)
            totals[mode][1][rows, :width] += gradient
    return totals


def packed(batch: Batch, leaf: Tensor, loss_of: LossOf) -> dict[str, tuple[Tensor, Tensor]]:
    """From columns without any padding: trained tokens behind one another."""
    trained, lengths = batch.mask.bool(), batch.mask.sum(dim=1)
    flat = leaf[trained].clone().requires_grad_()
    matrix, mask = pad_segments(flat, lengths)
    columns = {
        name: pad_segments(getattr(batch, name)[trained], lengths)[0]
        for name in ("log_prob", "old_log_prob", "advantages", "values", "returns", "weights")
    }
    found = losses_and_gradients(loss_of(Batch(**columns, mask=mask), matrix), flat, mask, Counts.of(mask))
    return {
        mode: (loss, torch.zeros_like(leaf).masked_scatter(trained, gradient))
        for mode, (loss, gradient) in found.items()
    }


def with_inserted(batch: Batch, leaf: Tensor, loss_of: LossOf, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """With columns of masked tokens, a tool's answers, somewhere between the others."""
    width = leaf.shape[1]
    places = torch.randperm(width + 3, generator=torch.Generator().manual_seed(seed))[:width].sort().values

    def widen(column: Tensor, filler: float) -> Tensor:
        return column.new_full((len(column), width + 3), filler).index_copy(1, places, column)

    columns = {field.name: widen(getattr(batch, field.name), -2.5) for field in fields(batch) if field.name != "mask"}
    wide = Batch(**columns, mask=widen(batch.mask, 0))
    part = widen(leaf, -0.7).requires_grad_()
    found = losses_and_gradients(loss_of(wide, part), part, wide.mask, Counts.of(wide.mask))
    for mode, (_, gradient) in found.items():
        assert (gradient[~wide.mask.bool()] == 0).all(), mode
    return {mode: (loss, gradient[:, places]) for mode, (loss, gradient) in found.items()}


def assert_invariant(
    name: str, batch: Batch, cuts: tuple[int, ...] = CUTS, seed: int = 0
) -> dict[str, tuple[Tensor, Tensor]]:
    loss_of, batch = LOSSES[name], prepared(name, batch)
    leaf, tolerance = batch.log_prob, TOLERANCE[batch.log_prob.dtype]
    whole = over_pieces(batch, leaf, loss_of, 1)
    others = {f"{pieces} micro-batches": over_pieces(batch, leaf, loss_of, pieces) for pieces in cuts}
    others["packed"] = packed(batch, leaf, loss_of)
    others["masked tokens inserted"] = with_inserted(batch, leaf, loss_of, seed)
    for cut, found in others.items():
        for mode, (loss, gradient) in found.items():
            expected_loss, expected = whole[mode]
            scale = max(float(expected.abs().max()), float(expected_loss.abs()))
            error = max(float((gradient - expected).abs().max()), float((loss - expected_loss).abs()))
            assert error <= tolerance * scale, f"{name}, {mode}, {cut}: off by {error / scale:.1e}"
    return whole


@BOTH_PRECISIONS
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_does_not_depend_on_the_cut(name: str, dtype: torch.dtype) -> None:
    batch = Batch.random(seed=3, dtype=dtype)
    for mode, (_, gradient) in assert_invariant(name, batch).items():
        assert gradient.abs().max() > 0, mode
        assert (gradient[~batch.mask.bool()] == 0).all(), mode


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=6, deadline=None)
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 7),
    share=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
    pieces=st.integers(2, 9),
    seed=st.integers(0, 1 << 16),
)
def test_on_random_ragged_batches(name: str, rows: int, width: int, share: float, pieces: int, seed: int) -> None:
    mask = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < share
    assert_invariant(name, Batch.random(seed=seed, mask=mask.long()), cuts=(pieces,), seed=seed)


# ------------------------------------------------------------------------------------------- pairs


def of_pairs(name: str, sums: Tensor, lengths: Tensor, reference: Tensor) -> Tensor:
    chosen, rejected = torch.arange(len(sums)).view(-1, 2).unbind(1)
    return preference_loss(name, *pair_margins(name, sums, lengths, chosen, rejected, reference), PairOptions())[0]


def of_scores(name: str, sums: Tensor, lengths: Tensor, reference: Tensor) -> Tensor:
    return reward_model_loss(sums[::2], sums[1::2], name=name)[0]


PAIRS = {f"preference {name}": partial(of_pairs, name) for name in PAIR_LOSSES} | {
    f"reward model {name}": partial(of_scores, name) for name in REWARD_MODEL_LOSSES
}


@BOTH_PRECISIONS
@pytest.mark.parametrize("name", PAIRS)
def test_a_loss_of_pairs_does_not_depend_on_the_cut(name: str, dtype: torch.dtype) -> None:
    """Rows 2i and 2i + 1 are a pair; the gradient goes through their tokens' log-probs."""
    mask = (torch.arange(6) < torch.tensor([[4], [6], [1], [3], [0], [2], [5], [5], [2], [1]])).long()
    batch = Batch.random(seed=7, mask=mask, dtype=dtype)

    def gradient(pieces: int, order: Tensor) -> Tensor:
        log_prob = batch.log_prob.clone().requires_grad_()
        for pairs in order.tensor_split(pieces):
            rows = torch.stack([2 * pairs, 2 * pairs + 1], dim=1).flatten()
            ours, theirs = (sequence_log_prob(column[rows], mask[rows]) for column in (log_prob, batch.old_log_prob))
            losses = PAIRS[name](ours, mask[rows].sum(1), theirs)
            mean_over_pairs(losses, num_pairs=5).backward()
        assert log_prob.grad is not None
        return log_prob.grad

    whole = gradient(1, torch.arange(5))
    scale = float(whole.abs().max())
    assert scale > 0
    for pieces in CUTS:
        error = float((gradient(pieces, torch.tensor([3, 0, 4, 2, 1])) - whole).abs().max())
        assert error <= TOLERANCE[dtype] * scale, pieces
