import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hrl.algos.numbering import number_groups
from hrl.algos.reward_placement import (
    move_scores,
    overlong_penalty,
    place_scores,
    place_token_rewards,
    place_turn_rewards,
)


def test_the_score_stands_on_the_last_trained_token() -> None:
    """Tool tokens behind it are not it; a response without trained tokens gets nothing, least of all at column -1."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    placed = place_scores(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert placed.tolist() == [[0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 4]]


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6))
def test_nothing_is_lost_and_nothing_is_outside_the_mask(rows: list[list[bool]]) -> None:
    mask = torch.tensor(rows)
    placed = place_scores(torch.arange(1.0, len(rows) + 1.0), mask)
    assert (placed[~mask] == 0).all()
    assert torch.equal(placed.sum(dim=1), torch.arange(1.0, len(rows) + 1.0) * mask.any(dim=1))


def test_dtypes() -> None:
    mask = torch.ones(2, 1)
    assert place_scores(torch.tensor([1, 2]), mask).dtype == torch.float32
    assert place_scores(torch.ones(2, dtype=torch.float64), mask).dtype == torch.float64
    assert place_scores(torch.ones(2), torch.zeros(2, 0)).shape == (2, 0)


def test_bad_scores_are_refused_by_row() -> None:
    with pytest.raises(ValueError, match="row 1 is nan"):
        place_scores(torch.tensor([1.0, math.nan]), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"expected \(2,\)"):
        place_scores(torch.ones(2, 3), torch.ones(2, 3))


def test_scores_of_tokens_that_leave_go_to_the_last_one_before_that_is_left() -> None:
    """Row 0: 2 and 4 leave. Row 1: nothing is left before 1. Row 2 loses all. Row 3 keeps what it has."""
    scores = torch.tensor([[1.0, 2.0, 0.0, 4.0], [1.0, 0.0, 0.0, 2.0], [1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    kept = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert move_scores(scores, kept).tolist() == [[3, 0, 4, 0], [0, 0, 1, 2], [0, 0, 0, 0], [1, 2, 3, 4]]
    assert move_scores(torch.zeros(2, 0), torch.zeros(2, 0)).shape == (2, 0)


def test_overlong_penalty() -> None:
    lengths = torch.tensor([0, 2, 3, 4, 9])
    assert overlong_penalty(lengths, max_length=4, buffer_length=2).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, max_length=4, buffer_length=2, factor=0.5)[3].item() == -0.5
    for buffer_length in (0, 5):
        with pytest.raises(ValueError, match="1 to 4 tokens"):
            overlong_penalty(lengths, max_length=4, buffer_length=buffer_length)


# ------------------------------------------------------------------ rewards of turns


def test_the_reward_of_a_turn_stands_on_its_last_trained_token() -> None:
    """Row 0: turn 0, the environment's answer to it, turn 1. The token at the end was rejected."""
    turns = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1], [0, 0, -1, -1, -1, -1, -1, -1]])
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]])
    placed = place_turn_rewards([[0.5, 2.0], [3.0]], turns, mask)
    assert placed.scores.tolist() == [[0, 0.5, 0, 0, 0, 2, 0, 0], [0, 3, 0, 0, 0, 0, 0, 0]]
    assert (placed.num_moved, placed.num_lost) == (0, 0)


def test_a_branch_gets_the_rewards_of_the_turns_that_it_trains() -> None:
    """Two rows are one episode: turn 0 is trained in the first, turns 1 and 2 in the second, which repeats turn 0."""
    turns = torch.tensor([[0, 0, -1, -1], [0, 1, 1, 2], [0, 0, 0, -1]])
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [1, 1, 1, 0]])
    rewards = [[1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [8.0]]
    placed = place_turn_rewards(rewards, turns, mask, np.array([0, 0, 1]))
    assert placed.scores.tolist() == [[0, 1, 0, 0], [0, 0, 2, 4], [0, 0, 8, 0]]


def test_a_turn_without_trained_tokens_leaves_its_reward_to_the_one_before() -> None:
    """Turn 1 is masked, turn 3 empty. Of the second row turn 0 is masked, and nothing trained stands before it."""
    turns = torch.tensor([[0, 1, 1, 2, -1], [0, 0, 1, 1, -1], [0, 1, -1, -1, -1]])
    mask = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]])
    placed = place_turn_rewards([[1.0, 2.0, None, 8.0], [16.0, 32.0], [64.0, 0.0]], turns, mask)
    assert placed.scores.tolist() == [[3, 0, 0, 8, 0], [0, 0, 16, 32, 0], [0] * 5]
    assert (placed.num_moved, placed.num_lost) == (3, 1)


@st.composite
def _episodes(draw: st.DrawFn) -> tuple[list[list[float | None]], torch.Tensor, torch.Tensor, np.ndarray]:
    """Return rewards, turns, mask and episodes of one to five rows."""
    rows = draw(st.lists(st.tuples(st.integers(0, 2), st.lists(st.booleans(), min_size=6, max_size=6)), max_size=5))
    episodes = number_groups([episode for episode, _ in rows])
    reward = st.none() | st.integers(-4, 4).map(float)
    of_episode = [draw(st.lists(reward, max_size=5)) for _ in range(3)]
    turns = [sorted(draw(st.lists(st.integers(0, 3), min_size=6, max_size=6))) for _ in rows]
    shape = (len(rows), 6)
    mask = torch.tensor([trained for _, trained in rows], dtype=torch.bool).reshape(shape)
    return [of_episode[e] for e in episodes], torch.tensor(turns, dtype=torch.int64).reshape(shape), mask, episodes


@given(_episodes())
def test_the_rewards_of_an_episode_add_up_to_its_score(
    batch: tuple[list[list[float | None]], torch.Tensor, torch.Tensor, np.ndarray],
) -> None:
    rewards, turns, mask, episodes = batch
    placed = place_turn_rewards(rewards, turns, mask, episodes)
    assert (placed.scores[~mask] == 0).all()
    for episode in set(episodes.tolist()):
        rows = np.flatnonzero(episodes == episode)
        total = sum(reward or 0.0 for reward in rewards[rows[0]])
        assert placed.scores[rows].sum() == (total if mask[rows].any() else 0)


def test_bad_rewards_of_turns_are_refused_by_row() -> None:
    turns, mask = torch.tensor([[0, 1], [0, 1]]), torch.ones(2, 2)
    with pytest.raises(ValueError, match="row 1, turn 0 is nan"):
        place_turn_rewards([[1.0], [math.nan]], turns, mask)
    with pytest.raises(ValueError, match="row 1 has a trained token that is of no turn"):
        place_turn_rewards([[1.0], [1.0]], torch.tensor([[0, 1], [0, -1]]), mask)
    with pytest.raises(ValueError, match="rows 0 and 1 are of one episode and have other turn rewards"):
        place_turn_rewards([[1.0], [2.0]], turns, mask, np.array([0, 0]))
    with pytest.raises(ValueError, match="1 entries"):
        place_turn_rewards([[1.0]], turns, mask)


# ------------------------------------------------------------------ rewards of tokens


def test_rewards_of_tokens_stand_on_the_tokens_of_their_turn_and_leave_the_rest_of_the_turns() -> None:
    """Rows 0 and 1 are an episode: turn 0 in the first and turn 1 in the second, which repeats turn 0 untrained."""
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0]])
    turns = torch.tensor([[0, 0, 0, -1], [0, 0, 1, 1], [0, 0, 1, -1]])
    of_tokens = [([1.0, 2.0], [3.0, -4.0])] * 2 + [(None, [0.5])]
    placed, left = place_token_rewards(
        of_tokens, [[3.0, -0.75], [3.0, -0.75], [7.0, 0.5]], turns, mask, np.array([0, 0, 1])
    )
    assert placed.tolist() == [[1, 2, 0, 0], [0, 0, 3, -4], [0, 0, 0.5, 0]]
    assert left == [[0.0, 0.25], [0.0, 0.25], [7.0, 0.0]]


def test_rewards_of_tokens_of_which_none_is_trained_are_left_to_their_turn() -> None:
    placed, left = place_token_rewards([([1.0, 2.0],)], [[3.0]], torch.zeros(1, 2).long(), torch.zeros(1, 2))
    assert placed.tolist() == [[0, 0]] and left == [[3.0]]


def test_another_number_of_tokens_than_of_rewards_is_told_by_row_and_turn() -> None:
    with pytest.raises(ValueError, match="row 0, turn 0: 2 trained tokens, 1 token rewards"):
        place_token_rewards([([1.0],)], [[1.0]], torch.zeros(1, 2).long(), torch.ones(1, 2))
