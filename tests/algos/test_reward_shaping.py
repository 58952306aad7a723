import math

import pytest
import torch

from hrl.algos.reward_shaping import REWARD_SHAPERS, RunningNormalizer


def test_clip() -> None:
    clip = REWARD_SHAPERS["clip"]
    assert clip(torch.tensor([-9.0, 0.5, 3.0]), RunningNormalizer(), 2.0).tolist() == [-2.0, 0.5, 2.0]
    with pytest.raises(ValueError, match="positive"):
        clip(torch.ones(1), RunningNormalizer(), 0.0)


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


def test_shapers_by_hand() -> None:
    rewards, seen = torch.tensor([-4.0, 0.0, 4.0, 8.0], dtype=torch.float64), RunningNormalizer()
    seen.update(rewards)
    std = math.sqrt((36.0 + 4.0 + 4.0 + 36.0) / 3)
    expected = {
        "clip": [-5.0, 0.0, 4.0, 5.0],
        "scale": [-4.0 / std, 0.0, 4.0 / std, 8.0 / std],
        "standardise": [-6.0 / std, -2.0 / std, 2.0 / std, 6.0 / std],
    }
    assert expected.keys() == REWARD_SHAPERS.keys()
    for name, shape in REWARD_SHAPERS.items():
        limited = torch.tensor([-9.0, 0.0, 4.0, 9.0], dtype=torch.float64) if name == "clip" else rewards
        assert shape(limited, seen, 5.0).tolist() == pytest.approx(expected[name]), name


def test_a_restored_normaliser_goes_on_exactly() -> None:
    generator = torch.Generator().manual_seed(1)
    straight, saved, resumed = RunningNormalizer(), RunningNormalizer(), RunningNormalizer()
    for step, batch in enumerate(torch.randn(6, 5, generator=generator)):
        straight.update(batch)
        (saved if step < 3 else resumed).update(batch)
        if step == 2:
            resumed.load_state_dict(saved.state_dict())
    assert resumed == straight
    with pytest.raises(ValueError, match="count"):
        resumed.load_state_dict({"mean": 0.0})
