import math
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hrl.algos.advantages import (
    ADVANTAGE_ESTIMATORS,
    GROUP_EPSILON,
    AdvantageConfig,
    AdvantageInput,
    compute_advantages,
    discounted_sums,
    gae,
    register_adv_est,
    reward_to_go,
)
from hrl.algos.groups import group_codes, group_sum
from hrl.algos.masked import pad_segments
from hrl.algos.registry import ESTIMATOR_TRAITS, estimator_traits
from hrl.algos.reward_placement import place_scores
from tests.algos.batches import MASK_WITH_EVERYTHING, Batch, advantage_input

CONFIG = AdvantageConfig(gamma=0.9, lam=0.8, gdpo_reward_weights=(1.0, 0.5, 2.0))
GROUPS = group_codes(["a", "b", "a", "b", "a", "c", "c", "b"])
EVERY_ESTIMATOR = pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
BY_GROUP = pytest.mark.parametrize(
    "name", sorted(name for name, entry in ESTIMATOR_TRAITS.items() if entry.min_group_size > 1)
)
WHITENED = {"gae", "gae_turns", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"}


@pytest.fixture(params=[False, True], ids=["numpy", "compiled"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Have small batches too go through the compiled loop, or large ones too through NumPy."""
    if request.param:
        pytest.importorskip("numba")
    monkeypatch.setattr("hrl.algos.advantages.COMPILED_FROM", 0 if request.param else sys.maxsize)
    return request.param


def columns_of(inp: AdvantageInput) -> dict[str, Tensor]:
    """The `(B, R)` columns that are there."""
    per_row = {"group_ids", "reward_baselines", "reward_parts"}
    columns = {field.name: getattr(inp, field.name) for field in fields(inp) if field.name not in per_row}
    return {name: column for name, column in columns.items() if column is not None}


def outcome(scores: list[float], uids: list[str], name: str, config: AdvantageConfig = CONFIG) -> list[float]:
    """Advantage of each of several one-token responses."""
    mask = torch.ones(len(scores), 1, dtype=torch.int64)
    rewards = place_scores(torch.tensor(scores, dtype=torch.float64), mask)
    advantages, _ = compute_advantages(name, AdvantageInput(rewards, mask, group_ids=group_codes(uids)), config)
    return advantages[:, 0].tolist()


@EVERY_ESTIMATOR
def test_outputs_are_zero_outside_the_mask_and_finite(name: str) -> None:
    inp = advantage_input(MASK_WITH_EVERYTHING, GROUPS)
    for output in compute_advantages(name, inp, CONFIG):
        assert torch.isfinite(output).all()
        assert (output[inp.response_mask == 0] == 0).all()
        assert output.dtype == inp.token_level_rewards.dtype


@EVERY_ESTIMATOR
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_inserted_masked_tokens_change_nothing(name: str, data: st.DataObject) -> None:
    inp = advantage_input(MASK_WITH_EVERYTHING, GROUPS)
    places = data.draw(st.lists(st.integers(0, inp.response_mask.shape[1]), min_size=1, max_size=4))
    garbage = data.draw(st.sampled_from([1e6, -3.0, 0.5]))

    def widen(column: Tensor, fill: float) -> Tensor:
        for place in places:
            filler = torch.full_like(column[:, :1], fill)
            column = torch.cat([column[:, :place], filler, column[:, place:]], dim=1)
        return column

    wide_mask = widen(inp.response_mask, 0)
    wide = {key: widen(column, garbage) for key, column in columns_of(inp).items()} | {"response_mask": wide_mask}
    plain, widened = compute_advantages(name, inp, CONFIG), compute_advantages(name, replace(inp, **wide), CONFIG)
    for before, after in zip(plain, widened, strict=True):
        torch.testing.assert_close(after[wide_mask.bool()], before[inp.response_mask.bool()], rtol=1e-12, atol=1e-12)


@EVERY_ESTIMATOR
def test_values_at_masked_tokens_are_ignored_even_if_not_finite(name: str) -> None:
    inp = advantage_input(MASK_WITH_EVERYTHING, GROUPS)
    masked = inp.response_mask == 0
    columns = {
        key: column.masked_fill(masked, math.nan)
        for key, column in columns_of(inp).items()
        if key not in ("response_mask", "token_level_rewards", "turn_index")
    } | {"turn_index": inp.turn_index.masked_fill(masked, -7)}
    for before, after in zip(
        compute_advantages(name, inp, CONFIG), compute_advantages(name, replace(inp, **columns), CONFIG), strict=True
    ):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


@st.composite
def ragged_batches(draw: st.DrawFn) -> AdvantageInput:
    """Random masks, empty rows among them, in groups of any size; scores are whole numbers, so that ties are real."""
    rows, width, seed = draw(st.integers(1, 9)), draw(st.integers(1, 5)), draw(st.integers(0, 1 << 16))
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, width, generator=generator) < 0.6).long()
    uids = torch.randint(0, draw(st.integers(1, 4)), (rows,), generator=generator)
    scores = torch.randint(-2, 3, (rows,), generator=generator).double()
    parts = torch.randint(-2, 3, (rows, 3), generator=generator).double()
    inp = advantage_input(mask, group_codes(uids), seed=seed, reward_parts=parts)
    return replace(inp, token_level_rewards=place_scores(scores, mask))


def rows_of(inp: AdvantageInput, index: Tensor) -> AdvantageInput:
    """Some rows in some order, with groups numbered anew."""
    columns = {field.name: getattr(inp, field.name) for field in fields(inp)}
    picked = {key: column if column is None else column[index] for key, column in columns.items()}
    return AdvantageInput(**picked | {"group_ids": group_codes(inp.group_ids[index])})


@EVERY_ESTIMATOR
@settings(max_examples=10, deadline=None)
@given(inp=ragged_batches(), seed=st.integers(0, 1 << 16))
def test_ragged_groups_in_any_order_give_each_row_its_own(name: str, inp: AdvantageInput, seed: int) -> None:
    order = torch.randperm(len(inp.response_mask), generator=torch.Generator().manual_seed(seed))
    plain, shuffled = (compute_advantages(name, each, CONFIG) for each in (inp, rows_of(inp, order)))
    for before, after in zip(plain, shuffled, strict=True):
        assert torch.isfinite(before).all()
        assert (before[inp.response_mask == 0] == 0).all()
        torch.testing.assert_close(after, before[order], rtol=1e-11, atol=1e-11)


@EVERY_ESTIMATOR
@settings(max_examples=5, deadline=None)
@given(inp=ragged_batches())
def test_packed_columns_give_the_same_advantages(name: str, inp: AdvantageInput) -> None:
    trained, lengths = inp.response_mask.bool(), inp.response_mask.sum(dim=1)
    packed = {key: pad_segments(column[trained], lengths)[0] for key, column in columns_of(inp).items()}
    packed["response_mask"] = pad_segments(torch.zeros(int(lengths.sum())), lengths)[1]
    plain, dense = (compute_advantages(name, each, CONFIG) for each in (inp, replace(inp, **packed)))
    for padded, short in zip(plain, dense, strict=True):
        torch.testing.assert_close(short[packed["response_mask"]], padded[trained], rtol=1e-11, atol=1e-11)


@BY_GROUP
@settings(max_examples=10, deadline=None)
@given(inp=ragged_batches(), shifts=st.lists(st.integers(-9, 9), min_size=4, max_size=4))
def test_a_constant_added_to_all_scores_of_a_group_changes_nothing(
    name: str, inp: AdvantageInput, shifts: list[int]
) -> None:
    added = torch.tensor(shifts, dtype=torch.float64)[inp.group_ids]
    inp = replace(inp, turn_index=None)  # turns are compared with turns, and scores have no say
    shifted = replace(
        inp,
        token_level_rewards=place_scores(inp.scores() + added, inp.response_mask),
        reward_parts=inp.reward_parts + added.unsqueeze(1),
    )
    before, after = (compute_advantages(name, each, CONFIG)[0] for each in (inp, shifted))
    compared = inp.response_mask.bool()
    if name == "optimal_token_baseline":  # where one response is longer than all others it has no baseline
        compared &= tokens_with_a_rival(inp)
    torch.testing.assert_close(after[compared], before[compared], rtol=1e-9, atol=1e-9)


def tokens_with_a_rival(inp: AdvantageInput) -> Tensor:
    """`(B, R)`: the t-th trained tokens of rows whose group has another row with a t-th one."""
    position = inp.response_mask.cumsum(dim=1)
    lengths, same_group = position[:, -1], inp.group_ids[:, None] == inp.group_ids
    return ((lengths >= position.unsqueeze(-1)) & same_group.unsqueeze(1)).sum(dim=-1) > 1


@BY_GROUP
@settings(max_examples=25, deadline=None)
@given(inp=ragged_batches(), dead=st.sets(st.integers(0, 3)), level=st.sampled_from([0.0, 1.0, 1 / 3, -7.1]))
def test_a_group_of_equal_scores_gets_nothing_and_moves_no_other(
    name: str, inp: AdvantageInput, dead: set[int], level: float
) -> None:
    """Whatever the lengths of its responses, and whatever else is in the batch."""
    silent = torch.tensor([group in dead for group in inp.group_ids.tolist()])
    scores = torch.where(silent, level, inp.scores())
    parts = torch.where(silent.unsqueeze(1), level, inp.reward_parts)
    rewards = place_scores(scores, inp.response_mask)
    inp = replace(inp, token_level_rewards=rewards, reward_parts=parts, turn_index=None)
    advantages, _ = compute_advantages(name, inp, CONFIG)
    assert (advantages[silent] == 0).all()
    if name != "gpg" and not silent.all():  # which makes up for the silent by scaling the others
        without, _ = compute_advantages(name, rows_of(inp, (~silent).nonzero().flatten()), CONFIG)
        torch.testing.assert_close(advantages[~silent], without, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "grpo_passk", "optimal_token_baseline"])
@settings(max_examples=10, deadline=None)
@given(inp=ragged_batches())
def test_a_group_does_not_know_of_the_others(name: str, inp: AdvantageInput) -> None:
    whole, _ = compute_advantages(name, inp, CONFIG)
    for group in inp.group_ids.unique():
        index = (inp.group_ids == group).nonzero(as_tuple=True)[0]
        alone, _ = compute_advantages(name, rows_of(inp, index), CONFIG)
        torch.testing.assert_close(whole[index], alone, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["grpo", "rloo", "gpg"])
@settings(max_examples=10, deadline=None)
@given(inp=ragged_batches(), divide=st.booleans())
def test_what_one_response_gains_the_others_of_its_group_lose(name: str, inp: AdvantageInput, divide: bool) -> None:
    advantages, _ = compute_advantages(name, inp, replace(CONFIG, norm_adv_by_std_in_grpo=divide))
    of_row = torch.where(inp.response_mask.bool().any(1), advantages.sum(1) / inp.response_mask.sum(1).clamp(min=1), 0)
    assert group_sum(of_row, inp.group_ids).abs().max() < 1e-9


@EVERY_ESTIMATOR
def test_an_empty_response_does_not_move_its_group(name: str) -> None:
    """Row 2 of the mask has no trained token; leaving it out or giving it any reward changes nothing."""
    inp = advantage_input(MASK_WITH_EVERYTHING, GROUPS)
    kept = torch.tensor([0, 1, 3, 4, 5, 6, 7])
    rows = {field.name: getattr(inp, field.name) for field in fields(inp)}
    without = AdvantageInput(**{key: column if column is None else column[kept] for key, column in rows.items()})
    parts = inp.reward_parts.clone()
    parts[2] = 1e3
    rewards = inp.token_level_rewards.clone()
    rewards[2, 3] = 1e3
    loud = replace(inp, token_level_rewards=rewards, reward_parts=parts, reward_baselines=inp.reward_baselines)
    for smaller, larger in zip(
        compute_advantages(name, without, CONFIG), compute_advantages(name, loud, CONFIG), strict=True
    ):
        torch.testing.assert_close(larger[kept], smaller, rtol=1e-12, atol=1e-12)
        assert (larger[2] == 0).all()


@EVERY_ESTIMATOR
def test_a_batch_of_empty_responses_gives_zeros(name: str) -> None:
    inp = advantage_input(torch.zeros(4, 3, dtype=torch.int64), group_codes("aabb"))
    for output in compute_advantages(name, inp, CONFIG):
        assert (output == 0).all()


@EVERY_ESTIMATOR
def test_a_single_trained_token_is_defined(name: str) -> None:
    mask = torch.zeros(2, 3, dtype=torch.int64)
    mask[1, 2] = 1
    advantages, _ = compute_advantages(name, advantage_input(mask, group_codes("ab")), CONFIG)
    assert torch.isfinite(advantages).all()
    if name in WHITENED:
        assert (advantages == 0).all()


@BY_GROUP
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e4])
def test_equal_rewards_give_advantage_exactly_zero(name: str, reward: float, dtype: torch.dtype) -> None:
    """Also where their mean is not exact: in float64 a third of three times 0.1 is above 0.1."""
    mask = torch.ones(6, 2, dtype=torch.int64)
    rewards = place_scores(torch.full((6,), reward, dtype=dtype), mask)
    inp = replace(
        advantage_input(mask, group_codes("aaabbb")),
        token_level_rewards=rewards,
        reward_parts=torch.full((6, 3), reward, dtype=dtype),
    )
    advantages, _ = compute_advantages(name, inp, CONFIG)
    assert (advantages == 0).all()


@BY_GROUP
def test_a_response_alone_in_its_group_teaches_nothing(name: str) -> None:
    mask = torch.ones(3, 2, dtype=torch.int64)
    inp = advantage_input(mask, group_codes(["a", "b", "c"]))
    advantages, _ = compute_advantages(name, inp, CONFIG)
    assert (advantages == 0).all()


@EVERY_ESTIMATOR
def test_a_missing_column_is_named(name: str) -> None:
    entry = estimator_traits(name)
    inp = advantage_input(MASK_WITH_EVERYTHING, GROUPS)
    needed = {
        "values": entry.needs_critic,
        "reward_baselines": entry.needs_baseline,
        "reward_parts": entry.needs_parts,
        "old_log_probs": entry.needs_old_log_probs,
        "sum_pi_squared": entry.needs_sum_pi_squared,
        "group_ids": entry.min_group_size > 1,
    }
    for column, needs in needed.items():
        without = replace(inp, **{column: None})
        if needs:
            with pytest.raises(ValueError, match=column):
                compute_advantages(name, without, CONFIG)
        else:
            compute_advantages(name, without, CONFIG)


def test_grpo_by_hand() -> None:
    ragged = ["a", "b", "a", "b", "b"]
    std = math.sqrt(((1 - 2) ** 2 + (2 - 2) ** 2 + (3 - 2) ** 2) / 2)
    expected = [0.5 / (math.sqrt(0.5) + GROUP_EPSILON), -1 / (std + GROUP_EPSILON), None, 0.0, None]
    got = outcome([1.0, 1.0, 0.0, 2.0, 3.0], ragged, "grpo")
    assert got[0] == pytest.approx(expected[0])
    assert got[1] == pytest.approx(expected[1])
    assert got[3] == 0.0
    dr_grpo = outcome([1.0, 1.0, 0.0, 2.0, 3.0], ragged, "grpo", AdvantageConfig(norm_adv_by_std_in_grpo=False))
    assert dr_grpo == pytest.approx([0.5, -1.0, -0.5, 0.0, 1.0])


def test_rloo_by_hand() -> None:
    assert outcome([1.0, 2.0, 6.0], ["a"] * 3, "rloo") == pytest.approx([1 - 4.0, 2 - 3.5, 6 - 1.5])


def test_the_best_of_n_is_imitated():
    """Those that tie share the weight; a group whose scores are equal has none."""
    got = outcome([1.0, 4.0, 4.0, 3.0, 3.0, 0.5, -1.0], ["a", "a", "a", "b", "b", "c", "c"], "best_of_n")
    assert got == [0, 0.5, 0.5, 0, 0, 1, 0]


def test_passk_by_hand() -> None:
    plain = AdvantageConfig(norm_adv_by_std_in_grpo=False)
    got = outcome([1.0, 4.0, 2.5, 3.0, 3.0, 0.0], ["a", "a", "a", "b", "b", "b"], "grpo_passk", plain)
    assert got == pytest.approx([0.0, 1.5, 0.0, 0.0, 0.0, 0.0])


def test_passk_of_bad_answers_knows_no_empty_one_that_is_better() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    inp = AdvantageInput(place_scores(torch.tensor([-1.0, -3.0, 0.0]), mask), mask, group_ids=group_codes("aaa"))
    advantages, _ = compute_advantages("grpo_passk", inp, AdvantageConfig(norm_adv_by_std_in_grpo=False))
    assert advantages.tolist() == [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]


def test_gpg_scales_by_the_rows_that_teach() -> None:
    """Two of three groups have spread, so 6 / 4. verl scales by rows of nonzero score, here 6 / 4 too but by luck."""
    uids = ["a", "a", "b", "b", "c", "c"]
    assert outcome([1.0, 0.0, 1.0, 0.0, 1.0, 1.0], uids, "gpg") == pytest.approx([0.75, -0.75, 0.75, -0.75, 0.0, 0.0])
    shifted = outcome([0.0, -1.0, 0.0, -1.0, 0.0, 0.0], uids, "gpg")
    verl_shifted = 6 / 2 * 0.5
    assert shifted[0] == pytest.approx(0.75)
    assert verl_shifted == 1.5


def test_opo_by_hand() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    inp = AdvantageInput(place_scores(torch.tensor([1.0, 5.0]), mask), mask, group_ids=group_codes("aa"))
    advantages, _ = compute_advantages("opo", inp, CONFIG)
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, -1.0, -1.0], [3.0, 0.0, 0.0]]))


@pytest.mark.parametrize("name", ["reinforce_plus_plus_baseline", "gdpo"])
def test_whitening_is_over_the_groups_that_teach(name: str) -> None:
    """Tokens of group a are x, -x, -x, -x: mean -x/2, deviation x. Group b is not in it and gets nothing."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 0, 0], [1, 0, 0]])
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    inp = AdvantageInput(place_scores(scores, mask), mask, group_codes("aabb"), reward_parts=scores.unsqueeze(1))
    advantages, _ = compute_advantages(name, inp, AdvantageConfig())
    assert advantages[0].tolist() == pytest.approx([1.5, 0.0, 0.0])
    assert advantages[1].tolist() == pytest.approx([-0.5] * 3)
    assert (advantages[2:] == 0).all()


def test_optimal_token_baseline_learns_nothing_from_equal_scores_of_unequal_lengths() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    rewards = place_scores(torch.tensor([1.0, 1.0]), mask)
    inp = replace(advantage_input(mask, group_codes("aa")), token_level_rewards=rewards)
    advantages, returns = compute_advantages("optimal_token_baseline", inp, CONFIG)
    assert (advantages == 0).all()
    assert torch.equal(returns, mask.float())


def test_reinforce_plus_plus_returns_skip_masked_tokens() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 1]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 2.0]])
    inp = AdvantageInput(rewards, mask)
    advantages, returns = compute_advantages("reinforce_plus_plus", inp, AdvantageConfig(gamma=0.5))
    assert returns.tolist() == [[0.5, 1.0, 0.0, 0.0, 2.0]]
    trained = advantages[mask.bool()]
    assert trained.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert trained.std().item() == pytest.approx(1.0, rel=1e-5)


def test_remax_by_hand() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    inp = AdvantageInput(torch.tensor([[1.0, 2.0, 0.0], [0.0] * 3]), mask, reward_baselines=torch.tensor([0.5, 9.0]))
    advantages, returns = compute_advantages("remax", inp, CONFIG)
    assert advantages.tolist() == [[2.5, 1.5, 0.0], [0.0, 0.0, 0.0]]
    assert returns.tolist() == [[3.0, 2.0, 0.0], [0.0, 0.0, 0.0]]


def test_gdpo_gives_rewards_of_any_scale_the_same_say() -> None:
    mask = torch.ones(4, 1, dtype=torch.int64)
    parts = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 0.0], [3.0, 1.0]], dtype=torch.float64)
    inp = AdvantageInput(parts.sum(1, keepdim=True), mask, group_ids=group_codes("aaaa"), reward_parts=parts)
    same = AdvantageConfig()
    small, _ = compute_advantages("gdpo", inp, same)
    scaled = replace(inp, reward_parts=parts * torch.tensor([1000.0, 1.0]))
    large, _ = compute_advantages("gdpo", scaled, same)
    torch.testing.assert_close(large, small, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="3 entries for 2"):
        compute_advantages("gdpo", inp, CONFIG)


def test_gdpo_by_hand() -> None:
    """Scores 0, 2 and 4, 0: each reward is 1/sqrt 2 from its mean; with weights 3 and 1 the first wins."""
    mask = torch.tensor([[1, 1], [1, 1]])
    parts = torch.tensor([[0.0, 4.0], [2.0, 0.0]], dtype=torch.float64)
    inp = AdvantageInput(torch.zeros(2, 2), mask, group_ids=group_codes("aa"), reward_parts=parts)
    config = AdvantageConfig(gdpo_reward_weights=(3.0, 1.0))
    advantages, _ = compute_advantages("gdpo", inp, config)
    whitened = 1 / math.sqrt(4 / 3)  # four tokens at -x, -x, x, x
    assert advantages.tolist() == [pytest.approx([-whitened] * 2), pytest.approx([whitened] * 2)]
    equal, _ = compute_advantages("gdpo", inp, AdvantageConfig(norm_adv_by_std_in_grpo=False))
    assert equal[0, 0].item() == pytest.approx(whitened)  # -1 + 2: without deviations the larger reward wins


def test_optimal_token_baseline_follows_the_energy_of_the_whole_path() -> None:
    """Energies (1 - p)^2: row 0 spends 1/4 then 9/16, row 1 the other way round; weights count squared."""
    mask = torch.ones(2, 2, dtype=torch.int64)
    old = torch.tensor([[0.5, 0.25], [0.25, 0.5]], dtype=torch.float64)
    inp = AdvantageInput(
        place_scores(torch.tensor([1.0, 5.0], dtype=torch.float64), mask),
        mask,
        group_ids=group_codes("aa"),
        old_log_probs=old.log(),
        sum_pi_squared=old.square(),
    )
    advantages, _ = compute_advantages("optimal_token_baseline", inp, CONFIG)
    first = (0.25 * 1.0 + 0.5625 * 5.0) / 0.8125
    assert advantages[0].tolist() == pytest.approx([1.0 - first, 1.0 - 3.0])  # then both have spent the same
    weighted = replace(inp, rollout_is_weights=torch.tensor([[3.0, 3.0], [1.0, 1.0]]))
    advantages, _ = compute_advantages("optimal_token_baseline", weighted, CONFIG)
    assert advantages[0, 1].item() == pytest.approx(1.0 - (9 * 1.0 + 1 * 5.0) / 10)


def test_optimal_token_baseline_by_hand() -> None:
    """Energies (1 - p)^2 are 1/4 and 9/16 a token; the longer row has no rival at its second token."""
    mask = torch.tensor([[1, 1], [1, 0]])
    old = torch.tensor([[0.5, 0.5], [0.25, 0.25]], dtype=torch.float64)
    inp = AdvantageInput(
        torch.tensor([[1.0, 2.0], [1.0, 0.0]], dtype=torch.float64),
        mask,
        group_ids=group_codes("aa"),
        old_log_probs=old.log(),
        sum_pi_squared=old.square(),
    )
    advantages, returns = compute_advantages("optimal_token_baseline", inp, CONFIG)
    baseline = (0.25 * 3.0 + 0.5625 * 1.0) / (0.25 + 0.5625)
    torch.testing.assert_close(
        advantages, torch.tensor([[3.0 - baseline, 2.0], [1.0 - baseline, 0.0]], dtype=torch.float64)
    )
    assert returns.tolist() == [[3.0, 2.0], [1.0, 0.0]]


def test_a_reward_that_is_not_finite_names_its_row() -> None:
    inp = advantage_input(MASK_WITH_EVERYTHING, GROUPS)
    inp.token_level_rewards[3, 1] = math.inf
    with pytest.raises(ValueError, match="row 3"):
        compute_advantages("grpo", inp, CONFIG)


def test_large_finite_rewards_are_not_mistaken_for_infinite_ones() -> None:
    mask = torch.ones(2, 2, dtype=torch.int64)
    inp = AdvantageInput(torch.full((2, 2), 3e38), mask, group_ids=group_codes("aa"))
    assert (compute_advantages("grpo", inp, CONFIG)[0] == 0).all()


def test_unknown_names_and_wrong_shapes_are_refused() -> None:
    inp = advantage_input(MASK_WITH_EVERYTHING, GROUPS)
    with pytest.raises(ValueError, match=r"'grop'.*grpo"):
        compute_advantages("grop", inp, CONFIG)
    with pytest.raises(ValueError, match=r"values has shape \(8, 2\)"):
        compute_advantages("gae", replace(inp, values=inp.values[:, :2]), CONFIG)


@pytest.mark.usefixtures("own_registries")
def test_a_name_is_registered_once() -> None:
    def mine(inp: AdvantageInput, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
        return inp.token_level_rewards, inp.token_level_rewards

    register_adv_est("mine", min_group_size=4)(mine)
    register_adv_est("mine", min_group_size=4)(mine)
    assert estimator_traits("mine").min_group_size == 4
    with pytest.raises(TypeError, match="needs_luck"):
        register_adv_est("other", needs_luck=True)
    with pytest.raises(ValueError, match="'gae' is already registered"):
        register_adv_est("gae")(mine)


# ---------------------------------------------------------------------------------- returns of single tokens


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


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (0.5, 0.0), (0.0, 0.7)])
def test_gae_is_the_textbook_sum(gamma: float, lam: float) -> None:
    batch = Batch.random()
    expected = textbook(batch.returns, batch.values, batch.mask, gamma, lam)
    got = gae(batch.returns, batch.values, batch.mask, gamma, lam, whitened=False)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool, torch.float32])
def test_whitening_is_over_all_trained_tokens(mask_dtype: torch.dtype) -> None:
    batch = Batch.random(seed=1)
    advantages, returns = gae(batch.returns + 100.0, batch.values, batch.mask.to(mask_dtype), 0.9, 0.8)
    plain, plain_returns = gae(batch.returns + 100.0, batch.values, batch.mask.to(mask_dtype), 0.9, 0.8, whitened=False)
    trained = plain[batch.mask.bool()]
    expected = (trained - trained.mean()) / (trained.var() + 1e-8).sqrt()
    torch.testing.assert_close(advantages[batch.mask.bool()], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns, plain_returns, rtol=0, atol=0)
    assert (advantages[~batch.mask.bool()] == 0).all()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("tokens", [0, 1])
def test_whitening_of_no_token_and_of_one(tokens: int) -> None:
    mask = torch.zeros(3, 4, dtype=torch.int64)
    mask[1, 2] = tokens
    advantages, returns = gae(torch.ones(3, 4), torch.full((3, 4), 0.25), mask, 1.0, 1.0)
    assert (advantages == 0).all()
    assert returns.sum().item() == tokens


@pytest.mark.usefixtures("compiled")
def test_no_rows_and_no_columns() -> None:
    for shape in ((0, 4), (3, 0)):
        empty = torch.zeros(shape)
        assert gae(empty, empty, empty, 1.0, 1.0)[0].shape == shape


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("tokens_at_once", [1, 5_000, 1 << 18])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
def test_long_rows_worked_on_in_pieces(
    dtype: torch.dtype, tolerance: float, tokens_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hrl.algos.advantages.TOKENS_AT_ONCE", tokens_at_once)
    generator = torch.Generator().manual_seed(0)
    shape = (13, 1100)
    mask = torch.arange(1100) < torch.randint(0, 1101, (13, 1), generator=generator)
    mask[::2] &= torch.rand((7, 1100), generator=generator) > 0.1
    rewards, values = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    got = gae(rewards, values, mask, 0.99, 0.95, whitened=False)
    advantages, returns = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for row in range(len(rewards)):
        advantage = following = 0.0
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            value = float(values[row, t])
            advantage = float(rewards[row, t]) + 0.99 * following - value + 0.99 * 0.95 * advantage
            advantages[row, t], returns[row, t], following = advantage, advantage + value, value
    for mine, expected in zip(got, (advantages, returns), strict=True):
        torch.testing.assert_close(mine.double(), expected, rtol=tolerance, atol=tolerance)
    whitened, _ = gae(rewards, values, mask, 0.99, 0.95)
    trained = advantages[mask]
    expected = ((trained - trained.mean()) / (trained.var() + 1e-8).sqrt()).to(dtype)
    torch.testing.assert_close(whitened[mask], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_advantages_far_from_0_are_whitened_to_0(dtype: torch.dtype) -> None:
    """Their spread is 0: what is left of rounding would be divided by almost nothing."""
    rewards, values = (torch.full((3, 11), number, dtype=dtype) for number in (100.1, 0.3))
    advantages, returns = gae(rewards, values, torch.ones(3, 11), 0.0, 0.0)
    assert advantages.abs().max() < 1e-6
    torch.testing.assert_close(returns, rewards)


@pytest.mark.usefixtures("compiled")
def test_whitening_loses_no_digits_far_from_0() -> None:
    rewards = 1e6 + torch.randn(1, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advantages, _ = gae(rewards, torch.zeros_like(rewards), torch.ones_like(rewards), 0.0, 0.0)
    expected = (rewards - rewards.mean()) / (rewards.var() + 1e-8).sqrt()
    torch.testing.assert_close(advantages, expected, rtol=1e-7, atol=1e-7)


def test_large_batches_run_compiled_and_without_numba_as_small_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    from hrl.algos import advantages, compiled_gae

    calls: list[int] = []
    monkeypatch.setattr(compiled_gae, "scan_rows", lambda *columns: calls.append(columns[0].size))
    batch = Batch.random()
    monkeypatch.setattr(advantages, "COMPILED_FROM", batch.mask.numel())
    gae(batch.returns, batch.values, batch.mask, 0.9, 0.8, whitened=False)
    assert calls == [batch.mask.numel()]
    gae(batch.returns[1:], batch.values[1:], batch.mask[1:], 0.9, 0.8, whitened=False)
    monkeypatch.setattr(advantages, "_compiled_gae", lambda: None)
    found, _ = gae(batch.returns, batch.values, batch.mask, 0.9, 0.8, whitened=False)
    expected, _ = textbook(batch.returns, batch.values, batch.mask, 0.9, 0.8)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert len(calls) == 1


def test_numba_that_can_not_be_imported_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from hrl.algos import advantages

    advantages._compiled_gae.cache_clear()
    monkeypatch.setitem(sys.modules, "hrl.algos.compiled_gae", None)  # an import raises an ImportError
    assert advantages._compiled_gae() is None
    advantages._compiled_gae.cache_clear()


@pytest.mark.parametrize("decay", [0.0, 1e-250, 0.01, 0.5, 0.9, 0.999, 1.0, 1.1])
def test_discounted_sums_beside_a_loop(decay: float) -> None:
    """Also where the row is longer than the range of the discount's powers, of which 0.5^k leaves float64 at 1074."""
    steps = np.random.default_rng(1).normal(size=(3, 1200))
    expected, running = np.zeros_like(steps), np.zeros(3)
    for t in range(steps.shape[1]):
        expected[:, t] = running = steps[:, t] + decay * running
    np.testing.assert_allclose(discounted_sums(steps.copy(), decay), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.usefixtures("compiled")
def test_inputs_with_gradients_are_not_changed_and_outputs_have_none() -> None:
    rewards = torch.ones(2, 2, requires_grad=True)
    values = torch.zeros(2, 2, requires_grad=True)
    advantages, returns = gae(rewards, values, torch.ones(2, 2), 1.0, 1.0)
    assert not advantages.requires_grad
    assert not returns.requires_grad
    assert rewards.tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.usefixtures("compiled")
def test_reward_to_go_skips_what_is_masked() -> None:
    rewards = torch.tensor([[1.0, 50.0, 4.0], [2.0, 2.0, 2.0]])
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    assert reward_to_go(rewards, mask, 0.5).tolist() == [[3.0, 0.0, 4.0], [0.0, 0.0, 0.0]]


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"values has shape \(2, 3\)"):
        gae(torch.ones(2, 2), torch.ones(2, 3), MASK_WITH_EVERYTHING[:2, :2], 1.0, 1.0)
