"""What ranks compute in a pass over packed or padded rows, in numbers by hand."""

from dataclasses import replace

import pytest

from hrl.models.flops import ModelFlops
from hrl.plan.assumptions import ON_GPU
from hrl.plan.lengths import Episodes
from hrl.plan.passes import Pass
from hrl.plan.training import PRODUCTS, UNEVEN
from hrl.plan.workload import Workload
from tests.plan.test_training import ONE, RATE

#: Responses of 5, 15, 25 and 35 tokens behind prompts of 10: the power of the quantiles is 1.
FOUR = Workload(prompts=2, samples=2, prompt=10, response=20, longest_response=40)


def test_a_forward_counts_layers_on_all_tokens_and_the_head_on_responses():
    layers, head = Pass.packed(Workload(4, 8, 100, 200, 200), 1, 10**6).flops(ModelFlops(10.0, 2.0, 3.0))
    assert layers == 10 * (400 + 6400) + 2 * (20_000 + 32 * 40_000)
    assert head == 3 * 32 * 200


def test_of_an_episode_layers_see_all_tokens_and_the_head_what_was_sampled():
    full = replace(Workload(4, 8, 100, 200, 200), episodes=Episodes(turns=3, sampled=0.25, environment_s=5))
    assert (full.sampled, full.environment_tokens, full.wait_s) == (50, 150, 0.1)
    runs = (Pass.packed(each, 1, 10**6) for each in (full, replace(full, episodes=None)))
    (layers, head), (same, whole) = (each.flops(ModelFlops(10.0, 2.0, 3.0)) for each in runs)
    assert (layers, head) == (same, whole / 4)


def test_padded_rows_of_about_one_length_run_together_and_count_their_filling():
    """Under 90 tokens: rows of 45 and 35 tokens, and of 25 and 15; a third micro-batch would cost more than filling."""
    run = Pass.padded(FOUR, 1, 90, None)
    assert (run.tokens, run.micro_batches) == (2 * 45 + 2 * 25, 2)
    assert run.pairs == 2 * 45 * 46 / 2 + 2 * 25 * 26 / 2
    assert (run.head_tokens, run.fullest) == (4 * 20, 1.0)
    alone = Pass.padded(FOUR, 1, 45, None)  # 45; 35; 25 and 15 would be 50
    assert (alone.tokens, alone.micro_batches) == (45 + 35 + 25 + 15, 4)
    whole = Pass.padded(FOUR, 1, 1000, None)
    assert (whole.tokens, whole.micro_batches) == (4 * 45, 1)


def test_a_fixed_number_of_padded_rows_is_cut_into_as_few_micro_batches_as_hold_them():
    """Of two micro-batches of three rows at most, two and two have the least filling."""
    assert Pass.padded(FOUR, 1, None, 3) == Pass.padded(FOUR, 1, 90, None)
    assert Pass.padded(FOUR, 1, None, 4).tokens == 4 * 45


def test_ranks_get_neighbours_and_wait_for_the_longer_one():
    """45 and 25 on one rank, 35 and 15 on the other, each pair in one micro-batch."""
    run = Pass.padded(FOUR, 2, 90, None)
    assert (run.tokens, run.micro_batches) == (2 * 45 + 2 * 35, 1)
    assert run.fullest == pytest.approx(2 * 45 / ((2 * 45 + 2 * 35) / 2))


def test_of_less_than_a_row_a_mean_is_computed():
    part = FOUR.part(1 / 8)  # half a row, whose response is at the median
    assert Pass.padded(part, 1, 90, None).tokens == 0.5 * 30


def test_a_learner_of_padded_rows_computes_each_prompt_of_a_group_and_the_filling():
    learner = replace(ONE, packs_rows=False, budget=90)
    shape = learner.shape.flops
    layers = shape.per_token * 140 + shape.per_pair * (2 * 45 * 46 / 2 + 2 * 25 * 26 / 2)
    assert learner.forward(FOUR)[PRODUCTS] == pytest.approx((layers + shape.per_head_token * 80) / RATE)
    two = replace(learner, ranks=2, shards=2).forward(FOUR)
    assert two[UNEVEN] == pytest.approx(two[PRODUCTS] * (90 / 80 - 1)) and ON_GPU.imbalance < 90 / 80
    fixed = replace(learner, budget=10**6, max_rows=3, has_head=False).forward(FOUR)
    assert fixed[PRODUCTS] == pytest.approx(layers / RATE)
