"""SGLang's servers, against a stub that speaks their protocol as the source of release 0.5.23 has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors import safe_open

from hrl.config.rollout import ServerConfig
from hrl.models.tokenizer import TokenIds
from hrl.workers.rollout.base import EngineDeadError, RolloutError
from hrl.workers.rollout.host import RolloutHost
from hrl.workers.rollout.server_http import ServerRefusesError
from hrl.workers.weight_sync.wire import WeightSyncError
from tests.workers.rollout import models
from tests.workers.rollout.settings import engine_setup
from tests.workers.rollout.test_server_engine import Stub, html, push, running, sample

STOP, VOCAB = 1, models.VOCAB


@dataclass
class SglangStub(Stub):
    """Answers as SGLang's server does, from weights that it has read."""

    weight_version: str = "default"
    checksum: str = "of the model's folder"
    forgets: bool = False  # takes weights without using them
    answer: dict[str, Any] | None = None
    info: dict[str, Any] | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.calls[request.path] += 1
        if request.path in self.instead:
            return await self.instead[request.path](request)
        body = await request.json() if request.can_read_body else {}
        match request.path:
            case "/health" | "/flush_cache":
                return web.Response()
            case "/model_info":
                architectures = ["LlamaForCausalLM"]
                model = {"model_path": "m", "is_generation": True, "architectures": architectures}
                return web.json_response(model | {"weight_version": self.weight_version} | (self.info or {}))
            case "/server_info":
                server = {"dtype": "float32", "context_length": 96, "enable_deterministic_inference": True}
                server |= {"enable_fp32_lm_head": True, "json_model_override_args": "{}", "version": "0.5.23"}
                return web.json_response(server | self.changed)
            case "/update_weights_from_disk":
                self.folder = Path(body["model_path"])
                self.weight_version = body["weight_version"]
                with safe_open(self.folder / "model-00001.safetensors", "pt") as opened:
                    self.norm = opened.get_tensor("model.norm.weight")
                if not self.forgets:
                    self.checksum = self.sum_of(self.folder)
                return web.json_response({"success": True, "message": "", "num_paused_requests": 0})
            case "/weights_checker":
                return web.json_response({"success": True, "message": "", "per_engine_checksum": self.checksum})
            case "/generate":
                self.bodies.append(body)
                return web.json_response(self.generated(body))
        return web.json_response({"detail": "Not Found"}, status=404)

    def generated(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = [7 + body["sampling_params"].get("sampling_seed", 0) % 50, STOP]
        ids = ids[: body["sampling_params"]["max_new_tokens"]]
        info = {
            "finish_reason": {"type": "stop", "matched": STOP} if len(ids) == 2 else {"type": "length", "length": 1},
            "weight_version": self.weight_version,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        changed = self.answer or {}
        return {
            "text": "",
            "output_ids": changed.get("output_ids", ids),
            "meta_info": info | changed.get("meta_info", {}),
        }

    @staticmethod
    def sum_of(folder: Path) -> str:
        """Read a folder as a loader does."""
        files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        total = sha256()
        for name in sorted(files):
            with safe_open(folder / files[name], "pt") as opened:
                total.update(name.encode() + opened.get_tensor(name).numpy().tobytes())
        assert (folder / "config.json").is_file()
        return total.hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return models.save_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path


@pytest.fixture
def make(folder, place) -> Iterator[Callable[..., RolloutHost]]:
    opened: list[RolloutHost] = []

    def make(*stubs: Stub, **settings: Any) -> RolloutHost:
        server = ServerConfig(urls=[stub.url for stub in stubs], timeout_s=20.0, weights_folder=str(place), **settings)
        setup = engine_setup("sglang", folder, TokenIds(0, (STOP,), VOCAB), 96, dtype="float32", server=server)
        opened.append(RolloutHost(setup))
        return opened[-1]

    yield make
    for host in opened:
        host.shutdown()


def test_weights_go_by_a_folder_and_come_back_with_every_answer(make, folder, place):
    first, second = SglangStub(), SglangStub()
    with running(first, second):
        host = make(first, second)
        host.start()
        for version, amount in ((1, 0.0), (2, 0.1)):
            model = models.perturb(models.load(folder), amount) if amount else models.load(folder)
            report = push(host, model, version)
            assert [receiver.read_back for receiver in report.receivers] == [report.tensors]
            assert first.checksum == second.checksum and torch.equal(first.norm, model.model.norm.weight)
            assert first.weight_version.endswith(f"-{version}") and first.calls["/flush_cache"] == version
            assert list(next(place.iterdir()).iterdir()) == []  # what both have read is gone
        first.bodies.clear()  # of the looks at the start
        second.bodies.clear()
        out = sample(host, 8)
        drawn = first.bodies + second.bodies
        assert {body["sampling_params"]["sampling_seed"] % 50 + 7 for body in drawn} == set(
            out.batch["responses"][:, 0].tolist()
        )
        host.shutdown()
    assert list(place.iterdir()) == []


def test_a_server_that_holds_old_weights_is_found(make, folder):
    good, stale = SglangStub(), SglangStub()
    with running(good, stale):
        host = make(good, stale)
        host.start()
        push(host, models.load(folder), 1)
        stale.forgets = True
        with pytest.raises(WeightSyncError, match=f"{stale.url} has the checksum of the weights before"):
            push(host, models.perturb(models.load(folder), 0.1), 2)
        with pytest.raises(RolloutError, match="the weight sync to version 2 was aborted"):
            sample(host)
        push(host, models.load(folder), 3)  # whose weights it happens to have, and says so
        stale.weight_version = "default"  # it was started anew
        sample(host, 16)
        fallen = {server.url: server.why_down for server in host.engine.servers}
        assert fallen[good.url] is None and "'default', which this run has not sent" in fallen[stale.url]


def test_servers_that_make_different_weights_of_a_folder_are_found(make, folder):
    first, second = SglangStub(), SglangStub(forgets=True, checksum="quantised")
    with running(first, second):
        host = make(first, second)
        host.start()
        with pytest.raises(WeightSyncError, match=f"different weights .*{first.url}.*{second.url}"):
            push(host, models.load(folder), 1)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"output_ids": None}, "without token ids"),
        ({"output_ids": [9, 9]}, "log-probs of other tokens"),
        ({"meta_info": {"output_token_logprobs": None}}, "without a log-prob of each token"),
        ({"meta_info": {"finish_reason": None}}, "without a reason for its end"),
        ({"output_ids": [9], "meta_info": {"output_token_logprobs": [[-1.0, 9, None]]}}, "ended .* at token 9"),
        ({"meta_info": {"weight_versions": [{"version": "other", "start": 0, "end": 1}]}}, "with weights of 'other'"),
    ],
)
def test_an_answer_that_is_none_is_refused(make, folder, answer, said):
    stub = SglangStub()
    with running(stub):
        host = make(stub)
        host.start()
        push(host, models.load(folder), 1)
        stub.answer = answer
        with pytest.raises(ServerRefusesError, match=f"{stub.url}/generate .*{said}"):
            sample(host)


@pytest.mark.parametrize(
    ("changed", "info", "said"),
    [
        ({"dtype": "half"}, {}, "its weights are half"),
        ({"context_length": 64}, {}, "its longest sequence is 64"),
        ({"enable_fp32_lm_head": False}, {}, "it rounds logits.*launch_server .* --enable-fp32-lm-head"),
        ({"json_model_override_args": '{"rope_theta": 5}'}, {}, "overrides of its model are '{.rope_theta.: 5}', and"),
        ({"json_model_override_args": 5}, {}, "overrides of its model are '5', and the run's {}"),
        ({"enable_deterministic_inference": False}, {}, "it does not follow seeds.*launch_server --model-path"),
        ({}, {"architectures": ["Qwen2ForCausalLM"]}, "its model is .'Qwen2ForCausalLM'"),
        ({}, {"preferred_sampling_params": {"top_k": 5}}, "settings of sampling of its own"),
    ],
)
def test_a_server_with_other_settings_is_refused_at_the_start(make, changed, info, said):
    stub = SglangStub(changed=changed, info=info)
    with running(stub), pytest.raises(ServerRefusesError, match=f"(?s){stub.url} does not fit this run: .*{said}"):
        make(stub).start()


def test_vllms_server_is_not_taken_for_sglangs(make):
    stub, page = Stub(), SglangStub(instead={"/model_info": html})
    with running(stub, page):
        with pytest.raises(ServerRefusesError, match=f"{stub.url}/model_info answered 404"):
            make(stub).start()
        with pytest.raises(ServerRefusesError, match=f"{page.url}/model_info answered with something that is no JSON"):
            make(page).start()


def test_a_server_that_refuses_the_folder_is_told(make, folder):
    async def refuses(_: web.Request) -> web.Response:
        return web.json_response({"success": False, "message": "no such folder"}, status=400)

    stub = SglangStub(instead={"/update_weights_from_disk": refuses})
    with running(stub):
        host = make(stub)
        host.start()
        with pytest.raises(
            WeightSyncError, match=f"{stub.url}/update_weights_from_disk answered 400: .*no such folder"
        ):
            push(host, models.load(folder), 1)
        with pytest.raises((RolloutError, EngineDeadError)):
            sample(host)
