"""Seconds of passes on training ranks, by hand, and what more ranks do."""

from dataclasses import replace
from math import ceil

import pytest

from hrl.plan.assumptions import ON_GPU
from hrl.plan.hardware import GPUS
from hrl.plan.training import BETWEEN, EXCHANGES, GATHERS, HOST, OPTIMIZER, PRODUCTS, UNEVEN, Learner
from hrl.plan.workload import Workload
from tests.plan.recorded import SMOL

WORK = Workload(prompts=512, samples=8, prompt=512, response=1024, longest_response=1024)
H100 = GPUS["h100"]
ONE = Learner(
    shape=SMOL, hardware=H100, assumed=ON_GPU, ranks=1, shards=1, budget=16384, recompute=False, master_bytes=4,
    compute_bytes=2, reshards=True, has_head=True, param_offload=False, optimizer_offload=False,
)  # fmt: skip
TOKENS = 512 * 512 + 4096 * 1024
PAIRS = 512 * 512**2 / 2 + 4096 * (512 * 1024 + 1024**2 / 2)
LAYERS = 212336640 * TOKENS + 69120 * PAIRS
HEAD = 56623104 * 4096 * 1024
RATE = 989e12 * 0.55


def test_a_forward_runs_layers_and_head_once():
    assert ONE.forward(WORK) == {PRODUCTS: pytest.approx((LAYERS + HEAD) / RATE), BETWEEN: ON_GPU.pass_s}


def test_an_update_runs_layers_three_times_and_the_head_four():
    assert ONE.update(WORK, 1, 1)[PRODUCTS] == pytest.approx((3 * LAYERS + 4 * HEAD) / RATE)


def test_recomputed_layers_run_once_more():
    assert replace(ONE, recompute=True).update(WORK, 1, 1)[PRODUCTS] == pytest.approx((4 * LAYERS + 4 * HEAD) / RATE)


def test_a_critic_has_no_head_of_words():
    assert replace(ONE, has_head=False).update(WORK, 1, 1)[PRODUCTS] == pytest.approx(3 * LAYERS / RATE)


def test_rows_that_teach_nothing_are_not_run_and_every_pass_runs_the_others():
    half = replace(WORK, teaching=0.5)
    assert ONE.update(half, 1, 1)[PRODUCTS] == pytest.approx(ONE.update(WORK, 1, 1)[PRODUCTS] / 2)
    assert set(ONE.update(replace(WORK, teaching=0.0), 1, 1)) == {BETWEEN, OPTIMIZER}
    assert ONE.update(WORK, 8, 4)[PRODUCTS] == pytest.approx(2 * ONE.update(WORK, 4, 4)[PRODUCTS])


def test_every_optimizer_step_moves_its_share_of_the_parameters():
    each = ON_GPU.optimizer_bytes * 134515008 / (3.35e12 * ON_GPU.memory_share)
    assert ONE.update(WORK, 8, 4)[OPTIMIZER] == pytest.approx(8 * each)
    assert replace(ONE, ranks=8, shards=8).update(WORK, 1, 1)[OPTIMIZER] == pytest.approx(each / 8)


def test_ranks_share_the_products_and_wait_for_the_fullest():
    eight = replace(ONE, ranks=8, shards=8).forward(WORK)
    assert eight[PRODUCTS] == pytest.approx((LAYERS + HEAD) / RATE / 8)
    assert eight[UNEVEN] == pytest.approx(0.02 * eight[PRODUCTS])


def test_collectives_cost_only_what_products_do_not_hide():
    eight = replace(ONE, ranks=8, shards=8)
    assert GATHERS not in eight.forward(WORK)
    slow = replace(H100, link_rate=1e6)
    compute = eight.forward(WORK)[PRODUCTS] * 1.02
    passes = -(-TOKENS // 8 // 16384)  # 34.7: 35
    gathers = passes * (2 * 134515008 * 7 / 8 / (1e6 * ON_GPU.collective_share) + 32 * 7 * ON_GPU.hop_s)
    assert replace(eight, hardware=slow).forward(WORK)[GATHERS] == pytest.approx(gathers - ON_GPU.overlap * compute)


def test_an_update_gathers_again_for_its_backward_where_it_resharded_and_reduces_in_float32():
    eight = replace(ONE, ranks=8, shards=8, budget=10**9, hardware=replace(H100, link_rate=1e6), recompute=True)
    rate = 1e6 * ON_GPU.collective_share
    gather, reduction = (width * 134515008 * 7 / 8 / rate + 32 * 7 * ON_GPU.hop_s for width in (2, 4))
    hidden = ON_GPU.overlap * 1.02 * eight.update(WORK, 1, 1)[PRODUCTS]
    assert eight.update(WORK, 1, 1)[GATHERS] == pytest.approx(2 * gather + reduction - hidden)
    kept = replace(eight, reshards=False)  # what is recomputed finds its weights there
    assert kept.update(WORK, 1, 1)[GATHERS] == pytest.approx(gather + reduction - hidden)


def test_ranks_wait_for_the_longest_row_of_every_mini_batch():
    work = Workload(prompts=64, samples=8, prompt=100, response=500, longest_response=4000)  # power 7
    learner = replace(ONE, ranks=64, shards=64)
    whole, cut = (learner.update(work, steps, steps) for steps in (1, 16))
    mean = 100 + 8 * 500  # a group for each rank; of a mini-batch of 4 groups a rank has half a row
    assert whole[UNEVEN] == pytest.approx(whole[PRODUCTS] * 0.02)
    assert (100 + 4000 * (512 / 513) ** 7) / mean < 1.02
    longest = 100 + 4000 * (32 / 33) ** 7
    assert cut[UNEVEN] == pytest.approx(cut[PRODUCTS] * (longest / ((4 * 8 * 100 + 32 * 500) / 64) - 1))


def test_a_group_that_no_micro_batch_holds_computes_its_prompt_again():
    work = Workload(prompts=1, samples=16, prompt=1000, response=1000, longest_response=1000)
    seconds = replace(ONE, has_head=False, budget=5000).forward(work)[PRODUCTS]
    tokens, pairs = 4 * 1000 + 16 * 1000, 4 * 1000**2 / 2 + 16 * (1000**2 + 1000**2 / 2)
    assert seconds == pytest.approx((212336640 * tokens + 69120 * pairs) / RATE)


def test_offloaded_weights_come_and_go_and_moments_pass_by():
    both = replace(ONE, param_offload=True, optimizer_offload=True)
    assert both.update(WORK, 4, 4)[HOST] == pytest.approx(134515008 * (2 * 4 + 4 * 8) / 50e9)
    assert both.forward(WORK)[HOST] == pytest.approx(134515008 * 4 / 50e9)


def test_weights_that_stay_in_host_memory_come_for_every_micro_batch_and_gradients_go_there():
    """A bus so slow that nothing hides it: half of the products' time at most is what hides."""
    slow = replace(H100, host_rate=1e6)
    stays, streams = (replace(ONE, hardware=slow, offload_policy=policy) for policy in (False, True))
    micro_batches = ceil(WORK.packed_tokens(1, ONE.budget) / ONE.budget)
    bytes_each, compute = 4 * 134515008, (LAYERS + HEAD) / RATE
    assert GATHERS not in stays.forward(WORK)
    hidden = ON_GPU.overlap * compute
    assert streams.forward(WORK)[GATHERS] == pytest.approx(micro_batches * bytes_each / 1e6 - hidden)
    update, before = streams.update(WORK, 1, 1), stays.update(WORK, 1, 1)
    assert update[GATHERS] == pytest.approx(micro_batches * 3 * bytes_each / 1e6, rel=1e-3)
    assert update[OPTIMIZER] == pytest.approx(ON_GPU.optimizer_bytes * 134515008 / 1e6)
    assert before[OPTIMIZER] < 1.0 and update.get(HOST, 0.0) == 0.0


@pytest.mark.parametrize("shards", [8, None])
def test_more_ranks_are_never_slower(shards):
    seconds = [
        sum(replace(ONE, ranks=ranks, shards=shards or ranks).update(WORK, 2, 2).values())
        for ranks in (8, 16, 32, 64, 128, 256)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_no_rank_is_done_before_the_longest_row():
    many = replace(ONE, ranks=4096, shards=8).forward(WORK)
    one_row = 212336640 * (512 + 1024) + 69120 * (512**2 / 2 + 512 * 1024 + 1024**2 / 2) + 56623104 * 1024
    assert UNEVEN in many
    assert many[PRODUCTS] + many.get(UNEVEN, 0.0) >= one_row / RATE


def test_ranks_that_share_their_rows_share_products_and_exchange_heads():
    alone, shared = replace(ONE, ranks=8, shards=8), replace(ONE, ranks=8, shards=8, degree=4, budget=4 * 16384)
    assert shared.forward(WORK)[PRODUCTS] == pytest.approx(alone.forward(WORK)[PRODUCTS])
    # 30 layers, hidden size 576, 3 key heads of 64 that 4 ranks get in 4 / 3 copies; tokens of one rank; in 16 bits.
    tokens = TOKENS / 8
    moved = 2 * tokens * 30 * (2 * 576 + 4 / 3 * 2 * 3 * 64)
    calls = 2 * 30 * ceil(TOKENS / 2 / (4 * 16384))
    once = moved * 3 / 4 / (H100.link_rate * ON_GPU.collective_share) + calls * 3 * ON_GPU.hop_s
    assert shared.forward(WORK)[EXCHANGES] == pytest.approx(once)
    assert shared.update(WORK, 1, 1)[EXCHANGES] == pytest.approx(2 * once)
    assert replace(shared, recompute=True).update(WORK, 1, 1)[EXCHANGES] == pytest.approx(3 * once)
    assert EXCHANGES not in alone.forward(WORK)


def test_shared_out_experts_are_gathered_by_fewer_ranks_and_their_tokens_travel():
    experts, routed = 100_000_000, 2 * 576 * 8
    size = replace(SMOL.size, experts=experts, routed_bytes_per_token=routed)
    slow = replace(H100, link_rate=1e6)
    eight = replace(ONE, ranks=8, shards=8, hardware=slow, shape=replace(SMOL, size=size))
    four = replace(eight, experts=4)
    rate, passes = 1e6 * ON_GPU.collective_share, -(-TOKENS // 8 // 16384)
    # Seven eighths of everything else; of an expert's quarter the other half, and of the rest nothing.
    gathered = 2 * ((134515008 - experts) * 7 / 8 + experts / 4 / 2) / rate + 32 * (7 + 1) * ON_GPU.hop_s
    hidden = ON_GPU.overlap * eight.forward(WORK)[PRODUCTS] * 1.02
    assert four.forward(WORK)[GATHERS] == pytest.approx(passes * gathered - hidden)
    exchanged = 2 * 2 * 576 * 8 * 30 * TOKENS / 8 * 3 / 4 / rate + 2 * 30 * passes * 3 * ON_GPU.hop_s
    assert EXCHANGES not in eight.forward(WORK) and four.forward(WORK)[EXCHANGES] == pytest.approx(exchanged)


def test_a_long_row_keeps_no_rank_of_its_group_waiting():
    few = Workload(prompts=1, samples=1, prompt=512, response=32000, longest_response=32000)
    alone, shared = (replace(ONE, ranks=8, shards=8, degree=degree, budget=65536) for degree in (1, 8))
    assert alone.forward(few)[UNEVEN] == pytest.approx(7 * alone.forward(few)[PRODUCTS])
    assert UNEVEN not in shared.forward(few)
