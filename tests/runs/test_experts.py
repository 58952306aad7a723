"""A run of a mixture whose experts two ranks share out, and whose update takes the choices of real vLLM engines."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hrl.models.source import resolve_model
from tests.runs.runner import Runner

pytestmark = pytest.mark.engine


def save(folder: Path) -> Path:
    """A random mixture of eight experts, of which a token visits two, with the bundled model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("bundled:smollm2-135m-instruct"))
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the least that vLLM computes on a CPU
        max_position_embeddings=256,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_what_the_engine_chose_is_what_the_trainer_would_have_chosen_in_float32(runner: Runner, tmp_path: Path) -> None:
    """Choices of another row, token or layer would not be those of the trainer's routers.

    Weights that came from another expert, or rank, would not give the sampler's log-probs.
    """
    model = save(tmp_path / "model")
    asked = (
        f"actor_rollout_ref.model.path={model}",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.expert_parallel_size=2",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.router_replay.mode=R3",
        "actor_rollout_ref.actor.router_aux_loss_coef=0.01",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",  # so that a pass for old log-probs comes first
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",  # and rows are cut into micro-batches
        "actor_rollout_ref.actor.optim.lr=1e-3",  # by which weights move, whose sync the second step samples from
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    )
    run = runner(tmp_path / "run", *asked)
    assert [record["step"] for record in run.metrics] == [1, 2]
    for record in run.metrics:
        assert record["moe/replayed"] == 1 and record["moe/router_agreement"] > 0.9  # weights move between the steps
        assert record["rollout/logprob_diff_max"] < 1e-4
        assert 0 < record["moe/router_entropy"] < math.log(8) and record["moe/aux_loss"] > 2
        assert record["moe/max_expert_share"] == max(record[f"moe/layer_{n}/max_expert_share"] for n in range(2))
