"""What a step has to compute, in numbers by hand."""

from dataclasses import replace

import pytest

from hrl.config.compose import compose_kind
from hrl.config.run_kind import PPO
from hrl.plan.lengths import Episodes, Lengths
from hrl.plan.workload import Workload

FOUR = Workload(prompts=4, samples=8, prompt=100, response=50, longest_response=200)


def test_lengths_have_the_mean_and_the_longest_that_are_given():
    steps = 100_000
    lengths = [FOUR.longest_response * ((i + 0.5) / steps) ** FOUR.tail for i in range(steps)]
    assert sum(lengths) / steps == pytest.approx(50, rel=1e-3)
    assert sum(length**2 for length in lengths) / steps == pytest.approx(FOUR.squared_response, rel=1e-3)
    assert sum(length > 120 for length in lengths) / steps == pytest.approx(FOUR.alive(120), abs=1e-3)
    assert (FOUR.alive(0), FOUR.alive(200)) == (1.0, 0.0)


def test_a_limit_far_above_the_mean_is_not_reached():
    far = Workload(4, 8, 100, 50, 2000)
    assert (far.longest, far.tail, far.alive(400)) == (400, 7, 0.0)
    assert Workload(4, 8, 100, 50, 300).longest == 300


def test_a_running_response_is_met_in_its_middle_and_a_long_one_more_often():
    assert Workload(4, 8, 100, 200, 200).running_response == 100
    assert FOUR.running_response == pytest.approx(
        200**2 / 7 / 100
    )  # the power is 3: lengths have a mean square of a²/7


def test_responses_that_all_reach_the_limit_have_no_tail():
    full = Workload(4, 8, 100, 200, 200)
    assert (full.tail, full.alive(199), full.alive(200)) == (0.0, 1.0, 0.0)
    assert full.squared_response == 200**2


def test_a_prompt_is_computed_once_for_its_samples_and_again_on_every_rank_that_has_some():
    assert FOUR.packed_tokens(ranks=2) == 4 * 100 + 32 * 50
    assert FOUR.packed_tokens(ranks=8) == 4 * 2 * 100 + 32 * 50  # two ranks to a prompt
    assert FOUR.packed_tokens(ranks=1024) == 4 * 8 * 100 + 32 * 50  # no more than its samples
    assert FOUR.tokens == 32 * 150


def test_a_prompt_is_computed_again_where_a_micro_batch_ends_its_group():
    assert FOUR.copies(1, budget=300) == 2  # of its 8 × 50 tokens, 200 beside the prompt
    assert FOUR.copies(1, budget=1000) == 1
    assert FOUR.copies(1, budget=100) == 8  # no more than its samples
    assert FOUR.packed_tokens(1, budget=300) == 4 * 2 * 100 + 32 * 50
    assert FOUR.pairs(1, budget=300) - FOUR.pairs(1) == 4 * 100**2 / 2


def test_a_part_has_as_long_rows_and_fewer_prompts():
    assert FOUR.part(0.25).packed_tokens(1) == FOUR.packed_tokens(1) / 4
    assert FOUR.part(0.25).longest_response == 200


def test_the_longest_of_few_is_shorter_than_the_longest_of_all():
    assert FOUR.longest_of(1) == 200 / 2**3  # the power is 3
    assert FOUR.longest_of(999) == pytest.approx(200 * 0.999**3)


def test_pairs_are_causal_in_the_prompt_and_whole_between_response_and_prompt():
    full = Workload(4, 8, 100, 200, 200)
    assert full.pairs(1) == 4 * 100 * 100 / 2 + 32 * (100 * 200 + 200 * 200 / 2)


def test_shared_beginnings_are_computed_once_and_have_the_fewest_pairs():
    half = replace(Workload(4, 8, 100, 200, 200), episodes=Episodes(shared=0.5))
    assert half.packed_tokens(1) == half.packed_tokens(1024) == 32 * 300 / 2
    assert half.pairs(1) == 32 * 300 * 300 / 2 * 0.75
    none = replace(half, episodes=Episodes(shared=0.0))
    assert none.pairs(1) == 32 * 300 * 300 / 2


@pytest.mark.parametrize(
    ("known", "turns", "sampled", "environment"),
    [
        ({}, 4, 128, 128),
        ({"turns": 2, "turn_tokens": 60, "environment_tokens": 30}, 2, 120, 30),
        ({"turns": 2, "turn_tokens": 60}, 2, 120, 120),
        ({"turns": 2, "environment_tokens": 60}, 2, 60, 60),
        ({"turns": 2, "environment_tokens": 0}, 2, 256, 0),
        ({"response": 100, "turn_tokens": 20}, 4, 80, 20),
        ({"response": 100, "environment_tokens": 20}, 4, 80, 20),
        ({"turns": 1}, 1, 256, 0),
    ],
)
def test_what_is_known_of_episodes_says_the_rest(known, turns, sampled, environment):
    config = compose_kind(PPO, ["environment.path=guess.py:Guess", "data.max_response_length=512"])
    work = Workload.of(config, Lengths(**known))
    assert (work.turns, work.sampled, work.environment_tokens) == pytest.approx((turns, sampled, environment))


def test_lengths_that_are_not_known_are_half_of_the_longest_and_never_above_it():
    config = compose_kind(PPO, [])  # 64 and 32
    assert (Workload.of(config, Lengths()).prompt, Workload.of(config, Lengths()).response) == (32, 16)
    assert Workload.of(config, Lengths(45, 500)).response == 32
