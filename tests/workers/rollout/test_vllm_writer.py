"""Weights written into vLLM's own models in this process: quantised ones, and from buffers that do not last."""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hrl.workers.rollout.vllm_worker import VllmModelWriter, is_quantised
from hrl.workers.weight_sync.sender import WeightSync
from hrl.workers.weight_sync.wire import Manifest, WeightSyncError
from tests.workers.rollout import models
from tests.workers.weight_sync.streaming import StreamingSender, StreamingTarget, stream

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

BUCKET_BYTES = 8192
"""Less than the embedding (16 KiB) and the fused layers have: tensors are cut, and layers end in another bucket."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Two sets of weights of one tiny model."""
    first = models.save_tiny_llama(tmp_path_factory.mktemp("first"), tied=False)
    second = tmp_path_factory.mktemp("second")
    models.perturb(models.load(first), 0.5).save_pretrained(second)
    return first, second


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[None]:
    """vLLM's process groups, of this process alone."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    threads = torch.get_num_threads()
    with set_current_vllm_config(VllmConfig()):
        address = f"file://{tmp_path_factory.mktemp('world')}/meet"
        parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)  # as vLLM's CPU worker does
        patch.setattr(gc, "collect", lambda: 0)  # half a second in a process this large, twice a model
        yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    torch.set_num_threads(threads)


def load_engine_model(folder: Path, quantization: str | None):
    """vLLM's model of the folder and its configuration, ready to compute."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    args = EngineArgs(
        model=str(folder),
        dtype="bfloat16",
        quantization=quantization,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=32,
        kv_cache_memory_bytes=1 << 20,
    )
    config = args.create_engine_config()
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def contents(model: nn.Module, config) -> dict[str, Tensor]:
    """Every parameter, bit for bit, and what every linear layer makes of one input: it may have packed its weight."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.linear import LinearBase

    found = {name: parameter.detach().clone().view(torch.uint8) for name, parameter in model.named_parameters()}
    with set_current_vllm_config(config), torch.inference_mode():
        for name, module in model.named_modules():
            if isinstance(module, LinearBase):
                x = torch.randn(3, module.input_size, generator=torch.Generator().manual_seed(0)).bfloat16()
                found[f"{name}(x)"] = module.quant_method.apply(module, x, None)
    return found


def send(writer: VllmModelWriter, folder: Path, version: int, *, lacking: str | None = None) -> int:
    """One sync of a folder's weights through poisoned buffers; how many tensors could be read back."""
    source = models.load(folder)
    specs = [spec for spec in models.specs(source, torch.bfloat16) if spec[0] != lacking]
    weights = [pair for pair in models.parameters(source) if pair[0] != lacking]
    manifest = Manifest.build(specs, BUCKET_BYTES)
    sender = StreamingSender(manifest, poison=True)
    sync = WeightSync(manifest, sender, StreamingTarget(writer, sender), timeout_s=60)
    assert any(not piece.is_whole for piece in manifest.pieces)
    return sync.push(version, weights).receivers[0].read_back


@pytest.mark.parametrize("quantization", [None, "fp8_per_channel"])
def test_an_engine_holds_after_a_sync_what_it_would_hold_had_it_loaded_those_weights(
    quantization, folders, world, monkeypatch
):
    stream(monkeypatch)
    model, config = load_engine_model(folders[0], quantization)
    before, expected = contents(model, config), contents(*load_engine_model(folders[1], quantization))
    writer = VllmModelWriter(model, config)

    read_back = send(writer, folders[1], 1)

    held = contents(model, config)
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], value) for name, value in expected.items())
    assert read_back >= 6  # both matrices of the vocabulary and the norms
    assert any(name.endswith("weight_scale") for name in held) == (quantization is not None)
    assert all(value.numel() == 0 or not torch.equal(value, before[name]) for name, value in held.items())
    send(writer, folders[0], 2)
    assert all(torch.equal(value, before[name]) for name, value in contents(model, config).items())


@pytest.mark.parametrize("quantization", [None, "fp8_per_channel"])
def test_a_tensor_that_was_not_sent_is_still_found_missing(quantization, folders, world, monkeypatch):
    stream(monkeypatch)
    model, config = load_engine_model(folders[0], quantization)

    with pytest.raises(WeightSyncError, match=r"layers\.1\.self_attn\.qkv_proj|layers\.1\.self_attn\.k_proj"):
        send(VllmModelWriter(model, config), folders[1], 1, lacking="model.layers.1.self_attn.k_proj.weight")


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [(None, False), ("fp8_per_channel", True), ("int8_per_channel_weight_only", False), ("nvfp4_per_token", False)],
)
def test_a_quantisation_for_experts_alone_is_seen_to_leave_a_dense_model_as_it_is(
    quantization, expected, folders, world
):
    assert is_quantised(load_engine_model(folders[0], quantization)[0]) == expected


def test_scales_of_a_quantised_cache_need_not_be_sent(folders, world):
    """`kv_cache_dtype=fp8` gives attention layers scales that a checkpoint may have, and a trainer does not."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    from hrl.workers.rollout.vllm_worker import _required_parameters

    model, _ = load_engine_model(folders[0], None)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    unscaled = _required_parameters(model, [])
    for layer in layers:
        layer.quant_method = BaseKVCacheMethod(None)
        layer.quant_method.create_weights(layer)

    assert any(name.endswith("attn.k_scale") for name, _ in model.named_parameters())
    assert _required_parameters(model, []) == unscaled and unscaled
    assert not is_quantised(model)


def test_the_scales_of_a_folder_that_is_quantised_already_are_asked_for_with_the_way_out(folders, world, monkeypatch):
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import capture_layer_to_meta

    stream(monkeypatch)
    model, config = load_engine_model(folders[0], None)
    norm = model.model.norm
    norm.register_parameter("weight_scale", nn.Parameter(torch.ones(1)))
    get_layerwise_info(norm).restore_metadata = capture_layer_to_meta(norm)
    config.model_config.hf_config.quantization_config = {"quant_method": "fp8"}

    with pytest.raises(WeightSyncError, match=r"nothing for model\.norm\.weight_scale.*its unquantised one.*=fp8"):
        send(VllmModelWriter(model, config), folders[1], 1)


# A layer that asks for vLLM's configuration whenever it touches weights, and keeps them in another form and name.


def _transposing_layer(size: int) -> tuple[nn.Module, list[str]]:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    seen: list[str] = []

    def configured(what: str) -> None:
        assert get_current_vllm_config_or_none() is not None, f"{what} without vLLM's configuration"
        seen.append(what)

    class Transposing(QuantizeMethodBase):
        def create_weights(self, layer, *args, **kwargs):
            raise NotImplementedError

        def apply(self, layer, *args, **kwargs):
            raise NotImplementedError

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            configured("process")
            kept = layer.weight.data.t().contiguous()
            del layer.raw
            layer.weight = nn.Parameter(kept, requires_grad=False)
            layer.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def load(param: nn.Parameter, loaded_weight: Tensor) -> None:
        configured("load")
        param.data.copy_(loaded_weight)

    layer = nn.Module()
    layer.quant_method = Transposing()
    for name in ("weight", "raw"):
        parameter = nn.Parameter(torch.zeros(size, size), requires_grad=False)
        parameter.weight_loader = load
        setattr(layer, name, parameter)
    return layer, seen


class _OneLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def load_weights(self, weights) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            parameter = dict(self.named_parameters())[name]
            parameter.weight_loader(parameter, tensor)
            loaded.add(name)
        return loaded


def test_layers_that_keep_other_names_and_shapes_are_written_under_vllms_configuration(monkeypatch):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    stream(monkeypatch)
    layer, seen = _transposing_layer(8)
    model, config = _OneLayer(layer), VllmConfig()
    record_metadata_for_reloading(model)
    with set_current_vllm_config(config):
        layer.quant_method.process_weights_after_loading(layer)
    assert {name for name, _ in model.named_parameters()} == {"layer.weight", "layer.scale"}
    kernel = layer.weight
    seen.clear()
    new = torch.arange(64.0).view(8, 8)
    manifest = Manifest.build([(f"layer.{name}", torch.float32, (8, 8)) for name in ("weight", "raw")], 1 << 20)
    sender = StreamingSender(manifest, poison=True)
    target = StreamingTarget(VllmModelWriter(model, config), sender)

    report = WeightSync(manifest, sender, target, timeout_s=10).push(1, [("layer.weight", new), ("layer.raw", -new)])

    assert layer.weight is kernel and torch.equal(kernel, new.T)
    assert "process" in seen and "load" in seen
    assert report.receivers[0].read_back == 0  # same name, shape and dtype as sent, other contents


@pytest.mark.parametrize("is_told", [True, False])
def test_layers_that_are_meant_to_keep_their_weights_are_no_failure(is_told, monkeypatch):
    """Unless the model does not say what it loaded: then vLLM's word is the only one."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.reload import layerwise, record_metadata_for_reloading

    model, config = nn.Module(), VllmConfig()
    model.tower, model.decoder = _transposing_layer(8)[0], _transposing_layer(8)[0]
    load = _OneLayer.load_weights
    model.load_weights = lambda weights: load(model, weights) if is_told else load(model, weights) and None
    record_metadata_for_reloading(model)
    with set_current_vllm_config(config):
        for layer in model.children():
            layer.quant_method.process_weights_after_loading(layer)
    said: list[str] = []
    watch = logging.Handler()
    watch.emit = lambda record: said.append(record.getMessage())
    monkeypatch.setattr(layerwise.logger, "handlers", [watch])
    tower, writer = model.tower.weight, VllmModelWriter(model, config)

    writer.begin()
    writer.write([("decoder.weight", torch.eye(8)), ("decoder.raw", torch.eye(8))])
    writer.finish(["model.tower.weight", "model.tower.raw"])

    assert model.tower.weight is tower and torch.equal(model.decoder.weight, torch.eye(8))
    assert any("Failed to load" in text for text in said) != is_told


def test_the_writer_relies_on_functions_that_vllm_has():
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    inspect.signature(initialize_layerwise_reload).bind(None)
    inspect.signature(finalize_layerwise_reload).bind(None, None)
