"""The host with a scripted engine: columns, seeds, lies, deadlines. Masks come from lengths, never from tokens."""

from __future__ import annotations

import asyncio
import importlib
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from hrl.config.rollout import RolloutConfig, WeightSyncConfig
from hrl.models.tokenizer import TokenIds
from hrl.pictures import Picture
from hrl.trainer.ppo.generation import count_troubles
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import (
    EngineDeadError,
    EngineUnusableError,
    RolloutEngine,
    RolloutError,
    SampleOutput,
    sample_seed,
)
from hrl.workers.rollout.host import ENGINES, RolloutHost, prompt_tokens, response_columns
from hrl.workers.rollout.scripted import ScriptedEngine
from hrl.workers.weight_sync import cuda_ipc
from hrl.workers.weight_sync.shared_memory import SharedMemorySender
from hrl.workers.weight_sync.wire import Manifest, WeightSyncError
from tests.models.tiny import SHAPE
from tests.workers.rollout.settings import engine_setup, prompt_batch, sample_request, sample_rows
from tests.workers.weight_sync.fake_devices import FakeDevices

CPU = torch.device("cpu")
VOCAB, STOP, PAD = 50, 7, 7
TOKENS = TokenIds(PAD, (STOP,), VOCAB)
R = 6
sample = partial(sample_rows, max_tokens=R)
SPECS = [(f"layers.{i}.weight", torch.bfloat16, (33, 17)) for i in range(5)]


@contextmanager
def scripted(script: dict[str, Any] | None = None, device: torch.device = CPU, **changes: Any) -> Iterator[RolloutHost]:
    kwargs = {"scripted": script or {}}
    setup = engine_setup("scripted", "no-model", TOKENS, 5 + R, device=device, engine_kwargs=kwargs, **changes)
    with RolloutHost(setup) as host:
        yield host


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator)) for name, _, shape in SPECS]


def test_samples_are_heard_of_one_after_the_other_and_not_on_the_engines_thread():
    """What is done with a sample, such as decoding its text, takes the engine no time: its loop runs meanwhile."""
    threads, heard, under_way = set(), [], []
    with scripted({"delay_s": 0.01}) as host:

        def on_sample(row: int, token_ids: list[int], finish_reason: str) -> None:
            under_way.append(row)
            threads.add(threading.current_thread().name)
            host._running().run(asyncio.sleep(0.01), timeout_s=10, what="a turn of the engine's loop")
            heard.append((row, token_ids, finish_reason))
            assert under_way == [row]
            under_way.clear()

        out = sample(host, prompt_batch([[1], [2]], n=4, width=4), on_sample)

    assert sorted(row for row, _, _ in heard) == list(range(8))
    for row, token_ids, finish_reason in heard:
        assert out.batch["responses"][row][: len(token_ids)].tolist() == token_ids
        assert out.non_tensor_batch["finish_reason"][row] == finish_reason
    assert len(threads) == 1 and "engine" not in threads.pop()


def test_what_hearing_of_a_sample_raises_ends_the_batch():
    def on_sample(row: int, token_ids: list[int], finish_reason: str) -> None:
        raise ValueError(f"row {row} cannot be decoded")

    with scripted() as host:
        with pytest.raises(ValueError, match=r"row \d cannot be decoded"):
            sample(host, prompt_batch([[1], [2]], n=2, width=4), on_sample)
        assert len(sample(host, prompt_batch([[1]], n=2, width=4))) == 2


def test_the_columns_of_two_known_responses():
    batch = prompt_batch([[1, 2, 3], [4]], n=1, width=4)
    with scripted({"responses": [[10, 11, STOP]]}) as host:
        out = sample(host, batch)

    assert out.batch["prompts"].tolist() == [[0, 1, 2, 3], [0, 0, 0, 4]]
    assert out.batch["responses"].tolist() == [[10, 11, STOP, PAD, PAD, PAD]] * 2
    assert out.batch["input_ids"][1].tolist() == [0, 0, 0, 4, 10, 11, STOP, PAD, PAD, PAD]
    assert out.batch["attention_mask"][0].tolist() == [0, 1, 1, 1, 1, 1, 1, 0, 0, 0]
    assert out.batch["position_ids"][0].tolist() == [0, 0, 1, 2, 3, 4, 5, 5, 5, 5]
    assert out.batch["response_mask"].tolist() == [[1, 1, 1, 0, 0, 0]] * 2  # the stop token counts although pad == eos
    expected = torch.tensor([[-math.log(VOCAB)] * 3 + [0.0] * 3] * 2)
    assert torch.equal(out.batch["rollout_log_probs"], expected)
    assert {key: value.dtype for key, value in out.batch.items()} == {
        **dict.fromkeys(("prompts", "responses", "input_ids", "attention_mask", "position_ids"), torch.int64),
        "response_mask": torch.int64,
        "rollout_log_probs": torch.float32,
    }
    assert out.non_tensor_batch["finish_reason"].tolist() == ["stop", "stop"]
    assert out.non_tensor_batch["uid"].tolist() == ["group-0", "group-1"]
    assert out.meta_info == {"temperature": 1.0, "policy_version": 0}


def test_a_response_without_a_stop_token_ends_at_the_limit_and_is_counted():
    with scripted({"responses": [[10] * 99]}) as host:
        out = sample(host, prompt_batch([[1]], n=3, width=2))

    assert out.batch["response_mask"].sum(1).tolist() == [R] * 3
    assert out.non_tensor_batch["finish_reason"].tolist() == ["length"] * 3
    assert count_troubles(out)["rollout/truncated_responses"].result() == 3


def test_an_empty_response_is_a_row_without_trained_tokens_and_counted():
    with scripted({"empty_every": 2}) as host:
        out = sample(host, prompt_batch([[1]], n=4, width=2))

    assert sorted(out.batch["response_mask"].sum(1).eq(0).tolist()) == [False, False, True, True]
    assert count_troubles(out)["rollout/empty_responses"].result() == 2


def test_samples_depend_on_what_they_are_and_not_on_where_they_are_drawn():
    batch = prompt_batch([[1], [2], [3]], n=4, width=2)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    with scripted() as host:
        whole = sample(host, batch).batch["responses"]
        with scripted({"delay_s": 0.01}) as other:
            shuffled = sample(other, batch[order]).batch["responses"]
            half = sample(other, batch[6:]).batch["responses"]
        next_step = sample(host, batch, step=2).batch["responses"]

    assert torch.equal(shuffled, whole[order]) and torch.equal(half, whole[6:])
    assert len({tuple(row) for row in whole.tolist()}) == 12
    assert not (next_step == whole).all(1).any()


def test_the_seed_is_stable_across_processes_and_distinct():
    assert sample_seed(1, 2, "a", 3) == sample_seed(1, 2, "a", 3) == 109891797
    seeds = {sample_seed(s, t, u, i) for s in range(3) for t in range(10) for u in ("a", "b") for i in range(8)}
    assert len(seeds) == 3 * 10 * 2 * 8


def test_rows_marked_greedy_take_the_most_likely_tokens_beside_sampled_ones():
    seen = []

    class Recorder(ScriptedEngine):
        async def _generate(self, prompt_ids, sampling, request_id, on_tokens, pictures):
            seen.append((prompt_ids, sampling.temperature))
            return await super()._generate(prompt_ids, sampling, request_id, on_tokens, pictures)

    batch = prompt_batch([[1], [2], [3]], n=1, width=2)
    batch.non_tensor_batch["greedy"] = np.array([False, True, False], dtype=object)
    with scripted() as host:
        host.engine.__class__ = Recorder
        out = sample(host, batch, with_greedy=True)
        sample(host, batch)
    assert sorted(seen[:3]) == [([1], 1.0), ([2], 0.0), ([3], 1.0)]
    assert {temperature for _, temperature in seen[3:]} == {1.0}, "the request decides, not the column"
    assert out.meta_info["temperature"] == 1.0


def test_every_sample_is_drawn_as_the_request_says_with_a_seed_of_its_own():
    seen = []

    class Recorder(ScriptedEngine):
        async def _generate(self, prompt_ids, sampling, request_id, on_tokens, pictures):
            seen.append(sampling)
            return await super()._generate(prompt_ids, sampling, request_id, on_tokens, pictures)

    with scripted() as host:
        host.engine.__class__ = Recorder
        out = sample(host, prompt_batch([[1]], n=2, width=2), temperature=0.6, top_p=0.9, top_k=20, step=3)
    seeds = [sample_seed(1, 3, "group-0", index) for index in range(2)]
    assert seen == [SamplingParams(0.6, 0.9, 20, R, seed) for seed in seeds]
    assert out.meta_info["temperature"] == 0.6


def test_an_engine_of_a_run_without_pictures_refuses_them():
    with scripted() as host, pytest.raises(RolloutError, match="request 0-7 shows 1 pictures, and .* run without"):
        asyncio.run(
            host.engine.generate([1], SamplingParams(1.0, 1.0, -1, R, 0), "0-7", pictures=[Picture(b"", "", 0, 1)])
        )


def test_every_sample_is_heard_of_before_the_batch_is_done():
    heard = {}
    with scripted({"delay_s": 0.01}) as host:
        out = sample(host, prompt_batch([[1], [2]], n=3, width=2), lambda row, ids, why: heard.update({row: ids}))

    lengths = out.batch["response_mask"].sum(1).tolist()
    assert heard == {row: out.batch["responses"][row, : lengths[row]].tolist() for row in range(6)}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"extra_tokens": R}, "at most 6 were asked for"),
        ({"missing_log_probs": 1}, "tokens with"),
        ({"log_prob": float("nan")}, "log-prob that is not a finite number"),
        ({"log_prob": 0.5}, "log-prob that is not a finite number"),
        ({"responses": [[VOCAB]]}, "outside the vocabulary of 50"),
        ({"responses": [[-1]]}, "outside the vocabulary of 50"),
        ({"stale_version": True}, "policy version -1, although version 0 is served"),
    ],
)
def test_a_lying_engine_is_found_out_and_the_sample_named(script, message):
    with scripted(script) as host, pytest.raises(RolloutError, match=message) as caught:
        sample(host, prompt_batch([[1]], n=1, width=2))

    assert "row 0 (uid group-0, sample 0)" in str(caught.value)


def test_what_was_begun_is_sampled_beside_what_is_asked_for_and_is_the_same_as_without():
    """A validation and the step after it: each has its own sampling."""
    greedy, drawn = prompt_batch([[1], [2]], n=1, width=3), prompt_batch([[3]], n=4, width=2)
    with scripted() as host:
        alone = sample(host, greedy, temperature=0.0), sample(host, drawn, step=2)
    heard: dict[str, list[int]] = {"greedy": [], "drawn": []}
    at_once = []

    class Recorder(ScriptedEngine):
        async def _generate(self, prompt_ids, sampling, request_id, on_tokens, pictures):
            at_once.append(self._in_flight)
            return await super()._generate(prompt_ids, sampling, request_id, on_tokens, pictures)

    with scripted({"delay_s": 0.2}) as host:
        host.engine.__class__ = Recorder
        for name, rows, request in (
            ("greedy", greedy, sample_request(max_tokens=R, temperature=0.0)),
            ("drawn", drawn, sample_request(max_tokens=R, step=2)),
        ):
            host.begin_sampling(rows, request, lambda row, ids, why, name=name: heard[name].append(row))
        beside = sample(host, greedy, temperature=0.0), sample(host, drawn, step=2)
    assert sorted(at_once) == [1, 2, 3, 4, 5, 6], "not one after the other, and none twice"
    for one, other in zip(alone, beside, strict=True):
        assert all(torch.equal(one.batch[name], column) for name, column in other.batch.items())
        assert one.meta_info == other.meta_info
    assert {name: sorted(rows) for name, rows in heard.items()} == {"greedy": [0, 1], "drawn": [0, 1, 2, 3]}


@pytest.mark.parametrize("other", [{"step": 2}, {"temperature": 0.5}])
def test_what_was_begun_and_is_not_asked_for_is_dropped(other):
    batch = prompt_batch([[1]], n=2, width=2)
    with scripted({"hang_after": 2}) as host:
        host.begin_sampling(batch, sample_request(max_tokens=R))
        host.begin_sampling(batch[:1], sample_request(max_tokens=R))  # hangs
        host.engine._script = replace(host.engine._script, hang_after=None)
        assert len(sample(host, batch, **other)) == 2
        assert host.push_weights(1, SPECS, weights(1)).version == 1, "no request is in flight"
        assert sample(host, batch).meta_info["policy_version"] == 1, "and none of the old weights is given out"


def test_what_fails_ahead_is_raised_when_it_is_asked_for():
    batch = prompt_batch([[1]], n=1, width=2)
    with scripted({"die_after": 1}) as host:
        host.begin_sampling(batch, sample_request(max_tokens=R))
        host.begin_sampling(batch, sample_request(max_tokens=R, step=2))
        assert len(sample(host, batch)) == 1
        with pytest.raises(EngineDeadError):
            sample(host, batch, step=2)


def test_a_hanging_engine_ends_at_the_deadline():
    started = time.monotonic()
    with scripted({"hang_after": 2}) as host:
        with pytest.raises(RolloutError, match=r"rollout: sampling 4 rows took longer than 0\.3 s"):
            sample(host, prompt_batch([[1]], n=4, width=2), timeout_s=0.3)
        assert host  # still there to be shut down

    assert time.monotonic() - started < 30


def test_a_dead_engine_says_so():
    with scripted({"die_after": 2}) as host:
        with pytest.raises(EngineDeadError):
            sample(host, prompt_batch([[1]], n=4, width=2))
        with pytest.raises(EngineDeadError):
            sample(host, prompt_batch([[1]], n=1, width=2))


def test_a_start_that_takes_too_long_is_an_error_and_leaves_no_thread():
    before = threading.active_count()
    with pytest.raises(RolloutError, match=r"did not start within 0\.2 s"):
        kwargs = {"scripted": {"start_s": 60}}
        RolloutHost(engine_setup("scripted", "no-model", TOKENS, 5 + R, engine_kwargs=kwargs)).start(timeout_s=0.2)

    assert threading.active_count() == before


def test_an_empty_prompt_is_refused():
    batch = prompt_batch([[1], [2]], n=1, width=2)
    with scripted() as host:
        batch.batch["attention_mask"][1] = 0
        with pytest.raises(RolloutError, match="row 1 has an empty prompt"):
            sample(host, batch)


def test_a_pushed_version_is_stamped_on_every_batch_after_it():
    with scripted() as host:
        for version in (1, 2):
            report = host.push_weights(version, SPECS, weights(version))
            out = sample(host, prompt_batch([[1]], n=2, width=2))
            assert report.version == out.meta_info["policy_version"] == host.policy_version == version
        assert torch.equal(host.engine.writer.weights["layers.3.weight"], weights(2)[3][1].bfloat16())


def test_after_a_failed_commit_the_engine_refuses_to_sample_until_a_good_sync():
    with scripted({"drop_tensor": "layers.1.weight"}) as host:
        with pytest.raises(WeightSyncError, match=r"layers\.1\.weight"):
            host.push_weights(1, SPECS, weights(1))
        with pytest.raises(EngineUnusableError, match="sync weights before sampling"):
            sample(host, prompt_batch([[1]], n=2, width=2))
        assert host.policy_version == 0

        host.engine.writer._script = type(host.engine.writer._script)()
        host.push_weights(2, SPECS, weights(2))

        assert sample(host, prompt_batch([[1]], n=2, width=2)).meta_info["policy_version"] == 2


def test_an_engine_whose_commit_failed_is_not_sampled_from_even_if_nobody_aborts_the_sync():
    async def commit(engine: ScriptedEngine) -> None:
        manifest = Manifest.build(SPECS, 1 << 20)
        sender = SharedMemorySender(manifest)
        await engine.weights_begin(manifest, sender.handle(), 1)
        with pytest.raises(WeightSyncError, match="0 of 1 buckets have arrived"):
            await engine.weights_commit()
        sender.close()

    with scripted() as host:
        host._running().run(commit(host.engine), timeout_s=10, what="a commit")
        with pytest.raises(EngineUnusableError, match="its last weight sync did not finish"):
            sample(host, prompt_batch([[1]], n=2, width=2))


@pytest.mark.parametrize("fault", ["sync_hang", "sync_die"])
def test_an_engine_that_hangs_or_dies_in_a_sync_ends_it_in_time(fault):
    started = time.monotonic()
    sync = WeightSyncConfig(bucket_mb=32, timeout_s=0.5)
    with scripted({fault: True}, weight_sync=sync) as host:
        with pytest.raises((WeightSyncError, EngineDeadError)):
            host.push_weights(1, SPECS, weights(1))
        assert host.policy_version == 0

    assert time.monotonic() - started < 30


def test_an_engine_on_a_gpu_is_sent_buckets_whose_buffers_are_gone_when_its_cache_wakes(monkeypatch):
    devices = FakeDevices(visible=[0], current=0)
    monkeypatch.setattr(cuda_ipc, "DEVICES", devices)
    held = []
    with scripted({"sleeps": True}, device=torch.device("cuda", 0)) as host:
        host.engine.own_process = True  # as vLLM, which alone is sent handles
        commit = host.engine.weights_commit

        async def weigh():
            held.append(devices.open_bytes)
            return await commit()

        host.engine.weights_commit = weigh
        for version in (1, 2):
            host.sleep()
            host.wake(("weights",))
            report = host.push_weights(version, SPECS, weights(version))
            held.append(devices.open_bytes)
            host.wake(("kv_cache",))

            assert report.receivers[0].read_back == len(SPECS)
            assert torch.equal(host.engine.writer.weights["layers.3.weight"], weights(version)[3][1].bfloat16())
            assert len(sample(host, prompt_batch([[1]], n=2, width=4))) == 2

    size = Manifest.build(SPECS, 32 << 20).largest_bucket_bytes
    assert held == [2 * size, 0] * 2 and set(devices.opened) == {"GPU-0"}


def test_weights_that_are_not_trained_and_so_not_sent_survive_the_engines_sleep():
    """A tower without gradients is not synced; at sleep level 2 the engine would drop it for good."""
    with scripted({"sleeps": True}) as host:
        host.engine.writer.weights["vision.weight"] = torch.ones(2)
        host.push_weights(1, SPECS, weights(1), kept=["vision.weight"])

        host.sleep()
        host.wake(("weights",))
        host.push_weights(2, SPECS, weights(2), kept=["vision.weight"])

        assert torch.equal(host.engine.writer.weights["vision.weight"], torch.ones(2))


def test_an_engine_that_has_dropped_what_is_not_sent_is_not_sampled_from():
    with scripted({"sleeps": True}) as host:
        host.sleep()
        host.wake(("weights",))
        with pytest.raises(WeightSyncError, match=r"dropped its weights, and 'vision\.weight' and 0 others"):
            host.push_weights(1, SPECS, weights(1), kept=["vision.weight"])
        host.wake(("kv_cache",))
        with pytest.raises(EngineUnusableError):
            sample(host, prompt_batch([[1]], n=2, width=2))


def test_an_engine_wakes_for_its_weights_before_it_wakes_to_sample():
    batch = prompt_batch([[1]], n=2, width=2)
    with scripted({"sleeps": True}) as host:
        host.push_weights(1, SPECS, weights(1))
        host.sleep()
        with pytest.raises(EngineUnusableError, match="wake 'weights' first"):
            host.push_weights(2, SPECS, weights(2))
        host.wake(("weights",))
        host.push_weights(2, SPECS, weights(2))
        with pytest.raises(EngineUnusableError, match="wake 'kv_cache' first"):
            sample(host, batch)
        host.wake(("kv_cache",))

        assert sample(host, batch).meta_info["policy_version"] == 2


@pytest.mark.parametrize("level", [1, 2])
def test_only_level_2_needs_a_sync_after_sleep_also_when_one_was_aborted_meanwhile(level):
    batch = prompt_batch([[1]], n=2, width=2)
    with scripted({"sleeps": True}) as host:  # which keeps its weights only where not all of them are sent
        host.push_weights(1, SPECS, weights(1), kept=["vision.weight"] if level == 1 else [])
        host.sleep()
        host.wake()
        with pytest.raises(WeightSyncError, match=r"end before 'layers\.4\.weight'"):
            host.push_weights(2, SPECS, weights(2)[:-1], kept=["vision.weight"] if level == 1 else [])

        if level == 1:
            assert sample(host, batch).meta_info["policy_version"] == 1
        else:
            assert host.engine.writer.weights == {}
            with pytest.raises(EngineUnusableError, match="sync weights before sampling"):
                sample(host, batch)
        host.push_weights(3, SPECS, weights(3), kept=["vision.weight"] if level == 1 else [])
        assert sample(host, batch).meta_info["policy_version"] == 3


def test_an_engine_that_keeps_its_cache_is_not_put_to_sleep():
    with scripted({"sleeps": True}, free_cache_engine=False) as host:
        host.sleep()
        assert len(sample(host, prompt_batch([[1]], n=2, width=2))) == 2


def test_every_engine_that_can_be_configured_is_there():
    assert set(ENGINES) == set(get_args(RolloutConfig.model_fields["name"].annotation))
    for module, kind in ENGINES.values():
        assert issubclass(getattr(importlib.import_module(module), kind), RolloutEngine)


def test_arguments_for_an_engine_that_has_none_are_refused():
    setup = engine_setup("hf", "no-model", TOKENS, 5 + R, engine_kwargs={"hf": {"compile": True}})
    with pytest.raises(RolloutError, match=r"engine_kwargs\.hf=.*: the transformers engine has no arguments"):
        RolloutHost(setup)


# ---------------------------------------------------------------------- columns: lengths are never read from tokens

NOTHING, END, OTHER_END, VOCABULARY, WIDTH = 0, 1, 2, 5, 6
RESPONSE = st.lists(st.integers(0, VOCABULARY - 1), max_size=WIDTH)
PROMPT = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4)


def columns_of(prompts: list[list[int]], responses: list[list[int]], pad: int, pad_prompts_by: int = 0):
    width = max(map(len, prompts)) + pad_prompts_by
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    outputs = [SampleOutput(r, [-float(t) - 0.5 for t in r], "stop", 0) for r in responses]
    return response_columns(ids, mask, outputs, WIDTH, pad)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(PROMPT, RESPONSE), min_size=1, max_size=5), st.sampled_from([NOTHING, END, VOCABULARY - 1]))
@example([([1], [])], END)  # an empty response
@example([([1, 1], [END]), ([3], [END, END, 4])], END)  # the stop token is the padding, and comes first
@example([([3], [OTHER_END, 4]), ([3], [4, END])], NOTHING)  # several stop tokens
@example([([3], [4] * WIDTH), ([3], [NOTHING] * WIDTH)], NOTHING)  # none at all, and nothing but padding tokens
def test_lengths_are_the_samplers_whatever_the_tokens_are(rows: list[tuple[list[int], list[int]]], pad: int) -> None:
    prompts, responses = [p for p, _ in rows], [r for _, r in rows]
    got = columns_of(prompts, responses, pad)
    assert got["response_mask"].sum(dim=1).tolist() == [len(r) for r in responses]
    assert torch.equal(got["attention_mask"][:, -WIDTH:], got["response_mask"])
    for row, response in enumerate(responses):
        assert got["responses"][row, : len(response)].tolist() == response
        assert got["rollout_log_probs"][row].tolist() == [-t - 0.5 for t in response] + [0.0] * (WIDTH - len(response))
    assert prompt_tokens(got["prompts"], got["attention_mask"][:, :-WIDTH]) == prompts
    same_lengths = columns_of([[3] * len(p) for p in prompts], [[4] * len(r) for r in responses], 2)
    for name in ("response_mask", "attention_mask", "position_ids"):
        assert torch.equal(got[name], same_lengths[name]), name


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(PROMPT, RESPONSE), min_size=1, max_size=4), st.integers(1, 5))
def test_position_ids_restart_with_each_row_and_know_of_no_padding(
    rows: list[tuple[list[int], list[int]]], more: int
) -> None:
    prompts, responses = [p for p, _ in rows], [r for _, r in rows]
    for padding in (0, more):
        got = columns_of(prompts, responses, NOTHING, padding)
        for row, (prompt, response) in enumerate(rows):
            real = got["attention_mask"][row].bool()
            assert got["position_ids"][row][real].tolist() == list(range(len(prompt) + len(response)))


@pytest.mark.parametrize("more", [1, 3, 7])
def test_padding_a_prompt_on_the_left_changes_no_logit(more: int) -> None:
    """A plain transformers forward over the padded columns; the packed models never see padding."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).double().eval()
    prompts, responses = [[7, 3, 9], [5]], [[4, 4], [1, 2, 3]]
    logits = []
    for padding in (0, more):
        got = columns_of(prompts, responses, NOTHING, padding)
        with torch.no_grad():
            out = model(got["input_ids"], attention_mask=got["attention_mask"], position_ids=got["position_ids"]).logits
        logits.append(out[got["attention_mask"].bool()])
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-6)  # its norms are float32


def test_an_empty_prompt_is_named() -> None:
    with pytest.raises(RolloutError, match="row 1 has an empty prompt"):
        prompt_tokens(torch.ones(2, 3), torch.tensor([[0, 1, 1], [0, 0, 0]]))
