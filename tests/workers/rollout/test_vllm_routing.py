"""From the choices of an iteration to those of a request: what vLLM's first model runner is listened to for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from hrl.models.tokenizer import TokenIds
from hrl.workers.rollout import vllm_routing
from hrl.workers.rollout.vllm_engine import engine_args, own_layers
from hrl.workers.rollout.vllm_routing import NoRoutingError, RoutingRecorder
from tests.workers.rollout.settings import engine_setup

NONE = 255


class Router:
    """Tells what it chooses, as vLLM's do."""

    global_num_experts = 8

    def set_capture_fn(self, told: Any) -> None:
        self.told = told


class ModelRunner:
    """Runs iterations that are written down: choices of all tokens in each of two layers."""

    def __init__(self) -> None:
        self.routers = [Router(), Router()]
        self.input_batch = SimpleNamespace(req_ids=[])
        self.choices: list[int] = []

    def get_model(self) -> nn.Module:
        return nn.Module()

    def execute_model(self, scheduled: Any) -> str:
        for layer, router in enumerate(self.routers):
            router.told(torch.tensor([[n + layer, n] for n in self.choices], dtype=torch.int32))
        return "result"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    runner = ModelRunner()
    found = [SimpleNamespace(layer_id=3 + n, router=router) for n, router in enumerate(runner.routers)]
    monkeypatch.setattr(vllm_routing, "_runners", lambda _: found)
    return runner


def iterate(runner: ModelRunner, choices: list[int], new: dict[str, int], old: dict[str, int], **counts: int) -> None:
    """An iteration over requests in the order of ``counts``; ``new`` and ``old`` say how many tokens are computed."""
    runner.input_batch.req_ids, runner.choices = list(counts), choices
    scheduled = SimpleNamespace(
        total_num_scheduled_tokens=sum(counts.values()),
        num_scheduled_tokens=counts,
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=at) for name, at in new.items()],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(old), num_computed_tokens=list(old.values())),
    )
    assert runner.execute_model(scheduled) == "result"


def firsts(routed: np.ndarray | None) -> list[list[int]]:
    """The first layer's second expert of each token, and the second layer's first, which is one more."""
    assert routed is not None and routed.dtype == np.uint8
    assert ((routed[:, 1, 0] == routed[:, 0, 1] + 1) | (routed[:, 0, 1] == NONE)).all()
    return routed[:, 0, 1].tolist()


def test_tokens_go_to_their_requests_wherever_they_lie_in_an_iteration(runner):
    recorder = RoutingRecorder(runner)
    iterate(runner, [1, 2, 3, 4, 5], {"a-x1": 0, "b-x2": 2}, {}, **{"a-x1": 3, "b-x2": 2})
    iterate(runner, [6, 7, 0], {"c-x3": 0}, {"a-x1": 3, "b-x2": 4}, **{"b-x2": 1, "a-x1": 1, "c-x3": 1})
    assert firsts(recorder.take("a")) == [1, 2, 3, 7]
    assert firsts(recorder.take("b")) == [NONE, NONE, 4, 5, 6]  # whose first two tokens were in the cache
    assert recorder.take("a") is None and recorder.take("nobody") is None
    recorder.forget()
    assert recorder.take("c") is None


def test_what_is_computed_again_after_a_preemption_counts(runner):
    recorder = RoutingRecorder(runner)
    iterate(runner, [1, 2], {"a": 0}, {}, a=2)
    iterate(runner, [3, 4, 5], {}, {"a": 0}, a=3)
    assert firsts(recorder.take("a")) == [3, 4, 5]


def test_a_model_without_experts_or_with_routers_that_tell_nothing_is_refused(runner, monkeypatch):
    silent = SimpleNamespace(layer_id=3, router=object())
    for found, why in (([], "has no layer with experts"), ([silent], "layer 3 does not tell")):
        monkeypatch.setattr(vllm_routing, "_runners", lambda _, found=found: found)
        with pytest.raises(NoRoutingError, match=why):
            RoutingRecorder(runner)


def test_on_a_gpu_vllm_returns_them_itself_for_all_layers():
    for device, asked in (("cuda", True), ("cpu", None)):
        setup = engine_setup(
            "vllm", "folder", TokenIds(0, (1,), 9), 32, device=torch.device(device), enable_rollout_routing_replay=True
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hrl.workers.rollout.vllm_engine.engine_overrides", lambda *_, **__: {})
            assert engine_args(setup).get("enable_return_routed_experts") is asked
    theirs = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)  # of four layers, of which the first has no experts
    own = own_layers(theirs, [1, 3], 256)
    assert own.dtype == np.int16 and own.tolist() == [[[3, 4, 5], [9, 10, 11]], [[15, 16, 17], [21, 22, 23]]]
    assert own_layers(None, [1, 3], 256) is None


def test_vllm_has_what_is_asked_of_it_on_a_gpu():
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.outputs import CompletionOutput

    assert "enable_return_routed_experts" in {field.name for field in fields(AsyncEngineArgs)}
    assert "routed_experts" in {field.name for field in fields(CompletionOutput)}
