"""What text cannot move is frozen, and nothing else is: found, trained around, resumed, exported and synced."""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hrl.models.towers import unreachable_parameters
from hrl.workers.engine.checkpoint import STATE_FILE
from hrl.workers.policy import Policy
from hrl.workers.rollout.hf_engine import HfModelWriter
from hrl.workers.rollout.scripted import DictWriter, Script
from hrl.workers.rollout.vllm_worker import is_kept
from hrl.workers.weight_sync.receiver import ModelWriter, WeightReceiver
from hrl.workers.weight_sync.sender import WeightSync
from hrl.workers.weight_sync.shared_memory import SharedMemorySender
from hrl.workers.weight_sync.wire import Manifest, WeightSyncError
from tests.models.tiny import (
    SHAPE,
    actor_config,
    critic_config,
    fsdp_config,
    make_batch,
    model_config,
    plan_rows,
    save_gemma3,
    save_llama,
    save_mixture,
)
from tests.workers.asked import Actor, Critic
from tests.workers.engine.ranks import CPU, parameters, policy_of

pytestmark = pytest.mark.usefixtures("world")

TOWERS = ("model.model.vision_tower.", "model.model.multi_modal_projector.")


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gemma3(tmp_path_factory.mktemp("gemma3"))


def train(policy: Policy, steps: int) -> None:
    batch = make_batch()
    for _ in range(steps):
        policy.learn(batch, plan_rows(batch, 1, 2).ranks[0])


# ---------------------------------------------------------------------------------------------- what is found


def test_the_towers_of_a_multimodal_model_are_frozen_and_have_no_moments(gemma3, caplog) -> None:
    with caplog.at_level(logging.INFO, "hrl.models.towers"):
        policy = policy_of(gemma3, "float32")
    named = dict(policy.engine.module.named_parameters())
    frozen = {name for name, parameter in named.items() if not parameter.requires_grad}
    assert frozen == {name for name in named if name.startswith(TOWERS)} == policy.engine.frozen
    assert set(policy.engine.optimizer.moment_steps) == named.keys() - frozen
    assert (
        "Gemma3ForConditionalGeneration: text gives no gradient to model.vision_tower, model.multi_modal_projector"
        in (caplog.text)
    )
    train(policy, 2)
    assert set(policy.engine.optimizer.moment_steps.values()) == {2}


def test_the_towers_of_a_critic_are_frozen_too_and_its_head_is_not(gemma3) -> None:
    critic = Critic(model_config(gemma3), critic_config(), fsdp_config("float32"), device=CPU, total_steps=10)
    frozen = critic.engine.frozen
    assert frozen and all("vision_tower" in name or "multi_modal_projector" in name for name in frozen)
    assert "model.score.weight" in critic.engine.optimizer.moment_steps


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_a_text_model_has_nothing_to_freeze_experts_that_a_text_does_not_visit_included(family, tmp_path) -> None:
    folder = save_llama(tmp_path) if family == "llama" else save_mixture(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert unreachable_parameters(model) == ()


class Bridged(LlamaForCausalLM):
    """A wrapper around a decoder with a module before it, one behind it, and one beside it."""

    def __init__(self) -> None:
        super().__init__(LlamaConfig(**SHAPE))
        self.decoder = self.model
        self.model = nn.Module()
        self.model.embed_tokens = self.decoder.embed_tokens
        self.before, self.behind, self.beside = (nn.Linear(32, 32) for _ in range(3))
        self.model.forward = self.around

    def around(self, input_ids, **kwargs):
        output = self.decoder(inputs_embeds=self.before(self.model.embed_tokens(input_ids)), **kwargs)
        output.last_hidden_state = self.behind(output.last_hidden_state)
        return output


def test_what_stands_before_or_behind_the_decoder_is_reached_and_what_stands_beside_it_is_not() -> None:
    model = Bridged()
    assert set(unreachable_parameters(model)) == {"beside.weight", "beside.bias"}
    assert "forward" not in model.decoder.__dict__, "the decoder has its own forward again"


def test_a_model_that_does_not_run_around_its_decoder_is_trained_whole_and_that_is_said(caplog) -> None:
    model = Bridged()
    model.model.forward = lambda **kwargs: model.decoder(**kwargs).missing
    with caplog.at_level(logging.WARNING):
        assert unreachable_parameters(model) == ()
    assert "Bridged does not run without its decoder (AttributeError" in caplog.text
    assert "forward" not in model.decoder.__dict__


# ---------------------------------------------------------------------------------------------- resume and export


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_resumed_run_is_bit_identical(gemma3, tmp_path, stored) -> None:
    def build() -> Policy:
        precision = fsdp_config("float32", model_dtype=stored)
        return Actor(model_config(gemma3), actor_config(), precision, device=CPU, total_steps=10, seed=7)

    straight = build()
    start = parameters(straight)
    train(straight, 3)
    straight.engine.save(tmp_path / "state")
    train(straight, 2)
    resumed = build()
    resumed.engine.load(tmp_path / "state")
    train(resumed, 2)
    want, got = parameters(straight), parameters(resumed)
    for name, value in want.items():
        assert torch.equal(got[name], value), name
        assert torch.equal(start[name], value) == name.startswith(TOWERS), name
    assert resumed.engine.optimizer.moment_steps == straight.engine.optimizer.moment_steps
    if stored == "bfloat16":
        other = Actor(
            model_config(gemma3), actor_config(), fsdp_config("float32", model_dtype=stored), device=CPU, total_steps=10
        )
        train(other, 5)
        assert any(not torch.equal(value, want[name]) for name, value in parameters(other).items()), "another seed"


def test_each_parameter_resumes_with_its_own_step_count(tmp_path) -> None:
    """The first parameter had no gradient for two steps: its count, saved for all, would make the others jump."""
    folder = save_llama(tmp_path / "model")

    def late(policy: Policy) -> None:
        first = policy.engine.optimizer.parameters[0]
        policy.engine.optimizer.rule.steps[first] = 0
        for moment in policy.engine.optimizer.rule.state[first].values():
            moment.zero_()

    straight = policy_of(folder)
    train(straight, 2)
    late(straight)
    straight.engine.save(tmp_path / "state")
    resumed = policy_of(folder)
    resumed.engine.load(tmp_path / "state")
    assert sorted(set(resumed.engine.optimizer.moment_steps.values())) == [0, 2]
    train(straight, 1)
    train(resumed, 1)
    want, got = parameters(straight), parameters(resumed)
    assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("count, is_read", [(2, True), (0, False)])
def test_the_older_format_is_read_unless_it_lost_the_step_count(tmp_path, count, is_read) -> None:
    folder = save_llama(tmp_path / "model")
    saved = policy_of(folder)
    train(saved, 2)
    saved.engine.save(tmp_path / "state")
    file = tmp_path / "state" / STATE_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 3, "moment_steps": count}))
    resumed = policy_of(folder)
    if not is_read:
        with pytest.raises(ValueError, match="lost the step count.*start anew|lost the step count.*Start anew"):
            resumed.engine.load(tmp_path / "state")
        return
    resumed.engine.load(tmp_path / "state")
    assert set(resumed.engine.optimizer.moment_steps.values()) == {2}


def test_the_export_has_the_towers(gemma3, tmp_path) -> None:
    policy = policy_of(gemma3, "float32")
    train(policy, 1)
    policy.engine.export_hf(tmp_path)
    exported, own = (load_file(folder / "model.safetensors") for folder in (tmp_path, gemma3))
    assert exported.keys() == own.keys()
    for name in own:
        assert torch.equal(exported[name], own[name]) == ("language_model" not in name), name


# ---------------------------------------------------------------------------------------------- sync


class InThread:
    """A receiver in this thread."""

    def __init__(self, writer: ModelWriter) -> None:
        self.receiver = WeightReceiver(writer, "test")

    def _done(self, function, *args) -> Future:
        future: Future = Future()
        try:
            future.set_result(function(*args))
        except WeightSyncError as error:
            future.set_exception(error)
        return future

    def weights_begin(self, manifest, handle, version):
        plain = json.loads(json.dumps(manifest.to_plain()))  # as it travels to an engine's process
        return self._done(self.receiver.begin, Manifest.from_plain(plain), handle, version)

    def weights_load(self, index):
        return self._done(self.receiver.load, index)

    def weights_commit(self):
        return self._done(lambda: [self.receiver.commit()])

    def weights_abort(self, reason):
        return self._done(self.receiver.abort)


def sync(policy: Policy, writer: ModelWriter, kept: list[str]) -> None:
    manifest = Manifest.build(policy.engine.param_specs(torch.float32), 1 << 20, kept)
    sync = WeightSync(manifest, SharedMemorySender(manifest), InThread(writer), timeout_s=30)
    try:
        sync.push(1, policy.engine.iter_full_params(torch.float32))
    finally:
        sync.close()


def test_a_sync_sends_what_is_trained_and_the_engine_keeps_the_rest(gemma3) -> None:
    policy = policy_of(gemma3, "float32")
    train(policy, 1)
    dictionary = DictWriter(Script())
    sync(policy, dictionary, policy.engine.frozen_names())
    own = load_file(gemma3 / "model.safetensors")
    assert {spec.name for spec in policy.engine.param_specs(torch.float32)} == dictionary.weights.keys()
    assert dictionary.weights.keys() == {name for name in own if name.startswith("language_model")}
    assert sorted(own.keys() - dictionary.weights.keys()) == policy.engine.frozen_names()

    engine = AutoModelForCausalLM.from_pretrained(gemma3, dtype=torch.float32)
    sync(policy, HfModelWriter(engine), policy.engine.frozen_names())
    for name, value in parameters(policy).items():
        assert torch.equal(engine.get_parameter(name.removeprefix("model.")), value), name


def test_a_tensor_that_is_neither_sent_nor_to_be_kept_is_missing(gemma3) -> None:
    policy = policy_of(gemma3, "float32")
    engine = AutoModelForCausalLM.from_pretrained(gemma3, dtype=torch.float32)
    with pytest.raises(WeightSyncError, match=r"sent nothing for vision_tower"):
        sync(policy, HfModelWriter(engine), policy.engine.frozen_names()[:-1])


def test_an_engine_that_fuses_and_renames_keeps_whole_towers_only() -> None:
    kept = ["model.vision_tower.layers.0.q_proj.weight", "model.vision_tower.layers.0.k_proj.weight"]
    loaded = {"language_model.model.norm.weight"}
    assert is_kept("vision_tower.layers.0.qkv_proj.weight", kept, loaded)
    assert not is_kept("language_model.model.layers.0.qkv_proj.weight", kept, loaded)
    assert not is_kept("audio_tower.conv.weight", kept, loaded)
    assert not is_kept("vision_tower.layers.0.qkv_proj.weight", kept, loaded | {"vision_tower.head.weight"})
    assert not is_kept("vision_tower.layers.0.qkv_proj.weight", [], loaded)
