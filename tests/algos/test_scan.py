import pytest
import torch
from torch import Tensor

from hrl.algos import scan
from hrl.algos.scan import gae, reward_to_go
from tests.algos.batches import MASK_WITH_EVERYTHING, Batch

BACKENDS = {"torch": scan._torch_gae}
try:
    import numba  # noqa: F401
except ImportError:
    pass
else:
    BACKENDS["compiled"] = scan._compiled_gae

EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS.values(), ids=list(BACKENDS))


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


@EVERY_BACKEND
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (0.5, 0.0), (0.0, 0.7)])
def test_gae_is_the_textbook_sum(backend, gamma: float, lam: float) -> None:
    batch = Batch.random()
    expected = textbook(batch.returns, batch.values, batch.mask, gamma, lam)
    got = backend(batch.returns, batch.values, batch.mask, gamma, lam, False)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@EVERY_BACKEND
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool, torch.float32])
def test_whitening_is_over_all_trained_tokens(backend, mask_dtype: torch.dtype) -> None:
    batch = Batch.random(seed=1)
    advantages, returns = backend(batch.returns + 100.0, batch.values, batch.mask.to(mask_dtype), 0.9, 0.8, True)
    plain, plain_returns = backend(batch.returns + 100.0, batch.values, batch.mask.to(mask_dtype), 0.9, 0.8, False)
    trained = plain[batch.mask.bool()]
    expected = (trained - trained.mean()) / (trained.var() + 1e-8).sqrt()
    torch.testing.assert_close(advantages[batch.mask.bool()], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns, plain_returns, rtol=0, atol=0)
    assert (advantages[~batch.mask.bool()] == 0).all()


@EVERY_BACKEND
@pytest.mark.parametrize("tokens", [0, 1])
def test_whitening_of_no_token_and_of_one(backend, tokens: int) -> None:
    mask = torch.zeros(3, 4, dtype=torch.int64)
    mask[1, 2] = tokens
    advantages, returns = backend(torch.ones(3, 4), torch.full((3, 4), 0.25), mask, 1.0, 1.0, True)
    assert (advantages == 0).all()
    assert returns.sum().item() == tokens


@EVERY_BACKEND
def test_no_rows_and_no_columns(backend) -> None:
    for shape in ((0, 4), (3, 0)):
        empty = torch.zeros(shape)
        assert backend(empty, empty, empty, 1.0, 1.0, True)[0].shape == shape


@pytest.mark.skipif("compiled" not in BACKENDS, reason="numba is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_batches_take_the_compiled_path_and_agree_with_torch(dtype: torch.dtype, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (130, 600)
    assert shape[0] * shape[1] >= scan.COMPILE_FROM_TOKENS
    mask = torch.arange(600) < torch.randint(0, 601, (130, 1), generator=generator)
    mask &= torch.rand(shape, generator=generator) > 0.1
    rewards, values = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    calls = []
    compiled = scan._compiled_gae
    monkeypatch.setattr(scan, "_compiled_gae", lambda *args: calls.append(1) or compiled(*args))
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    for mine, theirs in zip(
        gae(rewards, values, mask, 0.99, 0.95), scan._torch_gae(rewards, values, mask, 0.99, 0.95, True), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    assert calls


def test_without_numba_the_torch_path_answers(monkeypatch) -> None:
    monkeypatch.setattr(scan, "COMPILE_FROM_TOKENS", 1)
    monkeypatch.setattr(scan.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(scan, "_compiled_gae", None)
    batch = Batch.random()
    torch.testing.assert_close(
        gae(batch.returns, batch.values, batch.mask, 0.9, 0.9, whitened=False),
        textbook(batch.returns, batch.values, batch.mask, 0.9, 0.9),
    )


def test_inputs_with_gradients_are_not_changed_and_outputs_have_none() -> None:
    rewards = torch.ones(2, 2, requires_grad=True)
    values = torch.zeros(2, 2, requires_grad=True)
    for backend in BACKENDS.values():
        advantages, returns = backend(rewards, values, torch.ones(2, 2), 1.0, 1.0, True)
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
