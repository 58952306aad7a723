"""Which class an operator belongs to, and sums over made-up events, computed by hand."""

from __future__ import annotations

import json
import random

import pytest

from hrl.profiling.operators import (
    ATTENTION,
    BETWEEN,
    CLASSES,
    COMMUNICATION,
    COPIES,
    ELEMENTWISE,
    OPTIMIZERS,
    OTHER,
    PRODUCTS,
    Event,
    Phase,
    Profile,
    Spent,
    class_of,
    class_of_kernel,
    profile_of,
)
from hrl.profiling.spans import OPTIMIZER, PHASE

S = 1_000_000_000


def event(name: str, start_s: float, end_s: float, **more) -> Event:
    return Event(name, round(start_s * S), round(end_s * S), **more)


def phase(name: str, start_s: float, end_s: float, **more) -> Event:
    return event(PHASE + name, start_s, end_s, is_span=True, **more)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", PRODUCTS),
        ("aten::addmm", PRODUCTS),
        ("_C::onednn_mm", PRODUCTS),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION),
        ("autograd::engine::evaluate_function: _BlockAttentionBackward", ATTENTION),
        ("vllm::unified_attention_with_output", ATTENTION),
        ("aten::copy_", COPIES),
        ("aten::_to_copy", COPIES),
        ("aten::index_put_", COPIES),
        ("aten::silu", ELEMENTWISE),
        ("aten::add_", ELEMENTWISE),
        ("aten::_log_softmax", ELEMENTWISE),
        ("aten::_fused_adamw_", OPTIMIZERS),
        ("c10d::allreduce_", COMMUNICATION),
        ("gloo:all_gather", COMMUNICATION),
        ("FSDP::all_gather", COMMUNICATION),
        ("aten::broadcast_to", OTHER),
        ("aten::as_strided", OTHER),
        ("MmBackward0", OTHER),
    ],
)
def test_operators_have_classes(name: str, kind: str) -> None:
    assert class_of(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", PRODUCTS),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", PRODUCTS),
        ("flash::flash_fwd_splitkv_kernel", ATTENTION),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", COMMUNICATION),
        ("Memcpy DtoH (Device -> Pageable)", COPIES),
        ("triton_poi_fused_mul_silu_3", ELEMENTWISE),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", OPTIMIZERS),
        ("mystery", OTHER),
    ],
)
def test_kernels_without_an_operator_have_classes_too(name: str, kind: str) -> None:
    assert class_of_kernel(name) == kind


def test_what_attention_optimizer_and_communication_are_made_of_is_theirs() -> None:
    assert class_of("aten::mm", ATTENTION) == ATTENTION
    assert class_of("aten::copy_", OPTIMIZERS) == OPTIMIZERS
    assert class_of("aten::mm", ELEMENTWISE) == PRODUCTS


def test_an_operators_seconds_are_its_own() -> None:
    profile = profile_of(
        [
            phase("update", 0, 10),
            event("micro-batch 0", 1, 9, is_span=True),
            event("aten::linear", 1, 5),  # 1 s of its own around 3 s of mm
            event("aten::mm", 2, 5, flops=6 * S),
            event("aten::silu", 5, 7),
            event(OPTIMIZER, 8, 9, is_span=True),
            event("aten::mul_", 8.25, 8.75),
            event("aten::copy_", 11, 12),
        ]
    )
    update = profile.phases["update"]
    assert update.seconds == 10 and update.busy == 4 + 2 + 0.5
    assert {kind: spent.seconds for kind, spent in update.classes.items()} == {
        PRODUCTS: 1 + 3,
        ELEMENTWISE: 2,
        OPTIMIZERS: 0.5,
    }
    assert update.classes[PRODUCTS].gflop_per_s == 2  # of mm alone: linear's own second has no known operations
    assert profile.phases[BETWEEN] == Phase(0.0, 1.0, {COPIES: Spent(1.0, 1)})
    assert list(profile.classes) == [PRODUCTS, COPIES, ELEMENTWISE, OPTIMIZERS]
    assert profile.operators[PRODUCTS, "aten::mm"] == Spent(3.0, 1, 6 * S, 3.0)


def test_an_operator_of_another_thread_is_in_the_phase_of_its_time() -> None:
    profile = profile_of(
        [
            phase("generate", 0, 4),
            phase("update", 5, 9),
            event("aten::mm", 1, 3, thread=7, flops=2 * S),
            event("aten::mm", 2, 3, thread=8, flops=2 * S),
            event("aten::mm", 6, 7, flops=2 * S),
        ]
    )
    generate = profile.phases["generate"]
    assert (generate.classes[PRODUCTS].seconds, generate.busy) == (3.0, 2.0)
    assert profile.phases["update"].classes[PRODUCTS].gflop_per_s == 2


def test_a_phase_inside_a_phase_is_part_of_it() -> None:
    profile = profile_of([phase("a", 0, 4), phase("b", 1, 2), event("aten::mm", 1, 2)])
    assert list(profile.phases) == ["a"]
    assert profile.phases["a"].seconds == 4


def test_with_a_device_its_kernels_count_and_not_the_host() -> None:
    profile = profile_of(
        [
            phase("update", 0, 5),
            event("aten::linear", 0, 1, id=1),
            event("aten::mm", 0, 1, id=2, flops=12 * S),
            event("aten::silu", 1, 2, id=3),
            event("_scaled_dot_product_attention", 2, 4, id=4),
            event("aten::copy_", 2, 3, id=5),
            event("nvjet", 0.5, 3, of=2),
            event("splitKreduce", 3, 3.5, of=2),
            event("vectorized_elementwise_kernel", 3.5, 4, of=3),
            event("unrolled_elementwise_kernel", 3.5, 4, of=5),  # a copy of attention, on another stream
            event("ncclDevKernel_AllGather", 4.5, 6, of=0),
        ]
    )
    update = profile.phases["update"]
    assert {kind: spent.seconds for kind, spent in update.classes.items()} == {
        PRODUCTS: 3.0,
        ELEMENTWISE: 0.5,
        ATTENTION: 0.5,
        COMMUNICATION: 1.5,
    }
    assert update.classes[PRODUCTS].gflop_per_s == 4
    assert update.busy == 3.5 + 1.5


def test_seconds_over_classes_are_those_of_the_outermost_operators() -> None:
    """Whatever the nesting, own times sum up to the time in which anything ran."""
    names = ["aten::mm", "aten::copy_", "aten::silu", "what", "c10d::send", "attention"]
    draw = random.Random(0)

    def nest(start: int, end: int, depth: int) -> list[Event]:
        if depth == 0 or end - start < 4:
            return []
        first, second = sorted(draw.sample(range(start, end + 1), 2))
        inside = Event(draw.choice(names), first, second, is_span=False)
        return [inside, *nest(first, second, depth - 1), *nest(second, end, depth - 1)]

    for _ in range(50):
        events = nest(0, 10_000, 5)
        draw.shuffle(events)
        profile = profile_of(events)
        whole = sum(spent.seconds for spent in profile.classes.values())
        assert whole == pytest.approx(sum(phase.busy for phase in profile.phases.values()))
        assert sum(spent.calls for spent in profile.classes.values()) == len(events)


def test_a_profile_travels_as_plain_data_and_ranks_are_averaged() -> None:
    one = profile_of([phase("update", 0, 4), event("aten::mm", 0, 3, flops=3 * S)])
    other = profile_of([phase("update", 0, 6), event("aten::mm", 0, 1, flops=3 * S), event("aten::copy_", 1, 2)])
    assert Profile.from_plain(json.loads(json.dumps(one.to_plain()))) == one
    mean = Profile.mean([one, other])
    assert mean.phases["update"].seconds == 5
    assert mean.classes == {PRODUCTS: Spent(2.0, 1.0, 3 * S, 2.0), COPIES: Spent(0.5, 0.5)}
    assert mean.classes[PRODUCTS].gflop_per_s == 1.5
    assert Profile.mean([]) == Profile()
    assert set(CLASSES) >= set(mean.classes)
