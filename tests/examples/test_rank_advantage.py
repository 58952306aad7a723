import importlib.util
from pathlib import Path

import pytest
import torch

from hrl.algos.advantages import ADVANTAGE_ESTIMATORS, AdvantageInput, compute_advantages
from hrl.algos.registry import estimator_traits

EXAMPLE = Path(__file__).parents[2] / "examples" / "rank_advantage.py"


@pytest.fixture(scope="module", autouse=True)
def registered():
    spec = importlib.util.spec_from_file_location("rank_advantage", EXAMPLE)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    yield
    del ADVANTAGE_ESTIMATORS["group_rank"]  # other tests walk the registry


def advantages(scores, groups, mask=None):
    mask = torch.ones(len(scores), 2, dtype=torch.int64) if mask is None else torch.tensor(mask)
    rewards = torch.zeros(len(scores), 2)
    rewards[:, 1] = torch.tensor(scores)
    inp = AdvantageInput(token_level_rewards=rewards, response_mask=mask, group_ids=torch.tensor(groups))
    return compute_advantages("group_rank", inp, None)[0]


def test_the_example_is_short_and_says_what_it_needs():
    assert len(EXAMPLE.read_text().splitlines()) < 40
    assert estimator_traits("group_rank").min_group_size == 2


def test_ranks_in_ragged_interleaved_groups():
    # Group 0 holds 5, 1, 1000; group 1 holds 3, 3.
    out = advantages([5.0, 3.0, 1.0, 3.0, 1000.0], [0, 1, 0, 1, 0])
    assert out[:, 0].tolist() == [0.0, 0.0, -1.0, 0.0, 1.0]


def test_only_the_order_of_the_rewards_counts():
    assert torch.equal(advantages([0.0, 1.0, 2.0, 2.0], [0] * 4), advantages([-9.0, 3.0, 50.0, 50.0], [0] * 4))


def test_an_empty_response_has_no_part_in_its_group_and_masked_tokens_get_nothing():
    out = advantages([1.0, 0.0, 0.0], [0, 0, 0], mask=[[1, 0], [1, 1], [0, 0]])
    assert out.tolist() == [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]  # row 0's reward stands on a masked token
    out = advantages([1.0, 0.0, 5.0], [0, 0, 0], mask=[[1, 1], [1, 1], [0, 0]])
    assert out.tolist() == [[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]]
