"""What rows know of each other's experts: those that begin alike have the same choices there."""

from __future__ import annotations

import numpy as np
import pytest

from hrl.routing import continued, is_missing, known_by_beginning, missing, routing_dtype


def choices(*experts: int | None) -> np.ndarray:
    """One layer, two experts of each token: ``n`` and ``n + 1``; None where nothing is known."""
    rows = [[255, 255] if n is None else [n, n + 1] for n in experts]
    return np.array(rows, np.uint8)[:, None]


def firsts(routed: list[np.ndarray]) -> list[list[int]]:
    return [row[:, :1, :1].ravel().tolist() for row in routed]


def test_numbers_are_as_narrow_as_they_can_be_and_leave_one_for_what_is_missing():
    assert [routing_dtype(count) for count in (4, 255, 256, 384)] == [np.uint8, np.uint8, np.int16, np.int16]
    for count in (255, 256):
        assert missing(routing_dtype(count)) >= count
    assert is_missing(choices(1, None, 3)).tolist() == [False, True, False]
    assert is_missing(np.zeros((0, 0, 0), np.uint8)).tolist() == []


def test_a_token_keeps_the_choice_of_its_first_turn_and_takes_a_later_one_where_none_was_known():
    first = continued(None, choices(10, None, 30))
    assert firsts([first]) == [[10, 255, 30]]
    # The second turn is told from the third token on, or from the first.
    assert firsts([continued(first, choices(40, 50), 3)]) == [[10, 255, 30, 40, 50]]
    assert firsts([continued(first, choices(11, 21, 31, 41))]) == [[10, 21, 30, 41]]
    assert firsts([continued(first, choices(22, 32, None), 1)]) == [[10, 22, 30, 255]]
    # An answer without a token says of its context alone, which may be known.
    assert firsts([continued(first, choices(11, 21))]) == [[10, 21, 30]]
    assert firsts([first]) == [[10, 255, 30]], "what was given stays as it is"


def test_what_is_missing_in_the_middle_of_a_row_is_that_of_one_that_begins_alike():
    rows = [np.array([5, 6, 7, 8]), np.array([5, 6, 7, 9])]
    filled = known_by_beginning(rows, [choices(1, 2, 3, 4), choices(1, None, 33)])
    assert firsts(filled) == [[1, 2, 3, 4], [1, 2, 33]]


def test_what_an_engine_had_in_its_cache_is_that_of_a_row_that_begins_alike():
    one, other, longer = np.array([5, 6, 7]), np.array([5, 6, 9, 4]), np.array([5, 6])
    routed = [
        choices(10, 20, 30, 40),  # the first sample of a prompt has computed all of it, and a response
        choices(None, None, 31, 41),  # the second found two tokens in the cache, and computed the third itself
        choices(None, None, 90, 91, 92),  # another prompt that begins alike
        choices(None, None),
    ]
    given = [row.copy() for row in routed]
    filled = known_by_beginning([one, one, other, longer], routed)
    assert firsts(filled) == [[10, 20, 30, 40], [10, 20, 30, 41], [10, 20, 90, 91, 92], [10, 20]]
    assert all(np.array_equal(before, after) for before, after in zip(given, routed, strict=True))
    assert firsts(known_by_beginning([one, one], [routed[1], routed[0]])) == [[10, 20, 30, 41], [10, 20, 30, 40]]


def test_what_no_row_knows_stays_missing_and_other_beginnings_tell_nothing():
    filled = known_by_beginning([np.array([1, 2, 3]), np.array([1, 9, 3])], [choices(None, None, 3), choices(7, 8, 9)])
    assert firsts(filled) == [[255, 255, 3], [7, 8, 9]]
    aborted = np.zeros((0, 0, 0), np.uint8)
    for routed in ([choices(1, 2), aborted], [aborted, choices(1, 2)]):
        assert firsts(known_by_beginning([np.array([1, 2])] * 2, routed)) == firsts(routed)


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_begin_alike_agree_in_their_prompts_however_engines_shared_them(seed):
    rng = np.random.default_rng(seed)
    prompts, routed = [], []
    for _ in range(20):
        prompt = rng.integers(0, 2, rng.integers(1, 6))
        row = choices(*rng.integers(0, 99, len(prompt) + rng.integers(0, 3)))
        row[: rng.integers(0, len(prompt))] = 255
        prompts.append(prompt)
        routed.append(row)
    filled = known_by_beginning(prompts, routed)
    for row, prompt in enumerate(prompts):
        before, after = routed[row], filled[row]
        assert after.shape == before.shape and np.array_equal(after[len(prompt) :], before[len(prompt) :])
        assert not (is_missing(after) & ~is_missing(before)).any()
        twin = next(other for other, tokens in enumerate(prompts) if np.array_equal(tokens, prompt))
        shared = min(len(prompt), len(filled[twin]), len(after))
        assert np.array_equal(filled[twin][:shared], after[:shared])
