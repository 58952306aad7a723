"""The engine on one GPU: FSDP2 over NCCL, the same numbers as on a CPU, and what offloading moves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from hrl.batching.plan import RankPlan
from hrl.models.adapter import AdapterSource
from hrl.protocol import DataProto
from hrl.workers.engine.adamw import AdamW
from hrl.workers.engine.rounding import round_stochastically
from hrl.workers.policy import Policy
from tests.models.tiny import (
    SHAPE,
    actor_config,
    fsdp_config,
    make_batch,
    model_config,
    plan_rows,
    save_mixture,
)
from tests.workers.asked import Actor
from tests.workers.engine.ranks import CPU, gradients

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
OFFLOAD = {"param_offload": True, "optimizer_offload": True}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """A world of this process alone, with a backend for each device, as a run's has."""
    torch.cuda.set_device(CUDA)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=CUDA)
    yield
    dist.destroy_process_group()


def policy_on(
    device: torch.device, folder: Path, dtype: str = "float32", adapter: AdapterSource | None = None, **fsdp
) -> Policy:
    model = model_config(folder, adapter=adapter)
    return Actor(model, actor_config(), fsdp_config(dtype, **fsdp), device=device, total_steps=10)


def batch_and_plan() -> tuple[DataProto, RankPlan]:
    batch = make_batch()
    return batch, plan_rows(batch, 1, 2).ranks[0]


def moments_of(policy: Policy) -> dict[str, torch.Tensor]:
    """Both moments of every parameter."""
    optimizer = policy.engine.optimizer
    return {
        f"{key}.{name}": optimizer.rule.state[parameter][key].to_local()
        for parameter, name in optimizer.names.items()
        for key in ("exp_avg", "exp_avg_sq")
    }


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    """Every parameter; on one rank its shard is all of it."""
    return {name: p.detach().to_local() for name, p in policy.engine.module.named_parameters()}


def state_of(policy: Policy) -> dict[str, torch.Tensor]:
    """Copies of both, on the CPU."""
    return {name: tensor.cpu().clone() for name, tensor in (weights_of(policy) | moments_of(policy)).items()}


def homes(policy: Policy) -> tuple[set[str], set[str]]:
    """The devices of parameters, and of moments."""
    weights, moments = ({t.device.type for t in found(policy).values()} for found in (weights_of, moments_of))
    return weights, moments


ON_HOST = ({"cpu"}, {"cpu"})


def test_log_probs_and_gradients_are_those_of_a_cpu(llama):
    batch, plan = batch_and_plan()
    ours, theirs = policy_on(CUDA, llama), policy_on(CPU, llama)
    assert dist.get_backend_config(dist.group.WORLD) == "cpu:gloo,cuda:nccl" and ours.engine.mesh.device_type == "cuda"

    got, want = (p.log_probs(batch, plan).batch["old_log_probs"] for p in (ours, theirs))
    assert got.device == CPU
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    got_gradients, want_gradients = gradients(ours, batch, plan), gradients(theirs, batch, plan)
    for name, want_gradient in want_gradients.items():
        torch.testing.assert_close(got_gradients[name].cpu(), want_gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_bfloat16_takes_the_variable_length_kernels_and_stays_near_float32(llama):
    batch, plan = batch_and_plan()
    policy = policy_on(CUDA, llama, "bfloat16", model_dtype="float32")
    got = policy.log_probs(batch, plan).batch["old_log_probs"]
    want = policy_on(CUDA, llama).log_probs(batch, plan).batch["old_log_probs"]
    mask = batch.batch["response_mask"].bool()
    assert 0 < (got - want)[mask].abs().mean() < 0.05
    metrics = policy.learn(batch, plan)
    assert metrics["actor/skipped_steps"].result() == 0 and metrics["actor/grad_norm"].result() > 0
    assert {p.dtype for p in policy.engine.module.parameters()} == {torch.float32}


def test_a_mixture_of_experts_leaves_the_gpu_as_it_lies_in_its_folder(tmp_path):
    folder = save_mixture(tmp_path, "qwen3_moe")
    sent = dict(policy_on(CUDA, folder, **OFFLOAD).engine.iter_full_params(torch.float32))
    want = load_file(folder / "model.safetensors")
    assert sent.keys() == want.keys() and all(torch.equal(sent[name].cpu(), want[name]) for name in want)


def assert_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_offloading_moves_everything_there_and_back_and_changes_no_number(llama):
    batch, plan = batch_and_plan()
    policy = policy_on(CUDA, llama, **OFFLOAD)
    assert homes(policy) == ON_HOST
    for _ in range(2):
        policy.learn(batch, plan)
        assert homes(policy) == ON_HOST
    state = state_of(policy)
    offloaded = policy.log_probs(batch, plan).batch["old_log_probs"]
    assert homes(policy) == ON_HOST
    policy.engine.onload()
    assert homes(policy) == ({"cuda"}, {"cpu"}), "moments visit a bucket at a time"
    assert_equal(state_of(policy), state)
    policy.engine.offload()
    assert homes(policy) == ON_HOST
    assert_equal(state_of(policy), state)

    stayed = policy_on(CUDA, llama)
    assert homes(stayed) == ({"cuda"}, {"cuda"})
    with torch.no_grad():
        for name, tensor in weights_of(stayed).items():
            tensor.copy_(state[name])
    torch.testing.assert_close(stayed.log_probs(batch, plan).batch["old_log_probs"], offloaded)


def test_a_policy_whose_steps_are_on_the_host_lies_there_and_moves_as_one_on_the_gpu(llama, tmp_path):
    batch, plan = batch_and_plan()
    policies = [policy_on(CUDA, llama), policy_on(CUDA, llama, offload_policy=True)]
    assert homes(policies[1]) == ON_HOST
    for policy in policies:
        for _ in range(2):
            policy.learn(batch, plan)
    stayed, there = map(state_of, policies)
    assert homes(policies[1]) == ON_HOST
    for name in stayed:
        # The last bits of a CPU's kernel are its own.
        torch.testing.assert_close(there[name], stayed[name], rtol=1e-4, atol=1e-6, msg=name)
    sent = dict(policies[1].engine.iter_full_params(torch.bfloat16))
    assert all(tensor.is_cuda for tensor in sent.values())
    policies[1].engine.save(tmp_path / "state")
    resumed = policy_on(CUDA, llama, offload_policy=True)
    resumed.engine.load(tmp_path / "state")
    assert_equal(state_of(resumed), there)
    scores = [p.log_probs(batch, plan).batch["old_log_probs"] for p in (policies[1], resumed)]
    assert torch.equal(*scores)


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("fsdp", [OFFLOAD, {"offload_policy": True}], ids=["moves", "steps on the host"])
def test_a_base_in_4_bits_lies_on_the_host_with_its_adapter_and_changes_no_number(llama, fsdp):
    batch, plan = batch_and_plan()
    in_4_bits = AdapterSource(4, 8, "all-linear", None, False, None, seed=3, merge=True, load_in_4bit=True)
    stayed, moved = policy_on(CUDA, llama, adapter=in_4_bits), policy_on(CUDA, llama, adapter=in_4_bits, **fsdp)
    assert homes(moved) == ON_HOST
    before = {name: tensor.cpu() for name, tensor in weights_of(moved).items() if tensor.dtype == torch.uint8}
    assert before
    assert_equal(before, {name: weights_of(stayed)[name].cpu() for name in before})
    for _ in range(2):
        for policy in (stayed, moved):
            policy.learn(batch, plan)
    assert homes(moved) == ON_HOST
    after = weights_of(moved)
    for name, weight in weights_of(stayed).items():
        if name in before:
            assert torch.equal(after[name], before[name])
        else:  # the last bits of a step on the CPU are its own
            torch.testing.assert_close(after[name], weight.cpu(), rtol=1e-4, atol=1e-6, msg=name)
    got, want = (policy.log_probs(batch, plan).batch["old_log_probs"] for policy in (moved, stayed))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_policy_whose_steps_are_on_the_host_holds_the_layers_at_work(tmp_path):
    """Weights are many and activations few, so the peak of an update is what is gathered and reduced."""
    batch, plan = batch_and_plan()
    deep = LlamaConfig(**(SHAPE | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16}))
    LlamaForCausalLM(deep).save_pretrained(tmp_path)
    policy = policy_on(CUDA, tmp_path, offload_policy=True)
    weights = sum(tensor.nbytes for tensor in weights_of(policy).values())
    policy.learn(batch, plan)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    policy.learn(batch, plan)
    assert torch.cuda.max_memory_allocated() - before < weights


def test_an_offloaded_policy_holds_no_memory_of_the_gpu_between_its_calls(tmp_path):
    batch, plan = batch_and_plan()
    wide = LlamaConfig(**(SHAPE | {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024}))
    LlamaForCausalLM(wide).save_pretrained(tmp_path)

    def work() -> Policy:
        policy = policy_on(CUDA, tmp_path, **OFFLOAD)
        policy.learn(batch, plan)
        policy.log_probs(batch, plan)
        torch.cuda.synchronize()
        return policy

    work()  # libraries keep their workspaces
    gc.collect()
    before = torch.cuda.memory_allocated()
    policy = work()
    weights = sum(tensor.nbytes for tensor in weights_of(policy).values())
    assert weights > 30 << 20 and torch.cuda.memory_allocated() - before < weights / 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_with_visiting_moments_holds_two_buckets_and_gives_the_numbers_of_one_without(dtype):
    """Peak of a step beyond weights and gradients; a bfloat16 bucket is also widened to float32."""
    elements, bucket = 1 << 26, 1 << 22

    def step(**options) -> tuple[torch.Tensor, int]:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, elements, device=CUDA).view(1 << 13, -1).to(dtype))
        adamw = AdamW(
            {weight: "w"}, betas=(0.9, 0.99), weight_decay=0.1, device=CUDA, bucket_elements=bucket, **options
        )
        gc.collect()
        for _ in range(2):
            weight.grad = torch.linspace(1, 2, elements, device=CUDA).view(1 << 13, -1).to(dtype)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            adamw.step(1e-3)
            peak = torch.cuda.max_memory_allocated() - before
        if options.get("offload"):
            assert all(tensor.is_pinned() for tensor in adamw.state[weight].values())
        return weight.detach().cpu(), peak

    (stayed, _), (visited, peak) = step(), step(offload=True)
    assert torch.equal(stayed, visited)
    moments_bytes = 2 * (2 * 4 * bucket)
    widened_bytes = 0 if dtype == torch.float32 else 6 * 4 * bucket  # weight, gradient, chance and its steps
    assert peak <= moments_bytes + widened_bytes + (1 << 20)


def test_rounding_on_a_gpu_is_that_of_a_cpu():
    wide = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_stochastically(wide.to(CUDA), 12345, 67).cpu(), round_stochastically(wide, 12345, 67))


def test_an_offloaded_state_is_saved_exported_and_loaded_where_it_lies(llama, tmp_path, monkeypatch):
    """Beside an engine that is awake a GPU has no room for parameters and moments."""
    batch, plan = batch_and_plan()
    policy, resumed = (policy_on(CUDA, llama, **OFFLOAD) for _ in range(2))
    policy.learn(batch, plan)
    with monkeypatch.context() as patch:
        for engine in (policy.engine, resumed.engine):
            patch.setattr(engine, "onload", lambda **_: pytest.fail("brought to the GPU"))
        policy.engine.save(tmp_path / "state")
        policy.engine.export_hf(tmp_path / "hf")
        resumed.engine.load(tmp_path / "state")

    assert homes(resumed) == ON_HOST
    assert_equal(state_of(resumed), state_of(policy))
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert_equal(exported, {name.removeprefix("model."): tensor for name, tensor in weights_of(policy).items()})
    norms = [p.learn(batch, plan)["actor/grad_norm"].result() for p in (policy, resumed)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_weights_for_a_sync_are_gathered_on_the_gpu(llama):
    policy = policy_on(CUDA, llama, **OFFLOAD)
    want = load_file(llama / "model.safetensors")
    for name, tensor in policy.engine.iter_full_params(torch.bfloat16):
        assert tensor.is_cuda and tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.cpu(), want[name].bfloat16()), name


def test_gathering_offloaded_weights_makes_nobody_wait(llama):
    policy = policy_on(CUDA, llama, **OFFLOAD)
    list(policy.engine.iter_full_params(torch.bfloat16))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sent = list(policy.engine.iter_full_params(torch.bfloat16))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(tensor.is_cuda for _, tensor in sent) and homes(policy) == ON_HOST
