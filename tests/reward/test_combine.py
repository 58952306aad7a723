import pytest
import torch

from hrl.config.reward import RewardEntry
from hrl.reward.combine import NonFiniteScoreError, RewardShaping, combine_scores
from tests.reward.settings import weighted

LENGTHS = torch.tensor([4, 2, 3])


def test_functions_and_the_weighted_model_are_added():
    model = torch.tensor([0.5, -1.0, 2.0])
    combined = combine_scores([1.0, 0.0, None], model, LENGTHS, 4, weighted(model=0.5))
    assert combined.scores.tolist() == [1.25, -0.5, 0.0]
    assert combined.kept.tolist() == [True, True, False]


def test_the_penalty_of_long_responses_comes_on_top():
    section = weighted(overlong_tokens=2)
    combined = combine_scores([1.0, 1.0, 1.0], None, LENGTHS, 4, section)
    assert combined.overlong.tolist() == [-1.0, 0.0, -0.5]
    assert combined.scores.tolist() == [0.0, 1.0, 0.5]


def test_clipping_cuts_the_sum_and_not_the_penalty():
    section = weighted(overlong_tokens=2)
    shaping = RewardShaping({"clip": 1.5})
    combined = combine_scores([2.0, -9.0, 1.0], torch.ones(3), LENGTHS, 4, section, shaping)
    assert combined.scores.tolist() == [0.5, -1.5, 1.0]


def test_a_reward_model_alone_is_enough_and_nothing_is_not():
    assert combine_scores(None, torch.tensor([1.0, 2.0, 3.0]), LENGTHS, 4, weighted()).scores.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="neither a reward function nor a reward model"):
        combine_scores(None, None, LENGTHS, 4, weighted())


def test_a_validation_reports_the_function_as_it_came_or_the_model_where_there_is_no_function():
    model = torch.tensor([0.5, -1.0, 2.0])
    section = weighted(model=7.0, overlong_tokens=2)
    shaping = RewardShaping({"standardise": None, "clip": 0.1})
    combined = combine_scores([1.0, 0.0, None], model, LENGTHS, 4, section, shaping)
    assert combined.plain.tolist() == [1.0, 0.0, 0.0]
    assert combine_scores(None, model, LENGTHS, 4, section).plain.tolist() == [0.5, -1.0, 2.0]


def test_a_validation_reports_the_model_where_functions_only_show_a_part():
    model = torch.tensor([0.5, -1.0, 2.0])
    section = weighted().model_copy(update={"functions": [RewardEntry(name="numeric", weight=0.0)]})
    assert combine_scores([0.0, 0.0, None], model, LENGTHS, 4, section).plain.tolist() == [0.5, -1.0, 0.0]
    assert combine_scores([0.0, 0.0, None], None, LENGTHS, 4, section).plain.tolist() == [0.0, 0.0, 0.0]


def test_wrong_numbers_of_scores_and_infinite_ones_are_refused():
    with pytest.raises(ValueError, match="reward function gave 2 scores for 3 responses"):
        combine_scores([1.0, 2.0], None, LENGTHS, 4, weighted())
    with pytest.raises(NonFiniteScoreError, match=r"reward model some/model is inf, in row 1\. Check the model"):
        combine_scores(None, torch.tensor([0.0, float("inf"), 0.0]), LENGTHS, 4, weighted())


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
