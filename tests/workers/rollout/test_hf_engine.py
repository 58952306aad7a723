"""The transformers engine on a tiny model: exact log-probs, exact seeds, truncation, weights."""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.models.tokenizer import TokenIds
from hrl.routing import ROUTED_EXPERTS
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout import hf_engine
from hrl.workers.rollout.base import OnTokens, RolloutError
from hrl.workers.rollout.hf_engine import HfEngine, draw, truncate
from hrl.workers.rollout.host import RolloutHost
from tests.workers.rollout import models
from tests.workers.rollout.settings import engine_setup, prompt_batch, sample_rows, score

PROMPTS = [[5, 6, 7, 8], [9], [10, 11]]
R = 12
sample = partial(sample_rows, max_tokens=R)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def host(folder) -> Iterator[RolloutHost]:
    tokens = TokenIds(0, (1,), models.VOCAB)
    with RolloutHost(engine_setup("hf", folder, tokens, 4 + R, dtype="float32", max_num_seqs=7)) as host:
        yield host


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_log_probs_are_those_of_a_forward_at_the_sampling_temperature(host, folder, temperature):
    out = sample(host, prompt_batch(PROMPTS, n=4, width=4), temperature=temperature)

    expected = models.response_log_probs(models.load(folder), out, temperature)
    mask = out.batch["response_mask"].bool()
    torch.testing.assert_close(out.batch["rollout_log_probs"][mask], expected[mask], atol=1e-4, rtol=0)
    assert (out.batch["rollout_log_probs"][~mask] == 0).all()
    ends = [row[: int(length)].tolist() for row, length in zip(out.batch["responses"], mask.sum(1), strict=True)]
    for tokens, reason in zip(ends, out.non_tensor_batch["finish_reason"], strict=True):
        assert 1 not in tokens[:-1]
        assert reason == ("stop" if tokens[-1] == 1 else "length") and (reason == "stop" or len(tokens) == R)


def test_greedy_takes_the_most_likely_token_and_reports_its_raw_log_prob(host, folder):
    out = sample(host, prompt_batch(PROMPTS, n=1, width=4), temperature=0.0)

    model, width = models.load(folder), 4
    with torch.no_grad():
        logits = model(
            input_ids=out.batch["input_ids"],
            attention_mask=out.batch["attention_mask"],
            position_ids=out.batch["position_ids"],
        ).logits[:, width - 1 : -1]
    mask = out.batch["response_mask"].bool()
    assert torch.equal(logits.argmax(-1)[mask], out.batch["responses"][mask])
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(out.batch["rollout_log_probs"][mask], expected[mask], atol=1e-4, rtol=0)


def test_samples_do_not_depend_on_their_order_or_company(host):
    batch = prompt_batch(PROMPTS, n=4, width=4)
    whole = sample(host, batch).batch["responses"]
    order = torch.arange(11, -1, -1)

    assert torch.equal(sample(host, batch[order]).batch["responses"], whole[order])
    assert torch.equal(sample(host, batch[4:6]).batch["responses"], whole[4:6])
    assert len({tuple(row) for row in whole.tolist()}) == 12


def test_score_is_the_log_prob_at_temperature_one(host, folder):
    tokens = [5, 9, 100, 3, 3, 77]

    expected = models.token_log_probs(models.load(folder), tokens)

    torch.testing.assert_close(torch.tensor(score(host, tokens)), expected, atol=1e-4, rtol=0)


def test_pushed_weights_are_the_ones_sampled_from(host, folder):
    tokens = [5, 9, 100, 3, 3, 77]
    changed = models.perturb(models.load(folder), 0.5)
    expected = models.token_log_probs(changed, tokens)
    before = torch.tensor(score(host, tokens))

    report = host.push_weights(1, models.specs(changed, torch.float32), models.parameters(changed))

    assert (before - expected).abs().mean() > 0.1
    torch.testing.assert_close(torch.tensor(score(host, tokens)), expected, atol=1e-4, rtol=0)
    assert report.receivers[0].read_back == report.tensors == len(models.specs(changed, torch.float32))
    original = models.load(folder)
    host.push_weights(2, models.specs(original, torch.float32), models.parameters(original))
    torch.testing.assert_close(torch.tensor(score(host, tokens)), before, atol=1e-5, rtol=0)


def test_drawn_tokens_follow_the_distribution():
    logits = torch.tensor([0.0, math.log(2.0), math.log(5.0)])
    generator = torch.Generator().manual_seed(0)

    drawn = [draw(logits, SamplingParams(temperature=1.0), generator) for _ in range(4000)]

    for token, probability in enumerate((1 / 8, 2 / 8, 5 / 8)):
        share = sum(t == token for t, _ in drawn) / len(drawn)
        assert abs(share - probability) < 4 * math.sqrt(probability * (1 - probability) / len(drawn))
    assert all(math.isclose(lp, math.log((1, 2, 5)[t] / 8), abs_tol=1e-5) for t, lp in drawn)


def test_truncation_by_hand():
    log_probs = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()

    for top_k, top_p, expected in [
        (-1, 1.0, [0.5, 0.3, 0.15, 0.05]),
        (2, 1.0, [0.625, 0.375, 0.0, 0.0]),
        (-1, 0.45, [1.0, 0.0, 0.0, 0.0]),
        (-1, 0.6, [0.625, 0.375, 0.0, 0.0]),
        (3, 0.85, [10 / 19, 6 / 19, 3 / 19, 0.0]),
    ]:
        torch.testing.assert_close(truncate(log_probs, top_k, top_p).exp(), torch.tensor(expected), atol=1e-6, rtol=0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), top_k=st.integers(-1, 20), top_p=st.floats(0.01, 1.0))
def test_truncation_keeps_the_most_likely_tokens_and_their_proportions(seed, top_k, top_p):
    log_probs = torch.randn(16, generator=torch.Generator().manual_seed(seed)).mul(3).log_softmax(-1)

    cut = truncate(log_probs, top_k, top_p)

    kept = cut.isfinite()
    assert kept[log_probs.argmax()] and math.isclose(float(cut.exp().sum()), 1.0, abs_tol=1e-5)
    assert not (~kept).any() or log_probs[kept].min() >= log_probs[~kept].max()
    assert top_k <= 0 or int(kept.sum()) <= max(top_k, 1)
    shift = (cut - log_probs)[kept]
    torch.testing.assert_close(shift, shift[:1].expand_as(shift), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("error", "seen"),
    [(RuntimeError("no such kernel"), RolloutError), (IndexError("index 9 is out of range"), IndexError)],
)
def test_whatever_ends_the_sampling_reaches_the_requests_at_once(host, error, seen, monkeypatch):
    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(host.engine, "_sample", fail)
        with pytest.raises(seen, match=str(error)):
            sample(host, prompt_batch(PROMPTS, n=4, width=4))
    assert len(sample(host, prompt_batch(PROMPTS, n=1, width=4))) == 3


def ask_together(host: RolloutHost, lengths: list[int], told: list[list[int]] | None = None) -> list[Future]:
    """Requests that are sampled in one wave, of so many tokens at most."""

    async def ask() -> list[Future]:  # on the engine's loop, so that they come together
        return [
            host.generate([5, 6, number], SamplingParams(max_tokens=most, seed=number), str(number), tell(number))
            for number, most in enumerate(lengths)
        ]

    def tell(number: int) -> OnTokens | None:
        return None if told is None else lambda ids, _: told[number].extend(ids)

    return host._running().run(ask(), timeout_s=60, what="asking")


def only_fits(model: torch.nn.Module, rows: int) -> Callable[..., object]:
    """The model's forward on a machine whose memory is too small for more rows than these."""

    def forward(input_ids: torch.Tensor, **inputs: object) -> object:
        if len(input_ids) > rows:
            torch.empty(1 << 60)
        return type(model).forward(model, input_ids=input_ids, **inputs)

    return forward


def test_what_does_not_fit_into_memory_together_goes_on_in_halves_from_where_it_is(host, monkeypatch):
    lengths = [12, 3, 9, 0, 12, 12, 12]
    expected = [one.result(60) for one in ask_together(host, lengths)]
    assert host.take_counts() == {}
    model, sizes, told = host.engine._model, list[int](), [list[int]() for _ in lengths]
    forward, caches = model.forward, list[weakref.ref]()

    def shrinking(input_ids: torch.Tensor, **inputs: object) -> object:
        sizes.append(len(input_ids))
        if inputs.get("past_key_values") is None:
            assert not any(cache() for cache in caches), "a wave that did not fit is gone before the next one begins"
        else:
            caches.append(weakref.ref(inputs["past_key_values"]))
        return (forward if len(sizes) < 6 else only_fits(model, 1))(input_ids=input_ids, **inputs)

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", shrinking)
        found = [one.result(60) for one in ask_together(host, lengths, told)]
    assert [one.token_ids for one in found] == [one.token_ids for one in expected] == told
    for one, other in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4) and one.finish_reason == other.finish_reason
    splits = sum(size > 1 for size in sizes[5:])
    assert splits > 1 and sizes[-1] == 1
    assert host.take_counts() == {"rollout/split_waves": splits} and host.take_counts() == {}


def test_a_request_that_does_not_fit_into_memory_alone_fails_alone(host, monkeypatch):
    model = host.engine._model
    small = only_fits(model, 1)

    def forward(input_ids: torch.Tensor, **inputs: object) -> object:
        if len(input_ids) == 1 and input_ids[0, -1] == 2:
            torch.empty(1 << 60)
        return small(input_ids=input_ids, **inputs)

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", forward)
        first, second, third = ask_together(host, [4, 4, 4])
        assert first.result(60).token_ids and second.result(60).token_ids
        with pytest.raises(RolloutError, match="could not sample: RuntimeError: .*DefaultCPUAllocator"):
            third.result(60)
    host.take_counts()


def test_a_response_that_is_whole_waits_for_no_longer_one_beside_it(host, monkeypatch):
    goes_on = threading.Event()

    def hold(logits, sampling, generator):
        assert sampling.max_tokens == 2 or goes_on.wait(60)
        return draw(logits, sampling, generator)

    with monkeypatch.context() as patch:
        patch.setattr(hf_engine, "draw", hold)
        short, long = ask_together(host, [0, 12])
        short.result(60)
        assert not long.done()
        goes_on.set()
        long.result(60)


def test_what_is_cancelled_is_not_sampled_any_further(folder, monkeypatch):
    drawn = []

    async def play() -> None:
        loop = asyncio.get_running_loop()
        engine = HfEngine(
            engine_setup("hf", folder, TokenIds(0, (), models.VOCAB), 64, dtype="float32", max_num_seqs=1)
        )
        await engine.start()
        gone, waiting, kept = (
            asyncio.create_task(engine.generate([5, 6], SamplingParams(max_tokens=n), str(n))) for n in (50, 40, 2)
        )
        cancelled = threading.Event()

        def cancel() -> None:
            gone.cancel()
            waiting.cancel()
            cancelled.set()

        def draw_and_cancel(logits, sampling, generator):
            drawn.append(sampling.max_tokens)
            if len(drawn) == 3:
                loop.call_soon_threadsafe(cancel)
                assert cancelled.wait(30)
            return draw(logits, sampling, generator)

        monkeypatch.setattr(hf_engine, "draw", draw_and_cancel)
        assert len((await asyncio.wait_for(kept, 30)).token_ids) == 2
        await engine.shutdown()

    asyncio.run(play())
    assert drawn == [50, 50, 50, 2, 2]


def test_the_experts_of_each_token_are_returned_also_of_what_a_later_wave_computes_again(tmp_path, monkeypatch):
    folder = models.save_tiny_mixture(tmp_path)
    setup = engine_setup(
        "hf", folder, TokenIds(0, (1,), models.VOCAB), 4 + R, dtype="float32", enable_rollout_routing_replay=True
    )
    model = models.load(folder)
    with RolloutHost(setup) as host:
        whole = sample(host, prompt_batch(PROMPTS, n=2, width=4))
        with monkeypatch.context() as patch:
            patch.setattr(host.engine._model, "forward", only_fits(host.engine._model, 4))
            split = sample(host, prompt_batch(PROMPTS, n=2, width=4))
        assert host.take_counts()
    for out in (whole, split):
        found = out.non_tensor_batch[ROUTED_EXPERTS]
        for row, theirs in zip(found, models.routed_experts(model, out), strict=True):
            assert row.dtype == np.uint8 and np.array_equal(np.sort(row, -1), np.sort(theirs, -1))
