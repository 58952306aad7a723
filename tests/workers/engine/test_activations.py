"""Activations that leave the device and come back, and layers that recompute theirs: no gradient changes by a bit.

A CPU stands for the device, where every copy is a real one, and torch's meta tensors do where memory is counted.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from hrl.models.adapter import AdapterSource
from hrl.models.loading import recompute_layers
from hrl.workers.engine import activations
from hrl.workers.engine.activations import ActivationOffload
from tests.models.tiny import SHAPE, make_batch, model_config, plan_rows, save_mixture
from tests.workers.asked import Actor
from tests.workers.engine.fake_device import DEVICE, FakeDevice
from tests.workers.engine.ranks import CPU, actor_config, fsdp_config, gradients

pytestmark = pytest.mark.usefixtures("world")

ADAPTER = AdapterSource(4, 8, "all-linear", None, False, None, seed=3, merge=False)


@pytest.fixture(scope="module", params=["llama", "mixture"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "mixture":
        return save_mixture(root, "qwen3_moe")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(SHAPE | {"num_hidden_layers": 4}))).save_pretrained(root)
    return root


def found(path: Path, *, offload: bool = False, **model: Any) -> dict[str, Tensor]:
    """Gradients of two micro-batches."""
    batch = make_batch()
    policy = Actor(model_config(path, **model), actor_config(), fsdp_config("float32"), device=CPU, total_steps=10)
    if offload:
        assert ActivationOffload(CPU, least_bytes=0).attach(policy.engine.module) > 1
    return gradients(policy, batch, plan_rows(batch, 1, 2).ranks[0])


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_activations_that_stay(folder: Path, recompute: bool) -> None:
    settings: dict[str, Any] = {"enable_gradient_checkpointing": recompute}
    stayed = found(folder, **settings)
    assert same(found(folder, offload=True, **settings), stayed)
    with_adapter = found(folder, adapter=ADAPTER, **settings)
    assert same(found(folder, offload=True, adapter=ADAPTER, **settings), with_adapter)


@pytest.mark.parametrize("first", [0, 1, 3, 9])
def test_gradients_are_those_of_layers_that_all_recompute(folder: Path, first: int) -> None:
    settings: dict[str, Any] = {"enable_gradient_checkpointing": True}
    everywhere = found(folder, **settings)
    assert same(found(folder, recompute_num_layers=first, **settings), everywhere)
    assert same(found(folder, offload=True, recompute_num_layers=first, **settings), everywhere)


class Layer(GradientCheckpointingLayer):
    """Squares its input twice, so it saves the input and the square, and has a weight that is saved too."""

    def __init__(self, device: torch.device, width: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, width, device=device))
        self.runs = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.runs += 1
        return ((inputs @ self.weight) * inputs).sin()


WIDTH, LAYERS = 64, 6
BYTES = 4 * 256 * WIDTH  # of one tensor between layers


def stack(device: torch.device) -> nn.Sequential:
    return nn.Sequential(*(Layer(device) for _ in range(LAYERS)))


def test_the_first_layers_recompute_and_no_others() -> None:
    module = stack(CPU)
    assert recompute_layers(module, 2) == 2
    module(torch.ones(4, WIDTH, requires_grad=True)).sum().backward()
    assert [layer.runs for layer in module] == [2, 2, 1, 1, 1, 1]
    assert recompute_layers(stack(CPU)) == recompute_layers(stack(CPU), 99) == LAYERS


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_of_two_layers_are_on_the_device_and_each_crosses_once_each_way(recompute: bool) -> None:
    """Weights don't cross: they are there anyway. A layer that recomputes has saved its input, and one that does not
    its input, which its two products share, the first of these, and their product."""
    module = stack(DEVICE)
    if recompute:
        recompute_layers(module)
    inputs = torch.empty(256, WIDTH, device=DEVICE, requires_grad=True)
    each = 1 if recompute else 3
    ActivationOffload(DEVICE, least_bytes=1).attach(module)
    with FakeDevice() as recorded:
        out = module(inputs.detach().requires_grad_())  # made before, so it counts for nothing
        gc.collect()
        kept = recorded.held_bytes
        assert [way for way, _ in recorded.copies] == ["out"] * each * LAYERS
        assert {nbytes for _, nbytes in recorded.copies} == {BYTES}
        # Of the last layer all; its output; nothing of others, as the device is done with them.
        assert kept <= (each + 1) * BYTES
        recorded.peak_bytes = recorded.held_bytes
        torch.autograd.backward(out, torch.empty_like(out))
        back = [nbytes for way, nbytes in recorded.copies if way == "in"]
        assert len(back) == each * (LAYERS - 1), "the last layer's had not left"
        # Two layers' activations, one layer's at work, gradients of all weights and of what lies between layers.
        weights = LAYERS * 4 * WIDTH * WIDTH
        assert recorded.peak_bytes <= weights + (2 * each + 8) * BYTES
    del out
    gc.collect()


def test_what_left_is_let_go_when_its_backward_is_done() -> None:
    offload = ActivationOffload(CPU, least_bytes=1)
    module = stack(CPU)
    offload.attach(module)
    for _ in range(2):
        module(torch.ones(256, WIDTH, requires_grad=True)).sum().backward()
        assert offload.leaving is None and offload._last is not None and offload._last() is None


def test_a_layer_comes_while_the_one_after_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    module, order = stack(CPU), []
    for place, layer in enumerate(module):
        layer.place = place
        layer.register_full_backward_pre_hook(lambda layer, _: order.append(f"backward {layer.place}"))
    ActivationOffload(CPU, least_bytes=1).attach(module)
    fetch = activations._OfLayer.fetch

    def call(self: Any) -> None:
        before = sum(each() is not None and each().here is None for each in self._saved)
        fetch(self)
        if before:
            order.append("fetch")

    monkeypatch.setattr(activations._OfLayer, "fetch", call)
    module(torch.ones(256, WIDTH, requires_grad=True)).sum().backward()
    assert order == [word for place in reversed(range(LAYERS)) for word in (f"backward {place}", "fetch")][:-1]


def test_small_tensors_and_passes_without_gradients_are_left_alone() -> None:
    module = stack(DEVICE)
    ActivationOffload(DEVICE).attach(module)
    with FakeDevice() as recorded:
        module(torch.empty(256, WIDTH, device=DEVICE, requires_grad=True))
        assert BYTES < activations.LEAST_BYTES and recorded.copies == []
    module = stack(DEVICE)
    ActivationOffload(DEVICE, least_bytes=1).attach(module)
    with FakeDevice() as recorded, torch.no_grad():
        module(torch.empty(256, WIDTH, device=DEVICE))
        assert recorded.copies == []


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_on_a_gpu_activations_of_two_layers_are_there_at_once_and_no_gradient_changes(recompute: bool) -> None:
    device, rows, width, layers = torch.device("cuda", 0), 8192, 1024, 16

    def run(*, offload: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        module = nn.Sequential(*(Layer(device, width) for _ in range(layers)))
        for layer in module:
            nn.init.normal_(layer.weight, std=width**-0.5)
        if recompute:
            recompute_layers(module)
        if offload:
            ActivationOffload(device).attach(module)
        found = []
        for _ in range(2):
            inputs = torch.linspace(-1, 1, rows * width, device=device).view(rows, width).requires_grad_()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            module(inputs).square().sum().backward()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            found += [inputs.grad.cpu(), *(layer.weight.grad.cpu() for layer in module)]
        return found, peak

    (stayed, all_of_it), (left, peak) = run(offload=False), run(offload=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(left, stayed, strict=True))
    each = (1 if recompute else 3) * 4 * rows * width
    assert all_of_it > layers * each * 0.9
    assert peak < 3 * each + 10 * 4 * rows * width + layers * 4 * width * width


def test_torchs_checkpoint_gives_its_inputs_to_the_hooks() -> None:
    """Of which `ActivationOffload` lives where layers recompute."""
    taken = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: taken.append(tensor.shape) or tensor, lambda it: it):
        checkpoint(torch.sin, torch.ones(7, requires_grad=True), use_reentrant=False)
    assert torch.Size([7]) in taken
