"""Estimators whose steps are turns."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hrl.algos.advantages import GROUP_EPSILON, AdvantageConfig, AdvantageInput, compute_advantages
from hrl.algos.groups import group_codes
from hrl.algos.masked import whiten
from hrl.algos.reward_placement import place_scores
from hrl.algos.turns import Turns
from tests.algos.batches import MASK_WITH_EVERYTHING, advantage_input

GROUPS = group_codes(["a", "b", "a", "b", "a", "c", "c", "b"])
# Row 0: a turn of two tokens, an observation, a turn of one. Row 1: one turn. Row 2 has no turn.
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0]])
TURNS = torch.tensor([[0, 0, 0, 1], [0, 0, 0, -1], [-1, -1, -1, -1]])


def test_turns_of_ragged_rows() -> None:
    turns = Turns.of(MASK, TURNS)
    matrix = torch.arange(12.0).reshape(3, 4)
    assert turns.totals(matrix).tolist() == [[1, 3], [15, 0], [0, 0]]
    assert turns.firsts(matrix).tolist() == [[0, 3], [4, 0], [0, 0]]
    steps = torch.tensor([[1.0, 2.0], [3.0, 9.0], [9.0, 9.0]])
    assert turns.spread(steps, torch.float32).tolist() == [[1, 1, 0, 2], [3, 3, 3, 0], [0, 0, 0, 0]]
    assert Turns.of(MASK, None).totals(matrix).tolist() == [[4], [15], [0]]


def test_a_turn_of_which_tokens_are_masked_is_one_turn() -> None:
    turns = Turns.of(torch.tensor([[1, 0, 1, 0, 1]]), torch.tensor([[3, 3, 3, 4, 5]]))
    assert turns.totals(torch.ones(1, 5)).tolist() == [[2, 1]]


def test_grpo_turns_by_hand() -> None:
    """Rewards of turns 1, 0 and 2 of two episodes: mean 1, standard deviation 1."""
    rewards = torch.tensor([[0.25, 0.75, 9.0, 0.0], [0.0, 0.0, 2.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
    inp = AdvantageInput(rewards.double(), MASK, group_codes("aaa"), turn_index=TURNS)
    advantages, returns = compute_advantages("grpo_turns", inp, AdvantageConfig(gamma=1.0))
    one = 1 / (1 + GROUP_EPSILON)
    expected = torch.tensor([[-one, -one, 0, -one], [one, one, one, 0], [0, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected)
    assert torch.equal(advantages, returns)
    advantages, _ = compute_advantages("grpo_turns", inp, AdvantageConfig(gamma=0.5, norm_adv_by_std_in_grpo=False))
    assert advantages.tolist() == [[-0.5, -0.5, 0, -1], [1, 1, 1, 0], [0, 0, 0, 0]]


def test_an_episode_alone_is_compared_with_nothing_however_many_turns_it_has() -> None:
    rewards = torch.tensor([[0.0, 1.0, 0.0, 5.0], [0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    inp = AdvantageInput(rewards, MASK, group_codes("aba"), turn_index=TURNS)  # the other of group a is empty
    advantages, _ = compute_advantages("grpo_turns", inp, AdvantageConfig())
    assert (advantages == 0).all()


def test_gae_turns_by_hand() -> None:
    """`delta` is 1 + 0.5 * 2 - 1 and 4 - 2 in row 0, 0 - 3 in row 1; nothing reads a 9."""
    rewards = torch.tensor([[0.25, 0.75, 9.0, 4.0], [0.0, 0.0, 0.0, 9.0], [9.0, 9.0, 9.0, 9.0]]).double()
    values = torch.tensor([[1.0, 9.0, 9.0, 2.0], [3.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]]).double()
    inp = AdvantageInput(rewards, MASK, values=values, turn_index=TURNS)
    advantages, returns = compute_advantages("gae_turns", inp, AdvantageConfig(gamma=0.5, lam=0.5))
    assert returns.tolist() == [[2.5, 2.5, 0, 4], [0, 0, 0, 0], [0, 0, 0, 0]]
    raw = torch.tensor([[1.5, 1.5, 0, 2], [-3, -3, -3, 0], [0, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(advantages, whiten(raw, MASK))


@given(seed=st.integers(0, 1 << 16), divide=st.booleans())
def test_one_turn_in_each_response_makes_it_grpo(seed: int, divide: bool) -> None:
    inp = replace(advantage_input(MASK_WITH_EVERYTHING, GROUPS, seed=seed), turn_index=None)
    config = AdvantageConfig(gamma=0.3, norm_adv_by_std_in_grpo=divide)
    for ours, other in zip(*(compute_advantages(name, inp, config) for name in ("grpo_turns", "grpo")), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)


@given(seed=st.integers(0, 1 << 16), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_turns_of_one_token_make_it_gae(seed: int, gamma: float, lam: float) -> None:
    inp = advantage_input(MASK_WITH_EVERYTHING, GROUPS, seed=seed)
    inp = replace(inp, turn_index=torch.arange(6).expand(8, 6))
    config = AdvantageConfig(gamma, lam)
    for ours, other in zip(*(compute_advantages(name, inp, config) for name in ("gae_turns", "gae")), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-9, atol=1e-9)


def test_one_turn_in_each_response_has_the_returns_of_gae_without_discount() -> None:
    """Its advantages too, where the critic expects the same at all tokens of a response."""
    inp = advantage_input(MASK_WITH_EVERYTHING, GROUPS)
    inp = replace(inp, turn_index=None, values=inp.values[:, :1].expand(8, 6))
    rewards = place_scores(inp.scores(), inp.response_mask)
    turns, of_turns = compute_advantages("gae_turns", inp, AdvantageConfig())
    plain, of_tokens = compute_advantages("gae", replace(inp, token_level_rewards=rewards), AdvantageConfig())
    torch.testing.assert_close(of_turns, of_tokens)
    torch.testing.assert_close(turns, plain)


def _textbook(rewards: list[float], values: list[float], last: float, gamma: float, lam: float) -> list[float]:
    """Advantages of a row from back to front, with `last` as the value that follows."""
    advantages, following, advantage = [], last, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        advantages.append(advantage)
    return advantages[::-1]


@pytest.mark.parametrize("name", ["gae", "gae_turns"])
def test_an_episode_that_was_cut_off_ends_in_what_the_critic_expects(name: str) -> None:
    inp = advantage_input(MASK_WITH_EVERYTHING, GROUPS)
    inp = replace(inp, turn_index=torch.arange(6).expand(8, 6))  # one token each
    last = torch.tensor([2.0, 0.0, 5.0, -1.0, 0.0, 3.0, 0.5, 0.0])
    _, returns = compute_advantages(name, replace(inp, bootstrap_values=last), AdvantageConfig(0.9, 0.8))
    for row, trained in enumerate(inp.response_mask.bool()):
        rewards, values = (column[row][trained].tolist() for column in (inp.token_level_rewards, inp.values))
        expected = _textbook(rewards, values, float(last[row]), 0.9, 0.8)
        torch.testing.assert_close(returns[row][trained] - inp.values[row][trained], torch.tensor(expected).double())


@pytest.mark.parametrize("name", ["gae", "gae_turns"])
def test_no_episode_that_was_cut_off_changes_no_digit(name: str) -> None:
    inp = advantage_input(MASK_WITH_EVERYTHING, GROUPS)
    plain = compute_advantages(name, inp, AdvantageConfig(0.9, 0.8))
    other = compute_advantages(name, replace(inp, bootstrap_values=torch.zeros(8)), AdvantageConfig(0.9, 0.8))
    assert all(torch.equal(before, after) for before, after in zip(plain, other, strict=True))


def test_numbers_of_masked_tokens_are_not_read() -> None:
    def noisy(column: Tensor) -> Tensor:
        return torch.where(MASK_WITH_EVERYTHING.bool(), column, torch.nan)

    inp = advantage_input(MASK_WITH_EVERYTHING, GROUPS)
    for name in ("grpo_turns", "gae_turns"):
        plain = compute_advantages(name, inp, AdvantageConfig())
        other = compute_advantages(name, replace(inp, values=noisy(inp.values)), AdvantageConfig())
        assert all(torch.equal(before, after) for before, after in zip(plain, other, strict=True))
