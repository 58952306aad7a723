"""Bypass mode: the sampler's log-probs take the place of the trainer's."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hrl.algos.aggregation import AGGREGATION_MODES, Counts, aggregate
from hrl.algos.bypass import bypass_loss
from hrl.algos.policy_losses import POLICY_LOSSES, PolicyLossInput
from hrl.algos.token_selection import TOKEN_SELECTORS
from tests.algos.batches import ACTOR, Batch


def correction(**changes: Any) -> SimpleNamespace:
    base: dict[str, Any] = {
        "loss_type": "ppo_clip",
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
    }
    return SimpleNamespace(**base | changes)


def two_tokens() -> PolicyLossInput:
    """Ratios 4 and 1/2 of the policy to the sampler, advantage 3."""
    log_prob = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    sampler = log_prob.detach() - torch.tensor([[4.0, 0.5]], dtype=torch.float64).log()
    advantages = torch.full((1, 2), 3.0, dtype=torch.float64)
    return PolicyLossInput(log_prob, sampler, advantages, torch.ones(1, 2, dtype=torch.int64))


def gradient(inp: PolicyLossInput, **changes: Any) -> list[float]:
    output, _, _ = bypass_loss("vanilla", inp, ACTOR, correction(**changes))
    output.loss_mat.sum().backward()
    assert inp.log_prob.grad is not None
    return inp.log_prob.grad[0].tolist()


def test_reinforce_weighs_the_gradient_by_the_truncated_ratio() -> None:
    weighed = gradient(two_tokens(), loss_type="reinforce", rollout_is="token")
    assert weighed == [pytest.approx(-3.0 * 2.0), pytest.approx(-3.0 * 0.5)]  # min(4, 2) and 1/2
    assert gradient(two_tokens(), loss_type="reinforce") == [-3.0, -3.0]


def test_the_clipped_loss_has_the_ratio_inside_and_takes_no_weight() -> None:
    # Ratio 4 lies above the clip: no gradient. Ratio 1/2 with a positive advantage: -A r.
    assert gradient(two_tokens(), rollout_is="token") == [0.0, pytest.approx(-3.0 * 0.5)]


def test_other_old_log_probs_move_the_ratio_and_neither_weights_nor_rejection() -> None:
    inp = two_tokens()
    closed = replace(inp, old_log_prob=inp.log_prob.detach())
    settings = correction(rollout_rs="token_k1", rollout_rs_threshold="0.3_3.0")
    output, kept, _ = bypass_loss("vanilla", closed, ACTOR, settings, inp.old_log_prob)
    assert kept.tolist() == [[0, 1]], "of the ratios 4 and 1/2 to the sampler"
    assert output.loss_mat[0].tolist() == [0.0, -3.0], "the ratio to the old log-probs is 1"
    settings = correction(loss_type="reinforce", rollout_is="token")
    losses = [
        bypass_loss("vanilla", inp, ACTOR, settings)[0].loss_mat,
        bypass_loss("vanilla", closed, ACTOR, settings, inp.old_log_prob)[0].loss_mat,
    ]
    assert torch.equal(*losses)


def test_what_is_rejected_has_no_loss() -> None:
    inp = two_tokens()
    output, kept, metrics = bypass_loss(
        "gpg", inp, ACTOR, correction(rollout_rs="token_k1", rollout_rs_threshold="0.3_3.0")
    )
    assert kept.tolist() == [[0, 1]]
    assert output.loss_mat[0, 0] == 0 and output.loss_mat[0, 1] == 3.0 * 2.0
    total, count = metrics["rollout_corr/rollout_rs_masked_fraction"]
    assert (float(total), float(count)) == (1.0, 2.0)
    assert float(output.metrics["actor/ppo_kl"][0]) == pytest.approx(math.log(2.0))  # of the token that is left


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("mode", sorted(AGGREGATION_MODES))
@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - set(TOKEN_SELECTORS)))
def test_the_gradient_does_not_depend_on_the_cut(name: str, mode: str, loss_type: str) -> None:
    """What is rejected stays in the divisor, which is why pieces need not know of each other's rejections."""
    batch, counts = Batch.random(seed=3), Counts.of(Batch.random(seed=3).mask)
    settings = correction(
        loss_type=loss_type, rollout_is="sequence", rollout_rs="token_k2,seq_mean_k3", rollout_rs_threshold="0.1,0.08"
    )

    def gradient_over(pieces: int) -> torch.Tensor:
        parameter = batch.log_prob.clone().requires_grad_()
        for rows in torch.arange(len(parameter)).tensor_split(pieces):
            piece = batch.rows(rows)
            inp = PolicyLossInput(parameter[rows], piece.old_log_prob, piece.advantages, piece.mask)
            output, kept, _ = bypass_loss(name, inp, ACTOR, settings)
            assert kept.sum() < piece.mask.sum() or pieces > 1
            aggregate(output.loss_mat, piece.mask, mode, counts, norm=6.0).backward()
        assert parameter.grad is not None
        return parameter.grad

    whole = gradient_over(1)
    assert whole.abs().max() > 0
    for pieces in (2, 3, 8):
        torch.testing.assert_close(gradient_over(pieces), whole, rtol=1e-12, atol=1e-12)


def test_an_unknown_loss_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'ppo'.*ppo_clip"):
        bypass_loss("vanilla", two_tokens(), ACTOR, correction(loss_type="ppo"))
