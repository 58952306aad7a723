"""Seconds of sampling: by hand where every response is as long, and what more engines do."""

from dataclasses import replace
from math import log

import pytest

from hrl.plan.assumptions import ON_GPU
from hrl.plan.hardware import GPUS
from hrl.plan.lengths import Episodes
from hrl.plan.sampling import (
    ATTENTION,
    ENGINE,
    ENVIRONMENT,
    LINKS,
    PREFILL,
    PRODUCTS,
    SERVICE,
    UNEVEN,
    WEIGHTS,
    Engines,
)  # fmt: skip
from hrl.plan.workload import Workload
from tests.plan.recorded import SEVEN, SMOL

EQUAL = Workload(prompts=16, samples=8, prompt=100, response=256, longest_response=256)
ONE = Engines(SMOL, GPUS["h100"], ON_GPU, count=1, ranks=1, cache_bytes=40e9, max_requests=128, shares_prompts=True)


def test_equal_responses_in_one_wave_take_an_iteration_for_each_token():
    terms = ONE.seconds(EQUAL)
    each = ONE.iteration(128, 100 + 128)
    assert terms[WEIGHTS] == pytest.approx(256 * each[WEIGHTS], rel=1e-3)
    assert terms[ATTENTION] == pytest.approx(256 * each[ATTENTION], rel=1e-3)
    assert terms[ENGINE] == pytest.approx(256 * each[ENGINE] + ON_GPU.wave_s, rel=1e-3)


def test_an_iteration_reads_all_weights_and_every_request_its_cache():
    terms = ONE.iteration(8, 100)
    rate = 3.35e12 * ON_GPU.memory_share
    assert terms[WEIGHTS] == pytest.approx(2 * 134515008 / rate)  # the head is the embedding, so that is read too
    assert terms[ATTENTION] == pytest.approx(8 * 100 * 23040 / rate)
    assert terms[ENGINE] == pytest.approx(2e-3 + 8 * 10e-6 + 8 * 4 * 49152 * 5 / 3.35e12)


def test_many_requests_are_bound_by_products_and_still_read_their_cache():
    slow = replace(ONE, hardware=replace(GPUS["h100"], flops=1e12))
    terms = slow.iteration(128, 100)
    rate = 1e12 * ON_GPU.decode_share
    assert terms[PRODUCTS] == pytest.approx(128 * (212336640 + 56623104) / rate)
    assert terms[ATTENTION] == pytest.approx(128 * 100 * 69120 / rate)  # more than its 0.13 ms of reading
    assert WEIGHTS not in terms
    read = ONE.iteration(128, 100)[ATTENTION]
    slower = replace(slow, hardware=replace(slow.hardware, memory_rate=1e12)).iteration(4096, 1000)
    assert slower[ATTENTION] == pytest.approx(4096 * 1000 * 69120 / rate)
    assert read == pytest.approx(128 * 100 * 23040 / (3.35e12 * ON_GPU.memory_share))


def test_a_7b_model_decodes_as_fast_as_its_weights_are_read():
    seven = replace(ONE, shape=SEVEN)
    read = 2 * (7615616512 - 544997376) / (3.35e12 * 0.7)  # 6.03 ms: of the embedding a row is read, of the head all
    assert seven.iteration(1, 0)[WEIGHTS] == pytest.approx(read, rel=1e-4)  # norms and biases are not products
    products = 512 * 2 * (7615616512 - 544997376) / (989e12 * 0.4)  # 18.3 ms
    terms = seven.iteration(512, 1000)
    assert terms[PRODUCTS] == pytest.approx(products, rel=1e-3)
    assert terms[ATTENTION] == pytest.approx(512 * 1000 * 57344 / (3.35e12 * 0.7))  # 12.5 ms, beside them


def test_a_prompt_is_prefilled_once_for_its_samples_but_for_its_last_block():
    def seconds(tokens, pairs):
        return (212336640 * tokens + 69120 * pairs) / (989e12 * ON_GPU.prefill_share)

    apart = replace(ONE, shares_prompts=False)
    assert apart.seconds(EQUAL)[PREFILL] == pytest.approx(seconds(128 * 100, 128 * 100 * 50))
    once, again = 16 * 100, 112 * 8  # half a block of 16 for each of the other samples
    assert ONE.seconds(EQUAL)[PREFILL] == pytest.approx(seconds(once + again, once * 50 + again * 100))


def test_requests_that_run_at_once_are_those_that_wait_the_limit_or_what_the_cache_holds():
    assert ONE.running(EQUAL) == 128
    assert replace(ONE, max_requests=32).running(EQUAL) == 32
    assert replace(ONE, count=4).running(EQUAL) == 32
    holds_ten = replace(ONE, cache_bytes=10 * 23040 * (100 / 8 + 128))
    assert holds_ten.running(EQUAL) == pytest.approx(10)


def test_what_waits_is_run_in_the_place_of_what_is_finished():
    half = replace(ONE, max_requests=64)
    assert half.seconds(EQUAL)[ATTENTION] == pytest.approx(2 * 256 * half.iteration(64, 228)[ATTENTION], rel=1e-3)


def test_a_group_stays_with_its_engine():
    assert replace(ONE, count=16).running(EQUAL) == 8
    assert replace(ONE, count=64).running(EQUAL) == 8  # 48 engines have nothing to do
    assert replace(ONE, count=7).waiting(EQUAL) == 3 * 8  # two of seven have three groups, not 2.3
    uneven = replace(EQUAL, response=128)  # power 1: lengths are spread evenly, by 1 / sqrt(3) of their mean
    idle = replace(ONE, count=64).seconds(uneven)[UNEVEN]
    assert idle == replace(ONE, count=16).seconds(uneven)[UNEVEN] > 0
    assert replace(ONE, count=16)._excess(uneven) == pytest.approx((1 / 3) ** 0.5 * (2 * log(16) / 8) ** 0.5)


def test_several_ranks_read_a_part_each_and_add_up_twice_in_a_layer():
    two = replace(ONE, ranks=2)
    assert two.iteration(8, 100)[WEIGHTS] == pytest.approx(ONE.iteration(8, 100)[WEIGHTS] / 2)
    assert two.iteration(8, 100)[ATTENTION] == pytest.approx(ONE.iteration(8, 100)[ATTENTION] / 2)
    moved = 8 * 576 * 2 / (450e9 * ON_GPU.collective_share)
    assert two.iteration(8, 100)[LINKS] == pytest.approx(2 * 30 * (10e-6 + moved))


def test_a_rank_caches_a_whole_head_at_least():
    eight, four = (replace(ONE, shape=SEVEN, ranks=ranks) for ranks in (8, 4))  # 4 heads of keys and values
    assert eight.iteration(8, 1000)[ATTENTION] == pytest.approx(four.iteration(8, 1000)[ATTENTION])
    assert eight.iteration(8, 1000)[WEIGHTS] == pytest.approx(four.iteration(8, 1000)[WEIGHTS] / 2)
    cache = 10 * 57344 * (100 / 8 + 128)
    assert replace(four, cache_bytes=cache).running(EQUAL) == pytest.approx(10)
    assert replace(eight, cache_bytes=2 * cache).running(EQUAL) == pytest.approx(10)


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


WAITING = replace(EQUAL, episodes=Episodes(turns=4, sampled=0.5, environment_s=1.28))


def test_episodes_wait_for_their_environment_and_the_engine_decodes_the_others():
    terms = ONE.token(128, 228, WAITING.wait_s)
    assert terms[ENVIRONMENT] == 0.01  # of 128 tokens each
    each = sum(terms.values()) - 0.01
    rows = 128 * each / (each + 0.01)
    assert each == pytest.approx(sum(ONE.iteration(rows, 228).values()), rel=1e-2)
    seconds = ONE.seconds(WAITING)
    assert seconds[ENVIRONMENT] == pytest.approx(1.28, rel=1e-3)
    assert seconds[WEIGHTS] == pytest.approx(128 * ONE.iteration(rows, 228)[WEIGHTS], rel=1e-2)


def test_an_environment_that_takes_no_time_leaves_an_iteration_for_each_sampled_token():
    at_once = replace(WAITING, episodes=replace(WAITING.episodes, environment_s=0.0))
    assert ONE.seconds(at_once)[WEIGHTS] == pytest.approx(ONE.seconds(EQUAL)[WEIGHTS] / 2)
    assert ENVIRONMENT not in ONE.seconds(at_once)


def test_an_engine_with_enough_episodes_does_not_wait():
    narrow, many = replace(ONE, max_requests=8), replace(WAITING, prompts=1024)
    width_s = sum(narrow.iteration(8, 228).values())
    assert narrow.enough(many) == pytest.approx(8 * (1 + 0.01 / width_s))
    assert sum(narrow.seconds(many).values()) == pytest.approx(8192 * 128 / 8 * width_s, rel=0.02)
    few = replace(narrow, max_episodes=8)  # the limit keeps the engine waiting
    assert few.seconds(many)[ENVIRONMENT] == pytest.approx(1024 * 1.28, rel=0.01)


def test_a_further_turn_prefills_what_its_environment_said_and_its_history_without_shared_caches():
    def seconds(tokens, pairs):
        return (212336640 * tokens + 69120 * pairs) / (989e12 * ON_GPU.prefill_share)

    prompts, said = ONE.seconds(EQUAL)[PREFILL], 128 * 128 + 128 * 3 * 8
    assert ONE.seconds(WAITING)[PREFILL] - prompts == pytest.approx(seconds(said, said * 228))
    apart, turns = replace(ONE, shares_prompts=False), 128 * 3
    more = apart.seconds(WAITING)[PREFILL] - apart.seconds(EQUAL)[PREFILL]
    assert more == pytest.approx(seconds(turns * 228, turns * 228**2 / 2))


def test_episodes_of_a_group_are_divided_among_engines():
    assert replace(ONE, count=64).waiting(WAITING) == 2
    assert replace(ONE, count=64).working(WAITING) == 64


def test_no_batch_is_sampled_before_the_service_has_handled_its_turns():
    work = replace(WAITING, prompts=1024, response=8, longest_response=8)
    terms = replace(ONE, count=1024).seconds(replace(work, episodes=Episodes(turns=4, sampled=0.5)))
    assert sum(terms.values()) == pytest.approx(8192 * 4 * ON_GPU.turn_s)
    assert terms[SERVICE] > 10
    assert SERVICE not in replace(ONE, count=1024).seconds(replace(work, episodes=None))


def test_the_longest_response_bounds_what_more_engines_save():
    work = replace(EQUAL, response=64)
    many = sum(replace(ONE, count=128).seconds(work).values())
    alone = sum(ONE.iteration(1, 100).values())
    assert many - ON_GPU.wave_s > 0.9 * work.longest_response * alone
