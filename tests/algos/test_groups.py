import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.algos.groups import (
    GROUP_FILTERS,
    best_against_worst,
    count_groups_without_spread,
    group_codes,
    group_statistics,
)


@pytest.mark.parametrize(
    "uids",
    [
        ["b", "a", "b", "c"],
        np.array(["b", "a", "b", "c"], dtype=object),
        torch.tensor([7, 3, 7, 9]),
    ],
)
def test_codes_count_up_in_order_of_appearance(uids) -> None:
    codes = group_codes(uids)
    assert codes.dtype == torch.int64
    assert codes.tolist() == [0, 1, 0, 2]


def test_statistics_of_ragged_groups() -> None:
    scores = torch.tensor([1.0, 5.0, 3.0, 9.0, 5.0, 100.0])
    ids = group_codes(["a", "b", "a", "c", "b", "a"])
    counted = torch.tensor([True, True, True, True, True, False])
    stats = group_statistics(scores, ids, counted)
    assert stats.size.tolist() == [2, 2, 2, 1, 2, 2]
    assert stats.mean.tolist() == [2.0, 5.0, 2.0, 9.0, 5.0, 2.0]
    assert stats.std.tolist() == pytest.approx([2**0.5, 0.0, 2**0.5, 0.0, 0.0, 2**0.5])
    assert stats.has_spread.tolist() == [True, False, True, False, False, True]
    assert count_groups_without_spread(scores, ids, counted) == 2


@pytest.mark.parametrize("name", sorted(GROUP_FILTERS))
def test_filters_drop_whole_groups_and_those_that_cannot_teach(name: str) -> None:
    ids = group_codes(["a", "b", "a", "c", "b", "d", "d"])
    scores = torch.tensor([1.0, 5.0, 3.0, 9.0, 5.0, 1.0, 2.0])
    counted = torch.tensor([True, True, True, True, True, True, False])  # d's second answer has no tokens
    kept = GROUP_FILTERS[name](scores, ids, counted)
    assert kept.tolist() == [True, False, True, False, False, False, False]


def test_rounding_is_no_spread() -> None:
    """The mean of three times 0.1 is not 0.1 in binary; a spread taken from deviations would not be 0."""
    scores = torch.full((3,), 0.1, dtype=torch.float64)
    stats = group_statistics(scores, group_codes("aaa"), torch.ones(3, dtype=torch.bool))
    assert (stats.mean != scores).all()
    assert not stats.has_spread.any()


def test_no_rows_and_nothing_counted() -> None:
    nothing = torch.zeros(0)
    assert group_statistics(nothing, group_codes([]), nothing.bool()).size.shape == (0,)
    stats = group_statistics(torch.ones(2), group_codes("ab"), torch.zeros(2, dtype=torch.bool))
    assert stats.mean.tolist() == [0.0, 0.0]
    assert not stats.has_spread.any()


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="group ids"):
        group_statistics(torch.ones(3), group_codes("ab"), torch.ones(3, dtype=torch.bool))


def test_the_best_of_a_group_meets_its_worst_and_groups_without_spread_have_no_pair():
    scores = torch.tensor([1.0, 3.0, 2.0, 5.0, 5.0, 0.0, 9.0, 4.0, 4.0, 7.0])
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3, 3])
    counted = torch.tensor([1, 1, 1, 1, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    best, worst = best_against_worst(scores, groups, counted)
    # Group 1 is a tie, group 2 has one row that counts; in group 3 the first of the two worst is taken.
    assert (best.tolist(), worst.tolist()) == ([1, 9], [0, 7])
    empty = torch.zeros(0)
    nobody = best_against_worst(scores, groups, torch.zeros_like(counted))
    assert [t.tolist() for t in nobody] == [[], []]
    assert [t.tolist() for t in best_against_worst(empty, empty.long(), empty.bool())] == [[], []]


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([-1.5, 0.0, 0.1, 2.0]), st.booleans()), min_size=1, max_size=12
    )
)
def test_each_pair_is_the_first_best_and_the_first_worst_counted_row_of_its_group(
    rows: list[tuple[int, float, bool]],
) -> None:
    expected = []
    for group in range(4):
        counted = [row for row, (owner, _, counts) in enumerate(rows) if owner == group and counts]
        scores = [rows[row][1] for row in counted]
        if len(set(scores)) > 1:
            expected.append((counted[scores.index(max(scores))], counted[scores.index(min(scores))]))
    ids, scores, counted = (torch.tensor(column) for column in zip(*rows, strict=True))
    best, worst = best_against_worst(scores, ids, counted)
    assert list(zip(best.tolist(), worst.tolist(), strict=True)) == expected
