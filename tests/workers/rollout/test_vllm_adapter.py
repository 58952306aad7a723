"""Engines sample from a trained adapter, alone or added to its model, and refuse one that is not as it was sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hrl.config.model import LORA_RANKS
from hrl.models.adapter import AdapterSource
from hrl.models.tokenizer import TokenIds
from hrl.protocol import DataProto
from hrl.workers.rollout.base import EngineSetup, RolloutError
from hrl.workers.rollout.host import RolloutHost
from hrl.workers.rollout.vllm_adapter import VllmAdapterWriter, _Place, engine_options
from hrl.workers.weight_sync.wire import WeightSyncError
from tests.models import tiny
from tests.workers.asked import Actor
from tests.workers.rollout.models import VOCAB, save_tiny_llama, save_tiny_mixture
from tests.workers.rollout.settings import CPU, engine_setup, prompt_batch, sample_rows

STOP, P, R = 1, 8, 12
ADAPTER = AdapterSource(
    rank=6,  # for which vLLM has no kernels: it takes those of 8
    alpha=11,
    target_modules="all-linear",
    exclude_modules=("k_proj",),
    use_rslora=True,
    path=None,
    seed=3,
    merge=False,
)


#: Of a layer that vLLM fuses, another part in each of the two.
OF_SOME = replace(
    ADAPTER,
    target_modules=r"model\.layers\.\d\.self_attn\.(q|o)_proj|model\.layers\.1\.self_attn\.v_proj",
    exclude_modules=None,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    return save_tiny_mixture(tmp_path_factory.mktemp("mixture"))


def make_setup(name: str, folder: Path, adapter: AdapterSource, device: torch.device = CPU, **changes) -> EngineSetup:
    tokens = TokenIds(STOP, (STOP,), VOCAB)
    setup = engine_setup(name, folder, tokens, P + R, dtype="float32", device=device, **changes)
    return replace(setup, model=replace(setup.model, adapter=adapter))


def make_host(name: str, folder: Path, adapter: AdapterSource, device: torch.device = CPU, **changes) -> RolloutHost:
    return RolloutHost(make_setup(name, folder, adapter, device, **changes))


def make_actor(folder: Path, adapter: AdapterSource, device: torch.device = CPU) -> Actor:
    train = tiny.actor_config(optim=tiny.optim_config(lr=5e-2))
    model = tiny.model_config(folder, adapter=adapter)
    return Actor(model, train, tiny.fsdp_config("float32"), device=device, total_steps=None)


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    with tiny.world_of_one():
        yield


def sampled(host: RolloutHost, seed: int = 0) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, VOCAB, (3, P), generator=generator).tolist()
    batch = sample_rows(host, prompt_batch(prompts, 4, P), max_tokens=R)
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    batch.batch["advantages"] = torch.tensor([1.0, -1.0] * 6)[:, None] * batch.batch["response_mask"]
    batch.meta_info["temperature"] = 1.0
    return batch


def difference(actor: Actor, batch: DataProto) -> float:
    """The largest between the trainer's and the sampler's log-probs."""
    mask = batch.batch["response_mask"].bool()
    return float((actor.log_probs(batch).batch["old_log_probs"] - batch.batch["rollout_log_probs"])[mask].abs().max())


def push(host: RolloutHost, actor: Actor, version: int):
    engine = actor.engine
    weights = engine.iter_full_params(torch.float32)
    return host.push_weights(version, engine.param_specs(torch.float32), weights, engine.frozen_names())


def samples_follow_every_sync(host: RolloutHost, actor: Actor, noise: float = 1e-4) -> None:
    first = sampled(host)
    assert difference(actor, first) < noise, "a new adapter changes nothing"
    for version in (1, 2):
        actor.learn(first, tiny.plan_rows(first, 1, 1).ranks[0])
        stale = sampled(host)
        assert difference(actor, stale) > max(1e-2, 3 * noise), "the engine has the weights of before"
        report = push(host, actor, version)
        # The same prompts, whose keys and values the engine would have kept.
        again = sampled(host)
        assert difference(actor, again) < noise
        assert report.receivers[0].version == host.policy_version == version


def forget(host: RolloutHost) -> None:
    """Let the sender send other tensors than before; the receiver remembers them."""
    host._sync.close()
    host._sync = None


def bytes_of(actor: Actor) -> int:
    return sum(4 * parameter.numel() for parameter in actor.engine.optimizer.parameters)


@pytest.mark.parametrize("merge", [False, True])
def test_transformers_samples_from_the_adapter(folder, merge):
    adapter = replace(ADAPTER, merge=merge)
    actor = make_actor(folder, adapter)
    with make_host("hf", folder, adapter) as host:
        samples_follow_every_sync(host, actor)
        report = push(host, actor, 3)
        assert report.receivers[0].read_back == report.tensors
        assert (report.nbytes == bytes_of(actor)) != merge


@pytest.mark.engine
def test_vllm_samples_from_the_adapter_alone(folder):
    pytest.importorskip("vllm")
    actor = make_actor(folder, ADAPTER)
    with make_host("vllm", folder, ADAPTER) as host:
        samples_follow_every_sync(host, actor)
        report = push(host, actor, 3)
        assert report.nbytes == bytes_of(actor)
        assert report.receivers[0].read_back == report.tensors == 2 * 6 * 2  # all but keys, in two layers
        good = sampled(host)

        with pytest.raises(WeightSyncError, match="differ from those of the last good sync"):
            other = make_actor(folder, replace(ADAPTER, rank=5))
            forget(host)
            push(host, other, 4)
        forget(host)
        assert torch.equal(sampled(host).batch["responses"], good.batch["responses"]), "version 3 is served"

        names = {spec.name: spec for spec in actor.engine.param_specs(torch.float32)}
        first = next(iter(names))
        weights = dict(actor.engine.iter_full_params(torch.float32))
        host.push_weights(5, names.values(), iter(weights.items()), actor.engine.frozen_names())
        with pytest.raises(WeightSyncError, match="the trainer's weights end before"):
            host.push_weights(6, (), iter([(first, weights[first])]), ())
        assert difference(actor, sampled(host)) < 1e-4, "a sync that fails leaves the version before"


@pytest.mark.engine
def test_two_processes_of_vllm_sample_a_mixture_with_an_adapter_that_a_regular_expression_places(mixture, tmp_path):
    pytest.importorskip("vllm")
    from vllm.lora.request import LoRARequest

    actor = make_actor(mixture, OF_SOME)
    with make_host("vllm", mixture, OF_SOME, tensor_model_parallel_size=2, kv_cache_gib=0.1) as host:
        name = "base_model.model.model.layers.7.self_attn.q_proj"
        shapes = {f"{name}.lora_A.weight": (6, 64), f"{name}.lora_B.weight": (128, 6)}
        specs = [(key, torch.float32, shape) for key, shape in shapes.items()]
        with pytest.raises(WeightSyncError, match=r"vLLM has no LoRA layer for model\.layers\.7\.self_attn\.q_proj"):
            host.push_weights(1, specs, ((key, torch.zeros(shape)) for key, shape in shapes.items()), ("x",))
        forget(host)
        push(host, actor, 1)

        first = sampled(host)
        actor.learn(first, tiny.plan_rows(first, 1, 1).ranks[0])
        assert difference(actor, first) > 1e-2, "the engine has the weights of before"
        report = push(host, actor, 2)
        assert difference(actor, sampled(host)) < 1e-4
        assert report.nbytes == bytes_of(actor) and report.tensors == 2 * 5
        assert [receiver.read_back for receiver in report.receivers] == [report.tensors] * 2

        # The folder that a checkpoint has of a later adapter, read by vLLM itself.
        actor.learn(first, tiny.plan_rows(first, 1, 1).ranks[0])
        assert difference(actor, sampled(host)) > 1e-2
        actor.engine.export_hf(tmp_path / "hf")
        host.engine._adapter = LoRARequest("exported", 2, str(tmp_path / "hf"))
        assert difference(actor, sampled(host)) < 1e-4
        push(host, actor, 3)
        assert difference(actor, sampled(host)) < 1e-4, "what a sync brings takes its place again"


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("merge", [False, True])
def test_transformers_samples_beside_weights_in_4_bits(folder, merge):
    adapter = replace(ADAPTER, merge=merge, load_in_4bit=True)
    actor = make_actor(folder, adapter)
    with make_host("hf", folder, adapter) as host:
        if merge:  # until the first sync the engine has what is in the folder
            push(host, actor, 1)
        samples_follow_every_sync(host, actor)


@pytest.mark.engine
@pytest.mark.usefixtures("bitsandbytes")
def test_vllm_rounds_its_weights_as_the_trainer_does(folder):
    pytest.importorskip("vllm")
    adapter = replace(ADAPTER, load_in_4bit=True)
    actor, in_full = make_actor(folder, adapter), make_actor(folder, ADAPTER)
    with make_host("vllm", folder, adapter) as host:
        assert difference(in_full, sampled(host)) > 1e-2, "4 bits are not 16"
        samples_follow_every_sync(host, actor)
        report = push(host, actor, 3)
        assert report.nbytes == bytes_of(actor), "the model itself never travels"


@pytest.mark.gpu
@pytest.mark.parametrize(("merge", "load_in_4bit"), [(False, False), (True, False), (False, True)])
def test_vllm_on_a_gpu_samples_from_the_adapter(folder, bitsandbytes, merge, load_in_4bit):
    pytest.importorskip("vllm")
    adapter, device = replace(ADAPTER, merge=merge, load_in_4bit=load_in_4bit), torch.device("cuda", 0)
    actor = make_actor(folder, adapter, device)
    with make_host("vllm", folder, adapter, device) as host:
        samples_follow_every_sync(host, actor, noise=1e-2)
        report = push(host, actor, 3)
        assert report.receivers[0].read_back > 0


@pytest.mark.engine
def test_vllm_samples_from_the_model_with_the_adapter_added(folder):
    pytest.importorskip("vllm")
    adapter = replace(ADAPTER, merge=True)
    actor = make_actor(folder, adapter)
    with make_host("vllm", folder, adapter) as host:
        samples_follow_every_sync(host, actor)


def test_what_reads_back_is_what_the_engine_has():
    layer = SimpleNamespace(
        tp_size=1, n_slices=1, lora_a_stacked=[torch.zeros(1, 1, 8, 4)], lora_b_stacked=[torch.zeros(1, 1, 4, 8)]
    )
    sent = {"a": torch.randn(6, 4).bfloat16(), "b": torch.randn(4, 6).bfloat16()}
    writer = writer_of(sent, {"a": _Place(layer, True, 0, 1.3), "b": _Place(layer, False, 0, 1.3)})
    layer.lora_a_stacked[0] = layer.lora_a_stacked[0].bfloat16()
    layer.lora_b_stacked[0] = layer.lora_b_stacked[0].bfloat16()
    layer.lora_a_stacked[0][0, 0, :6, :4] = sent["a"]
    layer.lora_b_stacked[0][0, 0, :4, :6] = sent["b"] * 1.3

    assert torch.equal(writer.read_back("a"), sent["a"]) and torch.equal(writer.read_back("b"), sent["b"])
    layer.lora_a_stacked[0][0, 0, 5, 3] += 1
    layer.lora_b_stacked[0][0, 0, 3, 5] += 1
    assert not torch.equal(writer.read_back("a"), sent["a"]) and not torch.equal(writer.read_back("b"), sent["b"])


def writer_of(sent: dict[str, torch.Tensor], places: dict[str, _Place | None]) -> VllmAdapterWriter:
    writer = VllmAdapterWriter.__new__(VllmAdapterWriter)
    writer._sent, writer._places = sent, places
    return writer


def test_a_process_of_a_tensor_parallel_engine_reads_back_its_part():
    """The second of two, of a layer that fuses two matrices: the lower half of the second matrix's B."""
    sent = {"b": torch.randn(6, 2), "cut otherwise": torch.randn(6, 2)}
    layer = SimpleNamespace(
        tp_size=2,
        n_slices=2,
        slice_lora_b=lambda members: [None if member is None else member[3:] for member in members],
        lora_b_stacked=[torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 3, 8)],
    )
    writer = writer_of(sent, {"b": _Place(layer, False, 1, 0.5), "cut otherwise": None})
    layer.lora_b_stacked[1][0, 0, :, :2] = sent["b"][:3] * 0.5
    assert not torch.equal(writer.read_back("b"), sent["b"]), "the first process's part"
    layer.lora_b_stacked[1][0, 0, :, :2] = sent["b"][3:] * 0.5
    assert torch.equal(writer.read_back("b"), sent["b"])
    assert writer.read_back("cut otherwise") is None


def options_of(folder: Path, adapter: AdapterSource) -> dict[str, Any]:
    return engine_options(make_setup("vllm", folder, adapter).model)


@pytest.mark.parametrize(("rank", "known"), [(1, 8), (8, 8), (9, 16), (512, 512)])
def test_vllm_gets_the_next_rank_that_it_has_kernels_for(folder, rank, known):
    assert options_of(folder, replace(ADAPTER, rank=rank))["max_lora_rank"] == known
    assert known in LORA_RANKS


def test_a_rank_without_kernels_is_refused_and_a_merged_one_needs_none(folder):
    with pytest.raises(RolloutError, match=r"rank 600, and vLLM takes 512 at most: set .*lora\.merge=true"):
        options_of(folder, replace(ADAPTER, rank=600))
    assert options_of(folder, replace(ADAPTER, rank=600, merge=True)) == {}


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        (OF_SOME, ["o_proj", "q_proj", "v_proj"]),
        (replace(ADAPTER, target_modules=("self_attn.v_proj",)), ["v_proj"]),
        (ADAPTER, ["o_proj", "q_proj", "v_proj"]),  # of a mixture nothing but attention is linear
    ],
)
def test_vllm_makes_room_in_the_layers_that_have_an_adapter_and_in_no_experts(mixture, adapter, expected):
    matches = pytest.importorskip("vllm.lora.utils").is_in_target_modules
    names = options_of(mixture, adapter)["lora_target_modules"]
    assert names == expected
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "experts": ["experts.0.w1", "experts.0.w2", "experts.0.w3"]}
    assert matches("model.layers.0.self_attn.qkv_proj", names, fused)
    for left in ("model.layers.0.mlp.experts", "model.layers.0.mlp.gate", "model.embed_tokens", "lm_head"):
        assert not matches(left, names, fused), left
