import pytest
import torch

from hrl.reward.combine import Weighting, combine_scores
from hrl.reward.shaping import RewardShaping

LENGTHS = torch.tensor([4, 2, 3])


def test_function_and_model_are_added_with_their_weights():
    model = torch.tensor([0.5, -1.0, 2.0])
    combined = combine_scores([1.0, 0.0, None], model, LENGTHS, 4, Weighting(function=2.0, model=0.5))
    assert combined.scores.tolist() == [2.25, -0.5, 0.0]
    assert combined.kept.tolist() == [True, True, False]


def test_the_penalty_of_long_responses_comes_on_top():
    weighting = Weighting(overlong_buffer_tokens=2, overlong_factor=1.0)
    combined = combine_scores([1.0, 1.0, 1.0], None, LENGTHS, 4, weighting)
    assert combined.overlong.tolist() == [-1.0, 0.0, -0.5]
    assert combined.scores.tolist() == [0.0, 1.0, 0.5]


def test_clipping_cuts_the_sum_and_not_the_penalty():
    weighting = Weighting(overlong_buffer_tokens=2)
    shaping = RewardShaping({"clip": 1.5})
    combined = combine_scores([2.0, -9.0, 1.0], torch.ones(3), LENGTHS, 4, weighting, shaping)
    assert combined.scores.tolist() == [0.5, -1.5, 1.0]


def test_a_reward_model_alone_is_enough_and_nothing_is_not():
    assert combine_scores(None, torch.tensor([1.0, 2.0, 3.0]), LENGTHS, 4, Weighting()).scores.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="neither a reward function nor a reward model"):
        combine_scores(None, None, LENGTHS, 4, Weighting())


def test_a_validation_reports_the_function_as_it_came_or_the_model_where_there_is_no_function():
    model = torch.tensor([0.5, -1.0, 2.0])
    weighting = Weighting(function=0.3, model=7.0, overlong_buffer_tokens=2)
    shaping = RewardShaping({"standardise": None, "clip": 0.1})
    combined = combine_scores([1.0, 0.0, None], model, LENGTHS, 4, weighting, shaping)
    assert combined.plain.tolist() == [1.0, 0.0, 0.0]
    assert combine_scores(None, model, LENGTHS, 4, weighting).plain.tolist() == [0.5, -1.0, 2.0]


def test_wrong_numbers_of_scores_and_infinite_ones_are_refused():
    with pytest.raises(ValueError, match="reward function gave 2 scores for 3 responses"):
        combine_scores([1.0, 2.0], None, LENGTHS, 4, Weighting())
    with pytest.raises(ValueError, match="row 1 is inf"):
        combine_scores(None, torch.tensor([0.0, float("inf"), 0.0]), LENGTHS, 4, Weighting())
