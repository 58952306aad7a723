"""Weights leave the trainer as they lie in the checkpoint, whatever form the model has in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Chunk, WeightConverter

from hrl.models.checkpoint_form import CheckpointForm
from hrl.workers.rollout.hf_engine import HfModelWriter
from hrl.workers.weight_sync.wire import WeightSyncError
from tests.models.tiny import make_batch, plain_log_probs, plan_rows, save_llama, save_mixture
from tests.workers.engine.ranks import parameters, policy_of

pytestmark = pytest.mark.usefixtures("world")

FAMILIES = ("qwen3_moe", "mixtral")


@pytest.fixture(scope="module", params=FAMILIES)
def mixture(request, tmp_path_factory) -> Path:
    return save_mixture(tmp_path_factory.mktemp(request.param), request.param)


def trained(folder: Path):
    """A policy that has left the weights of its folder."""
    policy, batch = policy_of(folder, "float32"), make_batch()
    policy.learn(batch, plan_rows(batch, 1, 2).ranks[0])
    return policy


def test_what_leaves_the_trainer_is_what_lies_in_the_folder(mixture):
    policy, want = policy_of(mixture, "float32"), load_file(mixture / "model.safetensors")
    got = dict(policy.engine.iter_full_params(torch.float32))
    assert len(want) > len(parameters(policy))  # experts are fused in memory
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in got.items()] == [
        tuple(spec) for spec in policy.engine.param_specs(torch.float32)
    ]


def test_an_export_loads_with_the_trained_weights(mixture, tmp_path):
    policy = trained(mixture)
    policy.engine.export_hf(tmp_path)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").named_parameters())
    ours = {name.removeprefix("model."): tensor for name, tensor in parameters(policy).items()}
    start = load_file(mixture / "model.safetensors")
    assert ours.keys() == loaded.keys() and all(torch.equal(loaded[name], ours[name]) for name in ours)
    assert not any(
        torch.equal(tensor, start[name]) for name, tensor in load_file(tmp_path / "model.safetensors").items()
    )


def test_a_sync_gives_another_model_the_trained_weights(mixture):
    policy, model = trained(mixture), AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    sent, writer = dict(policy.engine.iter_full_params(torch.float32)), HfModelWriter(model)
    writer.begin()
    writer.write(list(sent.items()))
    writer.finish()
    for name, tensor in parameters(policy).items():
        assert torch.equal(model.get_parameter(name.removeprefix("model.")), tensor), name
    assert all(torch.equal(writer.read_back(name), tensor) for name, tensor in sent.items())


def test_an_expert_that_was_not_sent_is_named(mixture):
    sent = load_file(mixture / "model.safetensors")
    lost = next(name for name in sent if ".experts.2." in name)
    writer = HfModelWriter(AutoModelForCausalLM.from_pretrained(mixture))
    writer.begin()
    writer.write([(name, tensor) for name, tensor in sent.items() if name != lost])
    with pytest.raises(WeightSyncError, match=rf"nothing for {lost}$"):
        writer.finish()


def test_a_packed_mixture_has_the_log_probs_of_plain_forwards(mixture):
    batch = make_batch()
    got = policy_of(mixture, "float32").log_probs(batch, plan_rows(batch, 1, 2).ranks[0])
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        want = plain_log_probs(model, batch, 1.0)
    torch.testing.assert_close(got.batch["old_log_probs"], want, rtol=2e-5, atol=5e-6)


def test_a_persistent_buffer_goes_along_in_its_own_dtype(tmp_path):
    policy = policy_of(save_llama(tmp_path), "float32")
    policy.engine.module.model.register_buffer("bias_of_the_router", torch.tensor([0.1], dtype=torch.float64))
    policy.engine.form = CheckpointForm.of(policy.engine.module.model)
    *_, (name, last) = policy.engine.iter_full_params(torch.bfloat16)
    assert name == "bias_of_the_router" and last.dtype == torch.float64 and last.item() == 0.1
    assert tuple(policy.engine.param_specs(torch.bfloat16)[-1]) == (name, torch.float64, (1,))


def test_a_model_that_merges_parameters_on_the_way_back_is_refused_with_their_names(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_llama(tmp_path))
    targets = [f"self_attn.{x}_proj.weight" for x in "qkv"]
    model._weight_conversions = [WeightConverter("self_attn.qkv.weight", targets, [Chunk(dim=0)])]
    with pytest.raises(
        ValueError, match=rf"LlamaForCausalLM at {tmp_path}: model\.layers\.0\.self_attn\.q_proj\.weight"
    ):
        CheckpointForm.of(model)
