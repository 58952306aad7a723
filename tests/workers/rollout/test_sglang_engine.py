"""SGLang's engine inside a run, with a stub in its place that has the calls of release 0.5.23; one process for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from hrl.config.rollout import ServerConfig
from hrl.models.tokenizer import TokenIds
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout import sglang_engine
from hrl.workers.rollout.base import DROP_WEIGHTS, KEEP_WEIGHTS, EngineDeadError, EngineUnusableError, RolloutError
from hrl.workers.rollout.host import RolloutHost, engine_of
from hrl.workers.weight_sync.wire import WeightSyncError
from tests.workers.rollout import models
from tests.workers.rollout.settings import engine_setup, prompt_batch, rollout_config, sample_rows

STUB = Path(__file__).with_name("sglang_stub")
STOP = 1


@pytest.fixture(scope="module")
def stubbed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STUB))
        patch.setenv("PYTHONPATH", str(STUB))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return models.save_tiny_llama(tmp_path_factory.mktemp("model"))


def made(folder: Path, path: Path | None = None) -> RolloutHost:
    setup = engine_setup("sglang", folder, TokenIds(0, (STOP,), models.VOCAB), 96, dtype="float32")
    return RolloutHost(replace(setup, model=replace(setup.model, path=str(path or folder))))


@pytest.fixture(scope="module")
def host(stubbed, folder) -> Iterator[RolloutHost]:
    with made(folder) as host:
        yield host


@pytest.fixture
def fault(folder) -> Iterator[Callable[[str], object]]:
    file = folder / "fault"
    yield file.write_text
    file.unlink(missing_ok=True)


def push(host: RolloutHost, model, version: int):
    return host.push_weights(version, models.specs(model, torch.float32), models.parameters(model))


def sample(host: RolloutHost, **changes):
    return sample_rows(host, prompt_batch([[5, 6, 7], [9, 8, 7, 6]], n=2, width=4), max_tokens=6, **changes)


def gap(model, out, temperature: float = 1.0) -> float:
    reference, mask = models.response_log_probs(model, out, temperature), out.batch["response_mask"].bool()
    return float((reference - out.batch["rollout_log_probs"])[mask].abs().max())


def test_which_engine_it_is_depends_on_addresses():
    assert engine_of(rollout_config("sglang"))[1] == "SglangEngine"
    served = rollout_config("sglang", server=ServerConfig(urls=["http://127.0.0.1:1"]))
    assert engine_of(served)[1] == "SglangServers"


def test_tokens_and_log_probs_are_those_of_the_weights_that_were_sent(host, folder):
    before = sample(host)
    assert before.meta_info["policy_version"] == 0 and gap(models.load(folder), before) < 1e-5
    for version in (1, 2):
        model = models.perturb(models.load(folder), 0.1 * version)
        report = push(host, model, version)
        (receiver,) = report.receivers
        assert (receiver.version, receiver.tensors, receiver.nbytes) == (version, report.tensors, report.nbytes)
        out = sample(host, temperature=1.7)
        assert gap(model, out, 1.7) < 1e-5 and out.meta_info["policy_version"] == version
        assert torch.equal(out.batch["responses"], sample(host, temperature=1.7).batch["responses"])
    push(host, model, 3)  # the same weights again, whose checksum stays
    greedy = sample(host, with_greedy=False, temperature=0.0)
    mask = greedy.batch["response_mask"].bool()
    assert torch.equal(models.response_logits(model, greedy).argmax(-1)[mask], greedy.batch["responses"][mask])


def test_a_sync_that_breaks_on_the_way_leaves_the_old_weights(host, folder):
    old, new = models.load(folder), models.perturb(models.load(folder), 0.2)
    push(host, old, 1)

    def breaks():
        yield from list(models.parameters(new))[:3]
        raise ValueError("the trainer failed")

    with pytest.raises(ValueError, match="the trainer failed"):
        host.push_weights(2, models.specs(new, torch.float32), breaks())
    assert host.policy_version == 1 and gap(old, sample(host)) < 1e-5


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("forgets", "SGLang's weights have the checksum of those before, although others were sent"),
        ("refuses", "update_weights_from_tensor for 'model.embed_tokens.weight' to .* failed: no parameter"),
        ("keeps its cache", "SGLang did not drop its cache"),
    ],
)
def test_an_engine_that_does_not_take_its_weights_is_found_and_the_next_sync_mends_it(host, folder, fault, what, said):
    old, new = models.load(folder), models.perturb(models.load(folder), 0.2)
    push(host, old, 1)
    fault(what)
    with pytest.raises(WeightSyncError, match=said):
        push(host, new, 2)
    with pytest.raises(EngineUnusableError, match="the weight sync to version 2 was aborted"):
        sample(host)
    fault("")
    push(host, new, 3)
    assert gap(new, sample(host)) < 1e-5


def test_memory_is_given_back_by_level_and_taken_again_only_where_it_was_given(host):
    engine = host.engine
    assert not engine.supports_sleep  # on a CPU; the calls are the same
    for level, tags in ((KEEP_WEIGHTS, ["kv_cache"]), (DROP_WEIGHTS, ["weights", "kv_cache"])):
        host._control(engine._sleep(level), "sleep", 20.0)
        assert engine._asleep == tags
        host._control(engine._wake(["weights"]), "wake", 20.0)  # which the stub refuses for what it has not given
        assert engine._asleep == ["kv_cache"]
        host._control(engine._wake(["kv_cache"]), "wake", 20.0)
        assert engine._asleep == []


def test_a_request_that_nobody_waits_for_is_withdrawn_alone(host, folder, fault):
    fault("hangs")
    futures = [host.generate([5, 6], SamplingParams(max_tokens=2), f"r{number}") for number in (1, 10)]
    time.sleep(0.5)
    futures[0].cancel()
    end = time.monotonic() + 10
    while not (folder / "withdrawn").is_file():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert (folder / "withdrawn").read_text() == "r1/\n" and not futures[1].done()
    futures[1].cancel()


def test_what_can_not_start_is_refused_and_leaves_nothing(stubbed, folder, monkeypatch, tmp_path):
    lost = made(folder, tmp_path / "nowhere")
    with pytest.raises(RolloutError, match="did not start: SGLang failed: ValueError: no model in .*nowhere"):
        lost.start()
    assert lost.engine._process is None
    monkeypatch.setattr(sglang_engine, "VERSION", "0.6")
    with pytest.raises(RolloutError, match=r"SGLang 0\.5\.23 is installed, and .* is written for 0\.6"):
        made(folder).start()
    with pytest.raises(RolloutError, match="needs SGLang, which is not installed: pip install sglang=="):
        sglang_engine.require_supported(None)


def test_an_engine_that_ends_is_told_and_leaves_nothing(host, folder, fault):
    """The last test: it ends the engine."""
    scheduler = int((folder / "scheduler").read_text())
    assert psutil.pid_exists(scheduler)
    fault("dies")
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"the SGLang engine \(pid [0-9]+\)"):
            sample(host)
    host.shutdown()
    end = time.monotonic() + 20
    while psutil.pid_exists(scheduler) and psutil.Process(scheduler).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.1)
