import pytest
import torch

from hrl.reward.shaping import RewardShaping

KEPT = torch.tensor([True, True, True, False])


def test_members_follow_one_another_and_see_kept_rows_of_all_steps():
    shaping = RewardShaping({"standardise": None, "clip": 1.0})
    assert shaping(torch.tensor([1.0, 2.0, 3.0, 99.0]), KEPT).tolist() == [-1.0, 0.0, 1.0, 0.0]
    # Of 1, 2, 3 and 2, 2, 8 the mean is 3 and the deviations' squares sum up to 32, of five degrees of freedom.
    std = (32 / 5) ** 0.5
    second = shaping(torch.tensor([2.0, 2.0, 8.0, -99.0]), KEPT)
    torch.testing.assert_close(second, torch.tensor([-1 / std, -1 / std, 1.0, 0.0]))  # 5 / std is cut


def test_the_order_counts():
    scores = torch.tensor([0.0, 0.0, 30.0, 0.0])
    assert RewardShaping({"clip": 3.0, "scale": None})(scores, KEPT)[2] == pytest.approx(3.0 / 3.0**0.5)
    assert RewardShaping({"scale": None, "clip": 3.0})(scores, KEPT)[2] == pytest.approx(30.0 / 300.0**0.5)


def test_a_resumed_run_goes_on_from_what_was_seen():
    steps = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    whole, first = RewardShaping({"scale": None}), RewardShaping({"scale": None})
    for step in steps[:2]:
        whole(step, KEPT)
        first(step, KEPT)
    resumed = RewardShaping({"scale": None, "clip": 9.0})
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(resumed(steps[2], KEPT), whole(steps[2], KEPT))


def test_an_unknown_member_is_refused_by_name():
    with pytest.raises(ValueError, match="no reward shaping is called 'whiten'; there is clip, scale, standardise"):
        RewardShaping({"whiten": None})
