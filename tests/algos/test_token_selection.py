from copy import copy
from types import SimpleNamespace

import pytest
import torch

from hrl.algos.token_selection import TOKEN_SELECTORS, select_tokens
from tests.algos.batches import ACTOR, Batch

LOG_PROBS = torch.tensor([[-1.0, -3.0, -2.0, 5.0]])
ADVANTAGES = torch.tensor([[1.0, -1.0, 0.0, 50.0]])
MASK = torch.tensor([[1, 1, 1, 0]])
"""Covariances of the trained tokens: 1 * 1, -1 * -1, 0 * 0."""


def config(**options: float) -> SimpleNamespace:
    policy_loss = copy(ACTOR.policy_loss)
    policy_loss.__dict__.update(options)
    return SimpleNamespace(policy_loss=policy_loss)


def test_kl_cov_takes_the_highest_covariances() -> None:
    selected = select_tokens("kl_cov", LOG_PROBS, ADVANTAGES, MASK, config(kl_cov_ratio=0.7))
    assert selected.tolist() == [[True, True, False, False]]


def test_kl_cov_takes_one_token_at_least() -> None:
    selected = select_tokens("kl_cov", LOG_PROBS, ADVANTAGES, MASK, config(kl_cov_ratio=1e-6))
    assert selected.sum() == 1


def test_clip_cov_draws_among_covariances_within_the_bounds() -> None:
    options = config(clip_cov_ratio=0.4, clip_cov_lb=0.5, clip_cov_ub=1.5)
    drawn = set()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        selected = select_tokens("clip_cov", LOG_PROBS, ADVANTAGES, MASK, options, generator)
        assert selected.sum() == 1
        drawn.add(int(selected[0].nonzero()))
    assert drawn == {0, 1}
    below = config(clip_cov_ratio=1.0, clip_cov_lb=-0.5, clip_cov_ub=0.5)
    assert select_tokens("clip_cov", LOG_PROBS, ADVANTAGES, MASK, below).tolist() == [[False, False, True, False]]
    nothing = select_tokens("clip_cov", LOG_PROBS, ADVANTAGES, MASK, config(clip_cov_lb=2.0, clip_cov_ub=3.0))
    assert not nothing.any()


def test_the_same_generator_draws_the_same_tokens() -> None:
    batch = Batch.random()
    first, second = (
        select_tokens("clip_cov", batch.log_prob, batch.advantages, batch.mask, ACTOR, torch.Generator().manual_seed(3))
        for _ in range(2)
    )
    assert torch.equal(first, second)
    assert not (first & ~batch.mask.bool()).any()


@pytest.mark.parametrize("name", sorted(TOKEN_SELECTORS))
def test_no_trained_token_no_choice(name: str) -> None:
    assert not select_tokens(name, LOG_PROBS, ADVANTAGES, MASK * 0, ACTOR).any()


def test_shares_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="clip_cov_ratio"):
        select_tokens("clip_cov", LOG_PROBS, ADVANTAGES, MASK, config(clip_cov_ratio=0.0))
    with pytest.raises(ValueError, match="kl_cov_ratio"):
        select_tokens("kl_cov", LOG_PROBS, ADVANTAGES, MASK, config(kl_cov_ratio=1.5))
