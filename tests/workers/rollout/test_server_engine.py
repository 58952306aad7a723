"""Engines that somebody else started, against servers that answer as vLLM's does, or as none should."""

from __future__ import annotations

import asyncio
import json
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from hrl.config.rollout import ServerConfig, WeightSyncConfig
from hrl.models.tokenizer import TokenIds
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout import server_engine, server_http, sglang_server, vllm_server
from hrl.workers.rollout.base import EngineDeadError, EngineUnusableError, RolloutError
from hrl.workers.rollout.host import LoopThread, RolloutHost
from hrl.workers.rollout.server_http import MOST_TRIES, Patience, ServerRefusesError
from hrl.workers.weight_sync.wire import WeightSyncError
from tests.workers.rollout import models
from tests.workers.rollout.settings import engine_setup, prompt_batch, sample_rows

STOP, VOCAB = 1, models.VOCAB
Handler = Callable[[web.Request], Any]


@dataclass
class Stub:
    """A server that speaks vLLM's protocol. `instead` has what it does with a path in place of the right thing."""

    instead: dict[str, Handler] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)  # of what `hrl_look` says
    state: dict[str, Any] = field(default_factory=lambda: {"mark": None, "version": None})
    calls: Counter = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    delay_s: float = 0.0
    cancelled: int = 0
    most_at_once: int = 0
    now: int = 0
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.calls[path] += 1
        self.headers.append(dict(request.headers))
        if path in self.instead:
            return await self.instead[path](request)
        if path == "/health":
            return web.Response()
        if path == "/v1/models":
            return web.json_response({"data": [{"id": "policy"}]})
        body = await request.json() if request.can_read_body else {}
        if path == "/collective_rpc":
            return web.json_response({"results": [self.rpc(body["method"], *body["args"])]})
        if path == "/reset_prefix_cache":
            return web.json_response({"success": True})
        if path == "/v1/completions":
            return web.json_response(await self.complete(body))
        return web.json_response({"detail": "Not Found"}, status=404)

    def rpc(self, method: str, *args: Any) -> dict[str, Any]:
        self.calls[method] += 1
        match method:
            case "hrl_look":
                sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
                looks = {"model": "m", "config": sizes, "dtype": "float32", "max_model_len": 96}
                return looks | {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"} | self.changed
            case "hrl_join_run":
                self.state = {"mark": args[0], "version": None}
            case "hrl_weights_begin":
                self.manifest, self.version = json.loads(args[0]["manifest"]), args[2]
            case "hrl_weights_commit":
                self.state["version"] = self.version
                shapes = [(shape, 4) for _, _, shape in self.manifest["tensors"]]
                nbytes = sum(int(torch.Size(shape).numel()) * size for shape, size in shapes)
                report = {"version": self.version, "tensors": len(shapes), "nbytes": nbytes, "read_back": 1}
                return {"receiver": "stub"} | report
            case "hrl_weights_abort":
                return {"intact": True, "version": self.state["version"]}
        return self.state

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        self.now += 1
        self.most_at_once = max(self.most_at_once, self.now)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.now -= 1
        ids = [7 + (body.get("seed") or 0) % 50, STOP][: body["max_tokens"]]
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, "finish_reason": "stop"}
        return {"choices": [choice | {"prompt_token_ids": body["prompt"]}]}


@contextmanager
def running(*stubs: Stub) -> Iterator[Callable[[Stub], None]]:
    """Serve stubs, each on a port of its own; yields what ends one of them."""
    thread, runners = LoopThread("stubs"), dict[int, web.AppRunner]()

    async def start(stub: Stub) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", stub.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        runners[id(stub)] = runner

    try:
        for stub in stubs:
            thread.run(start(stub), timeout_s=10, what="start")
        yield lambda stub: thread.run(runners.pop(id(stub)).cleanup(), timeout_s=10, what="end")
    finally:
        for runner in runners.values():
            thread.run(runner.cleanup(), timeout_s=10, what="cleanup")
        thread.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return models.save_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder):
    return models.load(folder)


@pytest.fixture
def hosts() -> Iterator[list[RolloutHost]]:
    opened: list[RolloutHost] = []
    yield opened
    for host in opened:
        host.shutdown()


@pytest.fixture
def make(folder, hosts) -> Callable[..., RolloutHost]:
    def make(*stubs: Stub, name: str = "server", rank: int = 0, **changes: Any) -> RolloutHost:
        settings = {"timeout_s": 20.0} | changes.pop("server", {})
        server = ServerConfig(urls=[stub.url for stub in stubs], **settings)
        setup = engine_setup(name, folder, TokenIds(0, (STOP,), VOCAB), 96, dtype="float32", server=server, **changes)
        hosts.append(RolloutHost(replace(setup, rank=rank)))
        return hosts[-1]

    return make


@pytest.fixture(autouse=True)
def hurry(monkeypatch) -> None:
    """What takes seconds in a run takes tenths of one here."""
    monkeypatch.setattr(server_http, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(server_engine, "HEALTH_INTERVAL_S", 0.1)
    monkeypatch.setattr(server_engine, "COMEBACK_S", 1.0)


def push(host: RolloutHost, model: Any, version: int = 1):
    return host.push_weights(version, models.specs(model, torch.float32), models.parameters(model))


def sample(host: RolloutHost, rows: int = 1, **changes: Any):
    return sample_rows(host, prompt_batch([[5, 6, 7]], n=rows, width=4), max_tokens=4, **changes)


async def html(_: web.Request) -> web.Response:
    return web.Response(text="<html>\x1b[31mWelcome</html>", content_type="text/html")


async def unauthorised(_: web.Request) -> web.Response:
    return web.json_response({"error": "Unauthorized"}, status=401)


async def elsewhere(_: web.Request) -> web.Response:
    raise web.HTTPTemporaryRedirect("http://198.51.100.7/v1/completions")


async def endless(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    with suppress(ConnectionError):
        for _ in range(1 << 12):
            await answer.write(b" " * 65_536)
    return answer


async def half(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Length": "1000"})
    await answer.prepare(request)
    await answer.write(b'{"choices": [')
    request.transport.close()
    return answer


async def dribble(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    with suppress(ConnectionError):
        for _ in range(1000):
            await answer.write(b" ")
            await asyncio.sleep(0.05)
    return answer


def choice(**changes: Any) -> Handler:
    right = {
        "token_ids": [9],
        "logprobs": {"token_logprobs": [-1.0]},
        "finish_reason": "length",
        "prompt_token_ids": [5, 6, 7],
    }

    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"choices": [right | changes]})

    return handler


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (html, "is no JSON object: '<html> \\[31mWelcome</html>'"),
        (unauthorised, "answered 401: .*rollout.server.api_key=env:NAME"),
        (elsewhere, r"redirects \(status 307\) to 'http://198.51.100.7/v1/completions', which is not followed"),
        (endless, "sent more than the [0-9]+ bytes"),
        (choice(token_ids=None), "without token ids"),
        (choice(token_ids=["a"]), "without token ids"),
        (choice(logprobs=None), "without a log-prob of each token"),
        (choice(logprobs={"token_logprobs": [None]}), "without a log-prob of each token"),
        (choice(logprobs={"token_logprobs": [-1.0, -1.0]}), "without a log-prob of each token"),
        (choice(logprobs={"token_logprobs": [float("nan")]}), "a log-prob that is not a finite number"),
        (choice(token_ids=[VOCAB]), f"token {VOCAB}, and the model's vocabulary has {VOCAB}: it serves another model"),
        (choice(prompt_token_ids=[1, 5, 6, 7]), "to another prompt than it was sent"),
        (choice(finish_reason="content_filter"), "without a reason for its end that is known"),
    ],
)
def test_an_answer_that_is_none_is_one_error_with_the_address(make, model, handler, said):
    stub = Stub()
    with running(stub):
        host = make(stub)
        host.start()
        push(host, model)
        stub.instead["/v1/completions"] = handler
        with pytest.raises(RolloutError, match=f"{stub.url}/v1/completions .*{said}|{stub.url} .*{said}"):
            sample(host)


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (half, "ended its answer half-way"),
        (dribble, r"did not answer to the end within 0.5 s; .* the deadline \(rollout.server.timeout_s\) too short"),
    ],
)
def test_a_server_that_does_not_finish_its_answer_is_left_alone(make, model, handler, said):
    good, bad = Stub(), Stub()
    with running(good, bad):
        host = make(good, bad, server={"timeout_s": 0.5 if handler is dribble else 20.0})
        host.start()
        push(host, model)
        bad.instead["/v1/completions"] = good.instead["/v1/completions"] = handler
        with pytest.raises(EngineDeadError, match=f"no server .* is left .*{good.url}.*{said}.*{bad.url}.*{said}"):
            sample(host)


@pytest.mark.parametrize(
    ("path", "handler", "said"),
    [
        ("/v1/models", unauthorised, "answered 401"),
        ("/v1/models", html, "no JSON object"),
        ("/collective_rpc", None, "takes no weights .*VLLM_SERVER_DEV_MODE=1 vllm serve"),
        ("/v1/completions", choice(prompt_token_ids=[STOP], logprobs=None), "without a log-prob"),
        ("/health", elsewhere, "not followed"),
    ],
)
def test_a_server_that_can_not_be_used_is_refused_at_the_start(make, path, handler, said):
    async def absent(_: web.Request) -> web.Response:
        return web.json_response({"detail": "Not Found"}, status=404)

    stub = Stub(instead={path: handler or absent})
    with running(stub), pytest.raises(ServerRefusesError, match=f"(?s){stub.url}.*{said}"):
        make(stub).start()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"config": {"vocab_size": 32000}}, "vocab_size=32000, and .* has 128"),
        ({"config": {"hidden_act": "gelu"}}, "hidden_act=gelu, and .* has silu"),
        ({"dtype": "bfloat16"}, "its weights are bfloat16, and those that it gets float32"),
        ({"max_model_len": 64}, "its longest sequence is 64, and the run's 96"),
        ({"logprobs_mode": "raw_logprobs"}, "not those of the distribution that it samples.*--logprobs-mode"),
        ({"generation_config": "auto"}, "settings of sampling from the model's folder.*--generation-config vllm"),
        ({"cuts_seeded_prompts": True}, "--no-enable-chunked-prefill"),
        ({"data_parallel_size": 2}, "several engines behind one address"),
    ],
)
def test_a_server_of_another_model_or_other_settings_is_refused_at_the_start(make, changed, said):
    stub = Stub(changed=changed)
    with running(stub), pytest.raises(ServerRefusesError, match=f"(?s){stub.url} does not fit this run: .*{said}"):
        make(stub).start()


def test_where_nobody_listens_the_error_names_every_address(make):
    stubs = Stub(url="http://127.0.0.1:9"), Stub(url="http://no-such-host.invalid:8000")
    with pytest.raises(EngineDeadError, match="http://127.0.0.1:9.*can't be reached.*no-such-host.invalid"):
        make(*stubs).start()


def test_nothing_is_sampled_before_weights_were_sent(make):
    stub = Stub()
    with running(stub):
        host = make(stub)
        host.start()
        with pytest.raises(EngineUnusableError, match="no weights have been sent"):
            sample(host)


def test_a_request_says_all_that_the_server_would_fill_in_by_itself(make, model, monkeypatch):
    monkeypatch.setenv("KEY_OF_SERVERS", "sesame")
    stub = Stub()
    with running(stub):
        stub.url += "/v1"
        host = make(stub, server={"api_key": "env:KEY_OF_SERVERS"})
        host.start()
        push(host, model)
        stub.bodies.clear()
        sample(host, temperature=0.7, top_p=0.9, top_k=5)
        (drawn,) = stub.bodies
        sample(host, with_greedy=False, temperature=0.0, top_p=0.9, top_k=5)
        greedy = stub.bodies[-1]
    assert {header["Authorization"] for header in stub.headers} == {"Bearer sesame"}
    assert drawn["prompt"] == [5, 6, 7] and drawn["stop_token_ids"] == [STOP] and drawn["ignore_eos"] is True
    assert (drawn["temperature"], drawn["top_p"], drawn["top_k"], drawn["max_tokens"]) == (0.7, 0.9, 5, 4)
    assert (drawn["min_p"], drawn["repetition_penalty"], drawn["presence_penalty"], drawn["frequency_penalty"]) == (
        0.0,
        1.0,
        0.0,
        0.0,
    )
    assert isinstance(drawn["seed"], int)
    assert (greedy["seed"], greedy["top_p"], greedy["top_k"]) == (None, 1.0, -1)


def test_a_server_that_dies_hands_its_requests_to_the_others_with_their_seeds(make, model):
    first, second = Stub(delay_s=0.3), Stub(delay_s=0.3)
    with running(first, second) as end:
        host = make(first, second)
        host.start()
        push(host, model)
        whole = sample(host, 16)
        assert first.bodies and second.bodies  # one of the two is ahead only so far
        thread = threading.Timer(0.1, lambda: end(first))
        thread.start()
        again = sample(host, 16)
        thread.join()
        assert torch.equal(whole.batch["responses"], again.batch["responses"])
        assert host.take_counts()["rollout/failovers"] >= 1
        second.instead["/v1/completions"] = half
        with pytest.raises(EngineDeadError, match=f"{first.url}.*{second.url}"):
            sample(host)


def test_a_server_that_was_started_anew_does_not_pass_for_one_with_this_runs_weights(make, model):
    first, second = Stub(), Stub()
    with running(first, second):
        host = make(first, second)
        host.start()
        push(host, model, 1)
        sample(host, 16)
        second.state = {"mark": None, "version": None}  # it has its folder's weights again
        sample(host, 16)
        (fallen,) = [server for server in host.engine.servers if server.why_down]
        assert fallen.url == second.url and "was it started anew" in fallen.why_down
        push(host, model, 2)  # which brings it back
        assert second.state == first.state and second.state["version"] == 2
        assert [server.why_down for server in host.engine.servers] == [None, None]


def test_a_server_that_changes_its_weights_while_it_samples_is_found(make, model):
    stub = Stub(delay_s=0.2)
    with running(stub):
        host = make(stub)
        host.start()
        push(host, model, 3)
        sample(host)
        later = threading.Timer(0.1, lambda: stub.state.update(version=2))
        later.start()
        with pytest.raises(EngineDeadError, match="holds the weights of version 2, and this run samples version 3"):
            sample(host)


def test_ranks_share_servers_and_the_first_one_gives_them_the_weights(make, model):
    stub = Stub()
    with running(stub):
        first, other = make(stub), make(stub, rank=1)
        first.start()
        other.start()
        assert push(first, model, 1).version == 1
        assert push(other, model, 1) is None and other.policy_version == 1
        sample(other)
        assert stub.calls["hrl_weights_commit"] == 1
        stub.state["version"] = 0
        with pytest.raises(EngineDeadError, match="version 0, and this run samples version 1"):
            sample(other)


def test_a_server_of_another_run_is_told_from_the_own_ones_by_every_rank(make, model):
    """It has the version that is asked for, and the rank that sends did not reach it."""
    strange = Stub()
    strange.state = {"mark": "another run", "version": 1}
    with running(strange):
        other = make(strange, rank=1)
        other.start()
        push(other, model, 1)
        with pytest.raises(EngineDeadError, match="does not hold weights that this run has sent"):
            sample(other)


def test_the_prefix_cache_is_dropped_after_each_sync_or_the_sync_fails(make, model):
    async def busy(_: web.Request) -> web.Response:
        return web.json_response({"success": False})

    stub = Stub()
    with running(stub):
        host = make(stub, weight_sync=WeightSyncConfig(bucket_mb=1, timeout_s=4.0))
        host.start()
        push(host, model, 1)
        push(host, model, 2)
        assert stub.calls["/reset_prefix_cache"] == 2
        stub.instead["/reset_prefix_cache"] = busy
        with pytest.raises(WeightSyncError, match=f"{stub.url} did not drop its prefix cache"):
            push(host, model, 3)
        with pytest.raises(RolloutError):  # whose weights are new, and whose cache is old
            sample(host)


@pytest.mark.parametrize("method", ["hrl_weights_load", "hrl_weights_commit"])
def test_a_server_that_is_late_in_a_sync_is_told_with_the_syncs_own_deadline(make, model, method):
    good, late = Stub(), Stub()
    with running(good, late):
        host = make(good, late, weight_sync=WeightSyncConfig(bucket_mb=1, timeout_s=4.0))
        host.start()
        late.instead["/collective_rpc"] = asked(late, method, dribble)
        push(host, model)
        why = fallen(host)
        assert why[good.url] is None and "within 1 s; is the server overloaded, or 0.25 of" in why[late.url]
        assert "rollout.weight_sync.timeout_s" in why[late.url] and "server.timeout_s" not in why[late.url]


def test_a_cancelled_batch_is_withdrawn_and_requests_at_once_are_bounded(make, model):
    stub = Stub()
    with running(stub):
        host = make(stub, max_num_seqs=4)
        host.start()
        push(host, model)
        stub.delay_s = 30.0
        futures = [host.generate([5, 6], SamplingParams(max_tokens=2), f"r{n}") for n in range(8)]
        deadline = time.monotonic() + 5
        while stub.now < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for future in futures:
            future.cancel()
        while stub.now:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        # One that waits may begin when another is withdrawn, before it is withdrawn itself.
        assert stub.cancelled >= 4 and stub.most_at_once == 4


# ---------------------------------------------------------------------------------- servers that falter


def broken(status: int = 500) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=status, text="EngineDeadError")

    return handler


def asked(stub: Stub, method: str, *first: Handler) -> Handler:
    """Answers the first questions of a method in place of the stub, and leaves it all others."""
    left = list(first)

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["method"] == method and left:
            return await left.pop(0)(request)
        return web.json_response({"results": [stub.rpc(body["method"], *body["args"])]})

    return handler


def results(*answers: Any) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"results": list(answers)})

    return handler


async def late(_: web.Request) -> web.Response:
    await asyncio.sleep(10.0)
    return web.Response()


def fallen(host: RolloutHost) -> dict[str, str | None]:
    return {server.url: server.why_down for server in host.engine.servers}


def until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_one_failure_makes_no_server_fall(make, model, monkeypatch):
    monkeypatch.setattr(vllm_server, "QUESTION", Patience(4, try_s=0.3))
    stub = Stub()
    with running(stub):
        host = make(stub)
        host.start()
        push(host, model)
        stub.bodies.clear()
        left = [broken(503), half, broken(500)]

        async def at_first(request: web.Request) -> web.StreamResponse:
            if left:
                return await left.pop(0)(request)
            return web.json_response(await stub.complete(await request.json()))

        stub.instead["/v1/completions"] = at_first
        stub.instead["/collective_rpc"] = asked(stub, "hrl_state", broken(500), late, half)
        sample(host, 2)
        assert not left and fallen(host) == {stub.url: None} and host.take_counts() == {}
        stub.instead["/v1/completions"] = broken(502)
        with pytest.raises(EngineDeadError, match=f"{stub.url}/v1/completions answered 502: 'EngineDeadError'"):
            sample(host)


def test_a_server_that_falters_is_used_again_once_it_is_well_and_holds_the_version(make, model):
    good, bad = Stub(), Stub()
    with running(good, bad):
        host = make(good, bad)
        host.start()
        push(host, model, 7)
        whole = sample(host, 16)
        bad.instead["/v1/completions"] = bad.instead["/health"] = broken(503)
        assert torch.equal(whole.batch["responses"], sample(host, 16).batch["responses"])
        assert "answered 503" in fallen(host)[bad.url]
        bad.instead.clear()
        until(lambda: fallen(host)[bad.url] is None)
        joined, bad.bodies = bad.calls["hrl_join_run"], []
        assert torch.equal(whole.batch["responses"], sample(host, 16).batch["responses"])
        assert bad.bodies and bad.calls["hrl_join_run"] == joined == 1  # without a sync

        bad.instead["/v1/completions"] = broken(503)
        bad.state = {"mark": None, "version": None}  # it is started anew
        sample(host, 16)
        until(lambda: not any(server.may_return for server in host.engine.servers))
        bad.instead.clear()
        time.sleep(0.3)
        assert fallen(host)[bad.url] is not None


def test_where_no_other_is_left_a_request_waits_for_a_server_that_falters_and_not_without_end(make, model):
    stub = Stub()
    with running(stub):
        host = make(stub)
        host.start()
        push(host, model)
        stub.instead["/v1/completions"] = broken(503)
        back = threading.Timer(0.4, stub.instead.clear)
        back.start()
        sample(host)
        assert host.take_counts() == {"rollout/failovers": 1.0}
        stub.instead["/v1/completions"] = broken(500)  # it says of itself that it is well
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match="answered 500"):
            sample(host)
        assert time.monotonic() - began < 5.0


def test_a_second_fall_of_the_only_server_is_waited_for_as_long_as_the_first(make, model):
    async def at_last(request: web.Request) -> web.Response:
        await asyncio.sleep(1.2)  # so the second wait begins when the first one would have ended
        return await broken(503)(request)

    stub = Stub()
    with running(stub):
        host = make(stub)
        host.start()
        push(host, model)
        left = [*[broken(503)] * MOST_TRIES, at_last, *[broken(503)] * (MOST_TRIES - 1)]

        async def at_first(request: web.Request) -> web.StreamResponse:
            if left:
                return await left.pop(0)(request)
            return web.json_response(await stub.complete(await request.json()))

        stub.instead["/v1/completions"] = at_first
        sample(host)
        assert not left and host.take_counts() == {"rollout/failovers": 2.0}


def test_questions_about_the_weights_stand_for_many_answers_and_hold_up_no_single_one(make, model, monkeypatch):
    monkeypatch.setattr(vllm_server, "_SHARE_OF_QUESTIONS", 1e-4)
    monkeypatch.setattr(vllm_server, "_LONGEST_WAIT_S", 10.0)
    stub = Stub(delay_s=0.0)
    with running(stub):
        host = make(stub, max_num_seqs=8)
        host.start()
        push(host, model)
        began = time.monotonic()
        for _ in range(4):
            sample(host)
        stub.calls.clear()
        stub.delay_s = 0.05
        sample(host, 64)  # eight at a time
        assert 1 <= stub.calls["hrl_state"] <= 16
        assert time.monotonic() - began < 10.0


# ---------------------------------------------------------------------------------- syncs that end half-way


def test_after_an_abort_only_servers_with_the_old_weights_serve_on(make, model):
    done, failed = Stub(), Stub()
    with running(done, failed):
        host = make(done, failed)
        host.start()
        push(host, model, 1)
        failed.instead["/collective_rpc"] = asked(failed, "hrl_weights_commit", results({"error": "no room"}))
        with pytest.raises(WeightSyncError, match=f"{failed.url}: no room"):
            push(host, model, 2)
        assert (done.state["version"], failed.state["version"]) == (2, 1)
        done.bodies, failed.bodies = [], []
        assert sample(host, 16).meta_info["policy_version"] == 1
        assert failed.bodies and not done.bodies
        assert fallen(host)[done.url] == "it holds version 2 already, whose sync was aborted"
        push(host, model, 3)
        sample(host, 16)
        assert done.bodies and fallen(host) == {done.url: None, failed.url: None}


def test_where_no_server_has_the_old_weights_after_an_abort_nothing_is_sampled(make, model, caplog):
    async def busy(_: web.Request) -> web.Response:
        return web.json_response({"success": False})

    stub = Stub()
    with running(stub):
        host = make(stub, weight_sync=WeightSyncConfig(bucket_mb=1, timeout_s=2.0))
        host.start()
        push(host, model, 1)
        stub.instead["/reset_prefix_cache"] = busy
        with pytest.raises(WeightSyncError, match="did not drop its prefix cache"):
            push(host, model, 2)
        assert "still serving" not in caplog.text
        with pytest.raises(EngineUnusableError, match="the weight sync to version 2 was aborted"):
            sample(host)


def test_a_server_that_a_dead_run_has_half_written_is_mended_by_the_next_one(make, model, caplog):
    stub = Stub(changed={"half_written": True}, instead={"/v1/completions": broken(500)})
    with running(stub):
        host = make(stub)
        host.start()  # without a sample of what it has now
        assert f"{stub.url}: its weights are half written by a sync that did not end" in caplog.text
        stub.instead.clear()
        push(host, model, 1)
        sample(host)


# ---------------------------------------------------------------------------------- fields of another type


@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("hrl_state", {"mark": ["run"], "version": 1}, r"hrl_state: mark is \['run'\], where hrl expects text"),
        ("hrl_state", {"mark": "", "version": "1"}, "hrl_state: version is '1', where hrl expects an integer"),
        ("hrl_state", {"mark": "", "version": True}, "hrl_state: version is True, where hrl expects an integer"),
        ("hrl_state", {"version": 1}, "hrl_state: mark is missing, where hrl expects one"),
        ("hrl_state", {"mark": "\ud800" * 4000, "version": {}}, "hrl_state: version is {}, where"),
        ("hrl_weights_commit", {"receiver": "worker"}, "hrl_weights_commit: version is missing"),
        (
            "hrl_weights_commit",
            {"receiver": "worker", "version": 2, "tensors": None, "nbytes": 1, "read_back": 1},
            "hrl_weights_commit: tensors is None, where hrl expects an integer",
        ),
        ("hrl_weights_begin", 3, "gave no results of hrl_weights_begin"),
        ("hrl_weights_begin", {"error": {"deep": 1}}, "'deep': 1"),
    ],
)
def test_an_answer_of_the_extension_with_a_field_of_another_type_is_one_error(make, model, method, answer, said):
    stub = Stub()
    with running(stub):
        host = make(stub)
        host.start()
        push(host, model, 1)
        stub.instead["/collective_rpc"] = asked(stub, method, results(answer))
        with pytest.raises((RolloutError, WeightSyncError), match=f"{stub.url}.*{said}") as caught:
            push(host, model, 2)
            sample(host)
        assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("path", "reply", "said"),
    [
        ("/v1/models", {"data": []}, r"/v1/models: data is \[\], where hrl expects at least one"),
        ("/v1/models", {"data": "m"}, "/v1/models: data is 'm', where hrl expects a list"),
        ("/collective_rpc", {"results": [{"mark": None, "version": None}]}, "hrl_look: model is missing"),
        ("/v1/completions", {"choices": [{"finish_reason": ["stop"], "token_ids": [9]}]}, "without a log-prob"),
        (
            "/v1/completions",
            {"choices": [{"finish_reason": {}, "token_ids": [9], "logprobs": {"token_logprobs": [-1.0]}}]},
            "without a reason for its end",
        ),
    ],
)
def test_a_look_at_fields_of_another_type_is_one_error(make, path, reply, said):
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(reply)

    stub = Stub(instead={path: handler})
    with running(stub), pytest.raises(ServerRefusesError, match=f"(?s){stub.url}.*{said}"):
        make(stub).start()


@pytest.mark.parametrize("retry_after", ["nan", "-inf", "inf", "1e999", "soon"])
def test_a_pause_that_a_server_asks_for_is_bounded(retry_after):
    assert 0.1 <= server_http._pause(retry_after) <= 30.0


def test_the_printed_commands_have_what_the_run_overrides_as_an_engine_of_its_own_is_told_it(folder):
    tokens = TokenIds(0, (1,), 8)
    setups = {
        name: engine_setup(name, folder, tokens, 16, override_config={"rope_theta": 5e6})
        for name in ("server", "sglang")
    }
    vllm = shlex.split(vllm_server.server_command(setups["server"], "http://127.0.0.1:8000"))
    told = json.loads(vllm[vllm.index("--hf-overrides") + 1])
    sglang = shlex.split(sglang_server.server_command(setups["sglang"]))
    assert told.pop("head_dtype") == "float32"
    assert json.loads(sglang[sglang.index("--json-model-override-args") + 1]) == told
    assert told["rope_parameters"]["rope_theta"] == 5e6
    assert "--trust-remote-code" not in vllm + sglang
    setups = {name: replace(each, model=replace(each.model, trust_remote_code=True)) for name, each in setups.items()}
    commands = (
        vllm_server.server_command(setups["server"], "http://127.0.0.1:8000"),
        sglang_server.server_command(setups["sglang"]),
    )
    assert all("--trust-remote-code" in command for command in commands)
