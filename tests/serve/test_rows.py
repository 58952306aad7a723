"""Each sampled token is trained once, in exactly the context in which it was sampled, with its log-prob."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hrl.serve.rows import Branches, Call, rows_of


def call(turn: int, context: list[int], sampled: list[int]) -> Call:
    return Call(turn, context, sampled, [-(turn + token / 10) for token in sampled], version=turn + 10, text="")


def test_a_conversation_a_branch_and_another_prompt_by_hand():
    calls = [
        call(0, [1, 2], [3, 4]),
        call(1, [1, 2, 3, 4, 5], [6]),
        call(2, [1, 2, 3, 9], [7]),  # the history was changed behind token 3
        call(3, [8], [1]),
    ]
    first, branch, other = rows_of(calls[::-1])
    assert (first.prompt_ids, first.response_ids) == ([1, 2], [3, 4, 5, 6])
    assert (first.mask, first.turns, first.versions) == ([1, 1, 0, 1], [0, 0, 0, 1], [10, 10, -1, 11])
    assert first.log_probs == [-0.3, -0.4, 0.0, -1.6]
    assert (branch.prompt_ids, branch.response_ids, branch.mask) == ([1, 2], [3, 9, 7], [0, 0, 1])
    assert (branch.turns, branch.log_probs) == ([0, 0, 2], [0.0, 0.0, -2.7])
    assert (other.prompt_ids, other.response_ids, other.mask) == ([8], [1], [1])


def test_rows_keep_the_experts_that_each_token_went_to_first():
    calls = [
        call(0, [1, 2], [3, 4]),
        call(1, [1, 2, 3, 4, 5], [6]),
        call(2, [1, 2, 3, 9], [7]),
    ]
    calls = [
        replace(one, routed=np.full((len(one.prompt_ids) + len(one.token_ids) - 1, 1, 1), one.turn, np.uint8))
        for one in calls
    ]
    # The last token of a turn is computed with the next one; the branch was computed as a whole by its own call.
    assert [row.routed.ravel().tolist() for row in rows_of(calls)] == [[0, 0, 0, 1, 1], [2, 2, 2, 2]]


def test_choices_of_one_request_are_branches_even_if_they_say_the_same():
    rows = rows_of([call(0, [1], [2]), call(1, [1], [2]), call(2, [1, 2, 3], [4])])
    assert [row.mask for row in rows] == [[1, 0, 1], [1]]


def test_a_call_makes_the_longest_row_longer_that_it_continues():
    rows = rows_of([call(0, [1], [2]), call(1, [1], [2]), call(2, [1, 2, 3], [4]), call(3, [1, 2, 3, 4, 5], [6])])
    assert [row.mask for row in rows] == [[1, 0, 1, 0, 1], [1]]


def test_a_branch_that_would_be_too_long_has_its_context_as_prompt():
    rows = rows_of([call(0, [1], [2, 3]), call(1, [1, 9, 9, 9], [4])], max_response_tokens=3)
    assert [row.prompt_ids for row in rows] == [[1], [1, 9, 9, 9]]
    assert [row.prompt_ids for row in rows_of([call(0, [1], [2]), call(1, [1, 9, 9, 9], [4])])] == [[1], [1]]


def test_a_branch_has_the_prompt_of_the_row_that_it_forks_from():
    calls = [
        call(0, [8], [1]),
        call(1, [1, 2], [3, 4]),  # a further conversation
        call(2, [1, 2, 3, 4, 5], [6]),
        call(3, [1, 2, 3, 4, 9], [7]),  # asked at the same time as the one before
    ]
    first, conversation, branch = rows_of(calls)
    assert (first.prompt_ids, conversation.prompt_ids, branch.prompt_ids) == ([8], [1, 2], [1, 2])
    assert (branch.response_ids, branch.mask, branch.turns) == ([3, 4, 9, 7], [0, 0, 0, 1], [1, 1, 1, 3])


def test_no_calls_are_no_rows():
    assert rows_of([]) == []


def random_calls(seed: int) -> list[Call]:
    """Calls of a client that goes on, goes back, changes and forgets; few tokens, so that much is equal by chance."""
    draw = random.Random(seed)
    calls: list[Call] = []
    for turn in range(draw.randint(1, 8)):
        context = [draw.randint(0, 2) for _ in range(draw.randint(1, 3))]
        if calls and draw.random() < 0.8:
            earlier = draw.choice(calls)
            known = [*earlier.prompt_ids, *earlier.token_ids]
            context = known[: draw.randint(1, len(known))] if draw.random() < 0.4 else known
            context = context + [draw.randint(0, 2) for _ in range(draw.randint(0, 3))]
        calls.append(call(turn, context, [draw.randint(0, 2) for _ in range(draw.randint(1, 3))]))
    return calls


@given(st.integers(0, 2**32))
def test_every_call_is_trained_once_in_its_context(seed: int):
    calls = random_calls(seed)
    rows = rows_of(calls)
    trained = []
    for row in rows:
        ids = [*row.prompt_ids, *row.response_ids]
        columns = (row.response_ids, row.mask, row.log_probs, row.versions, row.turns)
        assert len({len(column) for column in columns}) == 1
        places = [place for place, mask in enumerate(row.mask) if mask]
        for turn in sorted({row.turns[place] for place in places}):
            own = [place for place in places if row.turns[place] == turn]
            assert own == list(range(own[0], own[-1] + 1))
            of_turn = [[column[place] for place in own] for column in columns]
            context = ids[: len(row.prompt_ids) + own[0]]
            trained.append(Call(turn, context, of_turn[0], of_turn[2], of_turn[3][0], ""))
            assert len(set(of_turn[3])) == 1
        others = [place for place in range(len(ids) - len(row.prompt_ids)) if place not in places]
        assert all((row.log_probs[place], row.versions[place]) == (0.0, -1) for place in others)
    assert sorted(trained, key=lambda one: one.turn) == calls


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_rows_have_the_prompts_that_were_foretold_and_fit(seed: int, longest: int):
    branches, calls = Branches(longest), list[Call]()
    for one in random_calls(seed):
        in_prompt = branches.prompt_length(one.prompt_ids)
        room = longest - (len(one.prompt_ids) - in_prompt)
        if room < 1:
            continue  # refused
        sampled = one.token_ids[:room]
        calls.append(call(one.turn, list(one.prompt_ids), list(sampled)))
        branches.grow(calls)
        row = next(
            row for row in branches.rows() if one.turn in [t for t, m in zip(row.turns, row.mask, strict=True) if m]
        )
        assert len(row.prompt_ids) <= max(in_prompt, len(one.prompt_ids))
        assert all(len(row.response_ids) <= longest for row in branches.rows())


@given(st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_rows_that_grew_are_those_of_all_calls_in_whatever_order_these_were_answered(seed: int, draw: random.Random):
    calls, branches = random_calls(seed), Branches()
    draw.shuffle(calls)
    for number in sorted(draw.sample(range(1, len(calls) + 1), draw.randint(1, len(calls)))):
        assert branches.grow(calls[:number]).rows() == rows_of(calls[:number])
