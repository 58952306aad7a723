import pytest
import torch
from torch import Tensor

from hrl.algos import masked, scan
from hrl.algos.scan import gae, reward_to_go
from tests.algos.batches import MASK_WITH_EVERYTHING, Batch


def textbook(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Equation 16 of the paper, summed term by term over each row's trained tokens."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for row in range(len(rewards)):
        places = mask[row].nonzero()[:, 0].tolist()
        r, v = rewards[row, places].tolist(), [*values[row, places].tolist(), 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(places))]
        for t, place in enumerate(places):
            advantages[row, place] = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(places)))
            returns[row, place] = advantages[row, place] + v[t]
    return advantages, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (0.5, 0.0), (0.0, 0.7)])
def test_gae_is_the_textbook_sum(gamma: float, lam: float) -> None:
    batch = Batch.random()
    expected = textbook(batch.returns, batch.values, batch.mask, gamma, lam)
    got = gae(batch.returns, batch.values, batch.mask, gamma, lam, whitened=False)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool, torch.float32])
def test_whitening_is_over_all_trained_tokens(mask_dtype: torch.dtype) -> None:
    batch = Batch.random(seed=1)
    advantages, returns = gae(batch.returns + 100.0, batch.values, batch.mask.to(mask_dtype), 0.9, 0.8)
    plain, plain_returns = gae(batch.returns + 100.0, batch.values, batch.mask.to(mask_dtype), 0.9, 0.8, whitened=False)
    trained = plain[batch.mask.bool()]
    expected = (trained - trained.mean()) / (trained.var() + 1e-8).sqrt()
    torch.testing.assert_close(advantages[batch.mask.bool()], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns, plain_returns, rtol=0, atol=0)
    assert (advantages[~batch.mask.bool()] == 0).all()


@pytest.mark.parametrize("tokens", [0, 1])
def test_whitening_of_no_token_and_of_one(tokens: int) -> None:
    mask = torch.zeros(3, 4, dtype=torch.int64)
    mask[1, 2] = tokens
    advantages, returns = gae(torch.ones(3, 4), torch.full((3, 4), 0.25), mask, 1.0, 1.0)
    assert (advantages == 0).all()
    assert returns.sum().item() == tokens


def test_no_rows_and_no_columns() -> None:
    for shape in ((0, 4), (3, 0)):
        empty = torch.zeros(shape)
        assert gae(empty, empty, empty, 1.0, 1.0)[0].shape == shape


@pytest.mark.parametrize("tokens_at_once", [1, 5_000, 1 << 18])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
def test_long_rows_worked_on_in_pieces(
    dtype: torch.dtype, tolerance: float, tokens_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked, "TOKENS_AT_ONCE", tokens_at_once)
    generator = torch.Generator().manual_seed(0)
    shape = (13, 1100)  # more than one block of blocks
    mask = torch.arange(1100) < torch.randint(0, 1101, (13, 1), generator=generator)
    mask[::2] &= torch.rand((7, 1100), generator=generator) > 0.1
    rewards, values = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    got = gae(rewards, values, mask, 0.99, 0.95, whitened=False)
    advantages, returns = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for row in range(len(rewards)):
        advantage = following = 0.0
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            value = float(values[row, t])
            advantage = float(rewards[row, t]) + 0.99 * following - value + 0.99 * 0.95 * advantage
            advantages[row, t], returns[row, t], following = advantage, advantage + value, value
    for mine, expected in zip(got, (advantages, returns), strict=True):
        torch.testing.assert_close(mine.double(), expected, rtol=tolerance, atol=tolerance)
    whitened, _ = gae(rewards, values, mask, 0.99, 0.95)
    trained = advantages[mask]
    expected = ((trained - trained.mean()) / (trained.var() + 1e-8).sqrt()).to(dtype)
    torch.testing.assert_close(whitened[mask], expected, rtol=tolerance, atol=tolerance)


def test_discounted_sums_beside_a_loop() -> None:
    steps = torch.randn(2, 3, 70, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, running = torch.zeros_like(steps), torch.zeros(2, 3, dtype=torch.float64)
    for t in reversed(range(70)):
        running = steps[..., t] + 0.9 * running
        expected[..., t] = running
    torch.testing.assert_close(scan.discounted_sums(steps, 0.9), expected, rtol=1e-12, atol=1e-12)


def test_inputs_with_gradients_are_not_changed_and_outputs_have_none() -> None:
    rewards = torch.ones(2, 2, requires_grad=True)
    values = torch.zeros(2, 2, requires_grad=True)
    advantages, returns = gae(rewards, values, torch.ones(2, 2), 1.0, 1.0)
    assert not advantages.requires_grad
    assert not returns.requires_grad
    assert rewards.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_reward_to_go_skips_what_is_masked() -> None:
    rewards = torch.tensor([[1.0, 50.0, 4.0], [2.0, 2.0, 2.0]])
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    assert reward_to_go(rewards, mask, 0.5).tolist() == [[3.0, 0.0, 4.0], [0.0, 0.0, 0.0]]


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"values has shape \(2, 3\)"):
        gae(torch.ones(2, 2), torch.ones(2, 3), MASK_WITH_EVERYTHING[:2, :2], 1.0, 1.0)
