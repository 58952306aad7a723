"""Seconds of sampling: by hand where every response is as long, and what more engines do."""

from dataclasses import replace

import pytest

from hrl.plan.assumptions import ON_GPU
from hrl.plan.hardware import GPUS
from hrl.plan.sampling import ENGINE, LINKS, MEMORY, PREFILL, PRODUCTS, Engines
from hrl.plan.workload import Workload
from tests.plan.recorded import SMOL

EQUAL = Workload(prompts=16, samples=8, prompt=100, response=256, longest_response=256)
ONE = Engines(SMOL, GPUS["h100"], ON_GPU, count=1, ranks=1, cache_bytes=40e9, max_requests=128, shares_prompts=True)


def test_equal_responses_in_one_wave_take_an_iteration_for_each_token():
    terms = ONE.seconds(EQUAL)
    each = ONE.iteration(128, 100 + 128)
    assert terms[MEMORY] == pytest.approx(256 * each[MEMORY], rel=1e-3)
    assert terms[ENGINE] == pytest.approx(256 * each[ENGINE] + ON_GPU.wave_s, rel=1e-3)


def test_an_iteration_reads_all_weights_and_every_request_its_cache():
    terms = ONE.iteration(8, 100)
    read = 2 * 134515008 + 8 * 100 * 23040  # the head is the embedding, so that is read too
    assert terms[MEMORY] == pytest.approx(read / (3.35e12 * ON_GPU.memory_share))
    assert terms[ENGINE] == pytest.approx(2e-3 + 8 * 10e-6 + 8 * 4 * 49152 * 10 / 3.35e12)


def test_many_requests_are_bound_by_products():
    slow = replace(ONE, hardware=replace(GPUS["h100"], flops=1e12))
    terms = slow.iteration(128, 100)
    flops = 128 * (212336640 + 56623104 + 69120 * 100)
    assert terms[PRODUCTS] == pytest.approx(flops / (1e12 * ON_GPU.decode_share))
    assert MEMORY not in terms


def test_a_prompt_is_prefilled_once_for_its_samples():
    apart = replace(ONE, shares_prompts=False)
    assert apart.seconds(EQUAL)[PREFILL] == pytest.approx(8 * ONE.seconds(EQUAL)[PREFILL])


def test_requests_that_run_at_once_are_those_that_wait_the_limit_or_what_the_cache_holds():
    assert ONE.running(EQUAL) == 128
    assert replace(ONE, max_requests=32).running(EQUAL) == 32
    assert replace(ONE, count=4).running(EQUAL) == 32
    holds_ten = replace(ONE, cache_bytes=10 * 23040 * (100 / 8 + 128))
    assert holds_ten.running(EQUAL) == pytest.approx(10)


def test_what_waits_is_run_in_the_place_of_what_is_finished():
    half = replace(ONE, max_requests=64)
    assert half.seconds(EQUAL)[MEMORY] == pytest.approx(2 * 256 * half.iteration(64, 228)[MEMORY], rel=1e-3)


def test_several_ranks_read_a_part_each_and_add_up_twice_in_a_layer():
    two = replace(ONE, ranks=2)
    assert two.iteration(8, 100)[MEMORY] == pytest.approx(ONE.iteration(8, 100)[MEMORY] / 2)
    moved = 8 * 576 * 2 / (450e9 * ON_GPU.collective_share)
    assert two.iteration(8, 100)[LINKS] == pytest.approx(2 * 30 * (10e-6 + moved))


@pytest.mark.parametrize("response", [32, 64, 128, 256])
def test_a_larger_cache_is_never_slower(response):
    work = replace(EQUAL, prompts=64, response=response)
    seconds = [sum(replace(ONE, cache_bytes=size).seconds(work).values()) for size in (1e8, 2e8, 4e8, 8e8, 1.6e9, 4e10)]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("response", [32, 128, 256])
def test_more_engines_are_never_slower(response):
    work = replace(EQUAL, prompts=512, response=response)
    seconds = [sum(replace(ONE, count=count).seconds(work).values()) for count in (1, 2, 4, 8, 16, 64, 256)]
    assert seconds == sorted(seconds, reverse=True)


def test_the_longest_response_bounds_what_more_engines_save():
    work = replace(EQUAL, response=64)
    many = sum(replace(ONE, count=128).seconds(work).values())
    alone = sum(ONE.iteration(1, 100).values())
    assert many > 0.9 * work.longest_response * alone
