import pytest
import torch

from hrl.algos.reward_shaping import RunningNormalizer, clip_rewards, combine_rewards


def test_clip() -> None:
    assert clip_rewards(torch.tensor([-9.0, 0.5, 3.0]), 2.0).tolist() == [-2.0, 0.5, 2.0]
    with pytest.raises(ValueError, match="positive"):
        clip_rewards(torch.ones(1), 0.0)


def test_combine() -> None:
    parts = {"model": torch.tensor([1.0, 2.0]), "function": torch.tensor([10.0, 0.0])}
    assert combine_rewards(parts, {"function": 0.1, "model": 2.0}).tolist() == [3.0, 4.0]
    with pytest.raises(ValueError, match=r"function.*model"):
        combine_rewards(parts, {"model": 1.0})
    with pytest.raises(ValueError, match="one at least"):
        combine_rewards({}, {})


def test_running_statistics_are_those_of_everything_seen() -> None:
    rewards = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1000
    normalizer = RunningNormalizer()
    for batch in rewards.split([1, 9, 60, 30]):
        normalizer.update(batch)
    assert normalizer.count == 100
    assert normalizer.mean == pytest.approx(rewards.mean().item(), rel=1e-14)
    assert normalizer.std == pytest.approx(rewards.std().item(), rel=1e-12)
    torch.testing.assert_close(normalizer.normalise(rewards, centre=True), (rewards - rewards.mean()) / rewards.std())
    torch.testing.assert_close(normalizer.normalise(rewards), rewards / rewards.std())


def test_without_spread_rewards_stay() -> None:
    normalizer = RunningNormalizer()
    normalizer.update(torch.zeros(0))
    assert normalizer.normalise(torch.tensor([5.0])).tolist() == [5.0]
    normalizer.update(torch.tensor([2.0, 2.0]))
    assert normalizer.std == 1.0
