"""Weights in 4 bits under an adapter, against a plain model that has the same numbers in full."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hrl.models.adapter import AdapterSource, decoder_linears, is_part
from hrl.models.four_bit import BYTES_PER_WEIGHT, FourBitError, dequantised, quantised, rounded
from hrl.models.hf_config import load_config
from hrl.workers.engine.checksum import WeightsDifferError
from hrl.workers.engine.host_memory import HostCopies, local
from hrl.workers.requests import LogProbRequest
from tests.models.tiny import (
    actor_config,
    critic_config,
    fsdp_config,
    make_batch,
    model_config,
    optim_config,
    plan_rows,
    run_ranks,
    save_llama,
    save_qwen2,
)
from tests.workers.asked import Actor, Critic, all_at_once
from tests.workers.engine.fake_device import DEVICE, FakeDevice
from tests.workers.engine.ranks import CPU, flip, full, gradients, offloading_changes_nothing

pytestmark = [pytest.mark.usefixtures("bitsandbytes", "world"), pytest.mark.cluster]

PLAIN = AdapterSource(
    rank=4,
    alpha=6,
    target_modules="all-linear",
    exclude_modules=("k_proj",),
    use_rslora=False,
    path=None,
    seed=3,
    merge=True,
)
IN_4_BITS = replace(PLAIN, load_in_4bit=True)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has biases; the rows of some of its layers are no multiple of a block."""
    return save_qwen2(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def same(qwen: Path, bitsandbytes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model whose weights are in full what they are in 4 bits."""
    model = AutoModelForCausalLM.from_pretrained(qwen)
    with torch.no_grad():
        for linear in decoder_linears(model).values():
            linear.weight.copy_(rounded(linear.weight))
    folder = tmp_path_factory.mktemp("same")
    model.save_pretrained(folder)
    return folder


def actor_of(path: Path, adapter: AdapterSource, dtype: str = "float32", **fsdp: Any) -> Actor:
    config = actor_config(optim=optim_config(lr=3e-2))
    return Actor(
        model_config(path, adapter=adapter), config, fsdp_config(dtype, **fsdp), device=CPU, total_steps=8, seed=5
    )


def learnt(actor: Actor, seed: int = 0) -> Actor:
    batch = make_batch(seed=seed)
    actor.learn(batch, plan_rows(batch, 1, 2).ranks[0])
    return actor


def trained(actor: Actor) -> dict[str, torch.Tensor]:
    names = actor.engine.optimizer.names
    return {name: full(parameter.detach()) for parameter, name in names.items()}


def test_numbers_are_those_that_bitsandbytes_gives_its_own_layer():
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(6, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")
    packed = quantised(weight)

    wide = dequantize_4bit(*quantize_4bit(weight.float(), blocksize=64, quant_type="nf4"))
    assert torch.equal(dequantised(packed, 192, torch.float32), wide)
    assert torch.equal(dequantised(packed, 192, torch.bfloat16), dequantize_4bit(codes, state))
    assert packed.nbytes == weight.numel() * BYTES_PER_WEIGHT


_UNDER_BFLOAT16 = """
import sys

import torch

sys.path.append({!r})
from hrl.models.four_bit import rounded

weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
torch.set_default_dtype(torch.bfloat16)
found = rounded(weight)
assert torch.get_default_dtype() == torch.bfloat16
torch.save(found, {!r})
"""


def test_weights_are_rounded_alike_where_the_default_dtype_is_another(tmp_path):
    """In a process of its own, as an engine's is: bitsandbytes keeps the tables that its first call has made."""
    file = str(tmp_path / "found.pt")
    subprocess.run([sys.executable, "-c", _UNDER_BFLOAT16.format(sys.path[-1], file)], check=True, timeout=600)
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(torch.load(file), rounded(weight))


@pytest.mark.parametrize("width", [1, 63, 64, 100])
def test_rows_of_any_length_are_rounded_alone_and_only_once(width):
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(5, width, generator=generator) * torch.rand(5, 1, generator=generator)
    weight[3] = 0
    found = rounded(weight)

    assert torch.equal(found[1:3], rounded(weight[1:3])), "whatever rows a rank has"
    assert torch.equal(rounded(found), found)
    assert torch.equal(found[3], torch.zeros(width))
    largest = weight.bfloat16().float().abs().max(1).values  # widths up to a block have one magnitude a row
    half_step = (1.0 - 0.6961928) / 2  # the widest gap between two values of NF4
    assert ((found - weight).abs().max(1).values <= largest * (half_step + 0.01)).all()


def test_log_probs_and_gradients_are_those_of_the_same_numbers_in_full(qwen, same):
    ours, plain = learnt(actor_of(qwen, IN_4_BITS)), learnt(actor_of(same, PLAIN))
    batch, plan = make_batch(seed=4), plan_rows(make_batch(seed=4), 1, 3).ranks[0]
    mine, theirs = gradients(ours, batch, plan), gradients(plain, batch, plan)

    assert mine.keys() == theirs.keys() and all(".lora_" in name for name in mine)
    for name, gradient in mine.items():
        assert torch.allclose(gradient, theirs[name], rtol=1e-5, atol=1e-6), name
    found = [actor.log_probs(batch).batch["old_log_probs"] for actor in (ours, plain, actor_of(qwen, PLAIN))]
    assert torch.allclose(found[0], found[1], rtol=0, atol=1e-6)
    assert (found[0] - found[2]).abs().max() > 1e-3, "4 bits are not 16"
    for name, weight in trained(ours).items():
        assert torch.allclose(weight, trained(plain)[name], rtol=0, atol=1e-6), name
    without = LogProbRequest(plan=all_at_once(batch), temperature=1.0, without_adapter=True)
    references = [actor.compute_log_prob(batch, without).batch["old_log_probs"] for actor in (ours, plain)]
    assert torch.allclose(*references, rtol=0, atol=1e-6)


def test_log_probs_in_bfloat16_are_those_of_the_same_numbers_in_full_bit_for_bit(qwen, same):
    batch = make_batch(seed=4)
    ours, plain = (
        actor_of(path, adapter, "bfloat16", model_dtype="float32")
        for path, adapter in ((qwen, IN_4_BITS), (same, PLAIN))
    )
    found = [actor.log_probs(batch).batch["old_log_probs"] for actor in (ours, plain)]
    assert torch.equal(*found) and found[0].any()


def test_what_is_sent_merged_is_the_adapter_on_the_rounded_weights(qwen, same):
    ours, plain = learnt(actor_of(qwen, IN_4_BITS)), learnt(actor_of(same, PLAIN))
    mine = {name: tensor.clone() for name, tensor in ours.engine.iter_full_params(torch.float32)}

    assert ours.engine.param_specs(torch.float32) == plain.engine.param_specs(torch.float32)
    for name, tensor in plain.engine.iter_full_params(torch.float32):
        assert torch.allclose(mine[name], tensor, rtol=0, atol=1e-6), name
    alone = actor_of(qwen, replace(IN_4_BITS, merge=False)).engine
    assert set(alone.frozen_names()) == set(load_file(qwen / "model.safetensors"))
    assert ours.engine.flops == plain.engine.flops


def test_layers_take_a_quarter_and_a_little_of_their_bytes_in_bfloat16(qwen):
    engine = actor_of(qwen, IN_4_BITS, "bfloat16", model_dtype="float32").engine
    held = {name: p for name, p in engine.module.named_parameters() if p.dtype == torch.uint8}

    assert len(held) == 2 * 7 and all("embed" not in name and "head" not in name for name in held)
    gate = held["model.model.layers.0.mlp.gate_proj.base_layer.weight"]
    inputs = load_config(str(qwen), {}, trust_remote_code=False).hidden_size
    assert gate.shape[1] == -(-inputs // 64) * 34, "of a row that is no multiple of a block, the last one is whole"
    others = {p.dtype for name, p in engine.module.named_parameters() if name not in held and ".lora_" not in name}
    assert others == {torch.bfloat16}


def test_a_critic_learns_beside_weights_in_4_bits(qwen, same):
    scores = []
    for path, adapter in ((qwen, IN_4_BITS), (same, PLAIN)):
        config = critic_config(optim=optim_config(lr=3e-2))
        critic = Critic(model_config(path, adapter=adapter), config, fsdp_config("float32"), device=CPU, total_steps=8)
        for seed in range(2):
            batch = make_batch(seed=seed)
            critic.learn(batch, plan_rows(batch, 1, 2).ranks[0])
        scores.append(critic.scores(make_batch(seed=8)).batch["rm_scores"])
    assert torch.allclose(*scores, rtol=1e-5, atol=1e-6) and scores[0].abs().max() > 1e-3


def test_a_run_goes_on_bit_for_bit_and_notices_a_bit_that_flips(qwen, tmp_path):
    actor = learnt(actor_of(qwen, IN_4_BITS, "bfloat16", model_dtype="float32"))
    actor.engine.save(tmp_path)
    held = load_file(next(tmp_path.glob("shard-*")))
    assert all(".lora_" in name for name in held), "the model is rounded again when it is loaded"
    expected = trained(learnt(actor, seed=1))
    resumed = actor_of(qwen, replace(IN_4_BITS, seed=99), "bfloat16", model_dtype="float32")
    resumed.engine.load(tmp_path)
    found = trained(learnt(resumed, seed=1))
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())

    flip(actor.engine.module, "model.model.layers.1.mlp.up_proj.base_layer.weight", 2)
    with pytest.raises(WeightsDifferError, match="the model beside the adapter"):
        actor.engine.save(tmp_path / "again")
    other = actor_of(save_llama(tmp_path / "llama"), IN_4_BITS, "bfloat16", model_dtype="float32")
    with pytest.raises(ValueError, match="an adapter of another model"):
        other.engine.load(tmp_path)


def test_without_the_package_it_is_refused_with_the_way_out(qwen, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(FourBitError, match=r"load_in_4bit=true needs bitsandbytes, .* on cpu .* hrl\[bitsandbytes\]"):
        actor_of(qwen, IN_4_BITS)


def test_weights_in_4_bits_leave_the_device_once_and_come_back_as_their_bytes(qwen):
    """`param_offload`: a frozen weight's home on the host stays what it is, and only what is trained returns to it."""
    module = learnt(actor_of(qwen, IN_4_BITS)).engine.module
    before = {name: full(parameter.detach()) for name, parameter in module.named_parameters()}
    copies = HostCopies(module, DEVICE)
    copies.offload(changed=False)
    held = {name: local(parameter.detach()) for name, parameter in module.named_parameters()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in held.items())
    packed = [tensor.nbytes for tensor in held.values() if tensor.dtype == torch.uint8]
    with FakeDevice() as recorded:
        copies.onload()
        assert {p.device for p in module.parameters()} == {DEVICE}
        assert recorded.held_bytes == sum(tensor.nbytes for tensor in held.values())
        moved = [each for each in recorded.copies if each[0] == "in"]
        assert len(packed) == 2 * 7 and all(("in", num_bytes) in moved for num_bytes in packed)
        copies.offload(changed=True)
    back = sum(num_bytes for way, num_bytes in recorded.copies if way == "out")
    assert back == sum(tensor.nbytes for name, tensor in held.items() if is_part(name))
    assert {p.dtype for p in module.parameters()} == {torch.uint8, torch.float32}


def two_ranks(rank: int, path: str, folder: str) -> dict[str, Any]:
    """What two ranks have learnt, and have after a resume from one rank's checkpoint; whether offloading matters."""
    is_same = offloading_changes_nothing(rank, Path(path), Path(folder).with_name("moved"), IN_4_BITS)
    actor = actor_of(Path(path), IN_4_BITS)
    batch = make_batch(seed=0)
    plan = plan_rows(batch, 2, 2)
    actor.learn(batch[list(plan.rows[rank])], plan.ranks[rank])
    found = {f"sent {name}": tensor.clone() for name, tensor in actor.engine.iter_full_params(torch.float32)}
    assert sum(p.dtype == torch.uint8 for p in actor.engine.module.parameters()) == 2 * 7
    actor.engine.load(Path(folder))
    return found | {f"loaded {name}": tensor for name, tensor in trained(actor).items()} | {"offloads": is_same}


def test_two_ranks_learn_what_one_does_and_load_what_it_saved_wherever_weights_lie(qwen, tmp_path):
    one = learnt(actor_of(qwen, IN_4_BITS))
    one.engine.save(tmp_path / "saved")
    first, second = run_ranks(2, tmp_path / "ranks", two_ranks, str(qwen), str(tmp_path / "saved"))

    assert first["offloads"] and second["offloads"], "param_offload, optimizer_offload and offload_policy move bytes"
    for name, tensor in one.engine.iter_full_params(torch.float32):
        assert torch.allclose(first[f"sent {name}"], tensor, rtol=0, atol=1e-6), name
        assert torch.equal(first[f"sent {name}"], second[f"sent {name}"])
    assert all(torch.equal(first[f"loaded {name}"], tensor) for name, tensor in trained(one).items())
