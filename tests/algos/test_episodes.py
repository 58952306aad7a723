"""Episodes of several rows: how many they are changes nothing."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hrl.algos.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageConfig,
    AdvantageInput,
    AdvantageSettings,
    compute_advantages,
)
from hrl.algos.episodes import FoldedEpisodes, episode_sums
from hrl.algos.groups import group_codes
from tests.algos.batches import advantage_input
from tests.algos.registries import restored_registries

CONFIG = AdvantageConfig(gamma=0.9, lam=0.8, gdpo_reward_weights=(1.0, 0.5, 2.0))
OF_ROWS = ("group_ids", "reward_baselines", "reward_parts", "bootstrap_values")


def test_folding_draws_the_docstring() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]])
    fold = FoldedEpisodes.of(mask, torch.tensor([0, 1, 0]))
    tokens = torch.tensor([[1, 2, 9, 9], [9, 5, 9, 9], [9, 9, 3, 4]])
    assert fold.tokens(tokens).tolist() == [[1, 2, 3, 4], [5, 0, 0, 0]]
    assert fold.mask().tolist() == [[True] * 4, [True, False, False, False]]
    assert fold.unfold(fold.tokens(tokens)).tolist() == [[1, 2, 0, 0], [0, 5, 0, 0], [0, 0, 3, 4]]
    assert fold.rows(torch.tensor([7, 8, 7])).tolist() == [7, 8]


def test_turns_say_which_row_came_first() -> None:
    mask, ids = torch.ones(2, 1), torch.tensor([0, 0])
    fold = FoldedEpisodes.of(mask, ids, turn_index=torch.tensor([[1], [0]]))
    assert fold.tokens(torch.tensor([[5], [6]])).tolist() == [[6, 5]]
    by_row = FoldedEpisodes.of(torch.tensor([[0, 1], [1, 0]]), ids)
    assert by_row.tokens(torch.tensor([[9, 5], [6, 9]])).tolist() == [[5, 6]]


def test_an_episode_without_a_trained_token_is_an_empty_row() -> None:
    fold = FoldedEpisodes.of(torch.tensor([[0, 0], [1, 0], [0, 0]]), torch.tensor([0, 1, 0]))
    assert fold.mask().tolist() == [[False], [True]]
    empty = FoldedEpisodes.of(torch.zeros(2, 3), torch.tensor([0, 0]))
    assert empty.mask().shape == (1, 0)
    assert empty.unfold(empty.tokens(torch.ones(2, 3))).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_sums_of_episodes() -> None:
    assert episode_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0])).tolist() == [5, 2, 5]


@st.composite
def batches_with_branches(draw: st.DrawFn) -> tuple[AdvantageInput, AdvantageInput, Tensor, Tensor]:
    """Return a batch with a row per episode, one in which episodes go on in further rows, and where tokens went.

    The last two are the row of each branch's episode, and the branch of each token `(B, R)`. A branch repeats all
    columns of its episode, with garbage at the tokens that another branch trains.
    """
    seed, rows, width = draw(st.integers(0, 1 << 16)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, width, generator=generator) < 0.7).long()
    uids = torch.randint(0, draw(st.integers(1, 3)), (rows,), generator=generator)
    whole = advantage_input(mask, group_codes(uids), seed=seed)
    whole = replace(
        whole,
        token_level_rewards=torch.randint(-2, 3, mask.shape, generator=generator).double(),
        bootstrap_values=torch.randn(rows, generator=generator, dtype=torch.float64),
        rollout_is_weights=torch.rand(mask.shape, generator=generator, dtype=torch.float64),
    )
    # A branch begins with a turn.
    turn_index = torch.randint(0, 2, mask.shape, generator=generator).cumsum(1)
    new_branch = torch.randint(0, 2, (rows, width + 1), generator=generator).cumsum(1)
    branch = new_branch.gather(1, turn_index)
    branch = branch - branch[:, :1]
    whole = replace(whole, turn_index=turn_index)

    of_episode = torch.arange(rows).repeat_interleave(branch.amax(1) + 1)
    of_branch = torch.cat([torch.arange(int(last) + 1) for last in branch.amax(1)])
    order = torch.randperm(len(of_episode), generator=generator)
    of_episode, of_branch = of_episode[order], of_branch[order]
    is_own = branch[of_episode] == of_branch.unsqueeze(1)
    columns = {field.name: getattr(whole, field.name) for field in fields(whole)}
    split = {
        name: column[of_episode] if name in OF_ROWS else torch.where(is_own, column[of_episode], -3)
        for name, column in columns.items()
        if column is not None
    }
    split["response_mask"] = mask[of_episode] * is_own
    return whole, AdvantageInput(**split, episode_ids=group_codes(of_episode)), of_episode, is_own


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
@settings(max_examples=12, deadline=None)
@given(batch=batches_with_branches())
def test_rows_of_an_episode_get_what_it_gets_as_one_row(
    name: str, batch: tuple[AdvantageInput, AdvantageInput, Tensor, Tensor]
) -> None:
    whole, split, of_episode, is_own = batch
    of_whole, of_split = (compute_advantages(name, each, CONFIG) for each in (whole, split))
    for before, after in zip(of_whole, of_split, strict=True):
        torch.testing.assert_close(after, torch.where(is_own, before[of_episode], 0.0), rtol=1e-11, atol=1e-11)


def test_grpo_takes_one_score_for_each_episode() -> None:
    """Two episodes of a group, with 1 and 3: one has all in one row, the other 1 + 2 in two."""
    mask = torch.ones(3, 2)
    rewards = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0]])
    inp = AdvantageInput(rewards, mask, group_codes("aaa"), episode_ids=torch.tensor([0, 1, 1]))
    advantages, _ = compute_advantages("grpo", inp, AdvantageConfig(norm_adv_by_std_in_grpo=False))
    assert advantages.tolist() == [[-1, -1], [1, 1], [1, 1]]
    advantages, _ = compute_advantages("rloo", inp, AdvantageConfig())
    assert advantages.tolist() == [[-2, -2], [2, 2], [2, 2]]


def test_a_reward_ahead_in_another_branch_is_ahead() -> None:
    mask, rewards = torch.tensor([[1, 1], [0, 1]]), torch.tensor([[0.0, 1.0], [8.0, 4.0]])
    inp = AdvantageInput(rewards, mask, group_codes("aa"), episode_ids=torch.tensor([0, 0]))
    _, returns = compute_advantages("reinforce_plus_plus", inp, AdvantageConfig(gamma=0.5))
    assert returns.tolist() == [[1.5, 3], [0, 4]]


def test_an_estimator_of_the_users_gets_episodes_as_rows() -> None:
    seen = []

    def mine(inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
        seen.append(inp)
        return inp.spread(inp.scores()), inp.spread(inp.scores())

    inp = AdvantageInput(torch.ones(3, 2), torch.ones(3, 2), group_codes("aab"), episode_ids=torch.tensor([0, 1, 0]))
    with restored_registries():
        ADVANTAGE_ESTIMATORS["mine"] = mine
        advantages, _ = compute_advantages("mine", inp, AdvantageConfig())
    assert advantages.tolist() == [[4, 4], [2, 2], [4, 4]]
    assert seen[0].group_ids.tolist() == [0, 0]
    assert seen[0].episode_ids is None


def test_episode_ids_of_another_batch_are_refused() -> None:
    inp = AdvantageInput(torch.ones(3, 2), torch.ones(3, 2), group_codes("aab"), episode_ids=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"episode_ids has shape \(2,\), expected \(3,\)"):
        compute_advantages("grpo", inp, AdvantageConfig())
