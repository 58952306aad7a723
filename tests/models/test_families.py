"""Families that were once trained wrongly, through the policy: log-probs by the definition, again, packed otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hrl.models.ops.rope import fix_rope_frequencies
from hrl.workers.policy import Policy
from tests.models.tiny import (
    SHAPE,
    actor_config,
    fsdp_config,
    make_batch,
    model_config,
    plain_log_probs,
    plan_rows,
)
from tests.workers.asked import Actor
from tests.workers.engine.ranks import CPU, gradients

pytestmark = pytest.mark.usefixtures("world")

DROPOUT = {"attention_dropout": 0.3, "residual_dropout": 0.3}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [6.0] * 4, "rope_theta": 1e4}
FAMILIES = {
    "seed_oss": DROPOUT | {"head_dim": 8},
    "starcoder2": DROPOUT | {"embedding_dropout": 0.3},
    "mixtral": {"num_local_experts": 4, "router_jitter_noise": 0.5, "attention_dropout": 0.3},
    "phi3": {"original_max_position_embeddings": 8, "rope_parameters": LONGROPE, "resid_pdrop": 0.3},
    "llama": {"max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "factor": 8.0}},
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of random models by family."""

    def save(family: str, **changes) -> Path:
        torch.manual_seed(4)
        path = tmp_path_factory.mktemp(family)
        config = CONFIG_MAPPING[family](**(SHAPE | TOKENS | FAMILIES.get(family, {}) | changes))
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        return path

    return save


def policy_of(path: Path, *, checkpointing: bool = False) -> Policy:
    model = model_config(path, enable_gradient_checkpointing=checkpointing, max_model_len=16)
    return Actor(model, actor_config(), fsdp_config("float32"), device=CPU, total_steps=None)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_the_definition_before_and_in_the_update(family, folder):
    """Of an update on policy, the ratio to another pass over the same rows in another packing is 1."""
    path = folder(family)
    policy, batch = policy_of(path, checkpointing=True), make_batch()
    old = policy.log_probs(batch, plan_rows(batch, 1, 3).ranks[0]).batch["old_log_probs"]
    again = policy.log_probs(batch, plan_rows(batch, 1, 2).ranks[0]).batch["old_log_probs"]
    torch.testing.assert_close(again, old, rtol=0, atol=5e-5)

    own = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    fix_rope_frequencies(own, 16)
    torch.testing.assert_close(old, plain_log_probs(own, batch, 1.0), rtol=0, atol=5e-5)

    batch.batch["old_log_probs"] = old
    metrics = policy.learn(batch, plan_rows(batch, 1, 1).ranks[0])
    assert abs(metrics["actor/ppo_kl"].result()) < 1e-5
    assert metrics["actor/pg_clipfrac"].result() == 0.0


def test_recomputed_layers_run_twice_and_give_the_same_gradients(folder):
    """In evaluation mode, in which transformers' own checkpointing would be off."""
    path, batch = folder("seed_oss"), make_batch()
    runs, got = [], []
    for checkpointing in (False, True):
        policy = policy_of(path, checkpointing=checkpointing)
        assert not any(module.training for module in policy.engine.module.model.modules())
        layer = policy.engine.module.model.model.layers[0]
        calls: list[int] = []
        layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        got.append(gradients(policy, batch, plan_rows(batch, 1, 1).ranks[0]))
        runs.append(len(calls))
    assert runs == [1, 2]
    for name, gradient in got[0].items():
        assert torch.equal(gradient, got[1][name]), name


def test_what_is_switched_off_is_said(folder, caplog):
    policy_of(folder("starcoder2"))
    said = "attention_dropout=0.3, residual_dropout=0.3, embedding_dropout=0.3 switched off: the sampler has none"
    assert said in caplog.text
