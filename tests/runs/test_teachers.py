"""Whole runs with a teacher: a Llama that samples approaches what a Qwen2 of another size says of its samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from hrl.report.run_folder import read_jsonl
from tests.runs.in_process import in_process, run_in_process
from tests.runs.runner import TWO_ROWS, Runner

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
LOSS = "distillation.distillation_loss"
FIRST_LETTERS = 200
"""Tokens that the teacher gives nearly all of its probability to."""


@pytest.fixture(scope="module", autouse=True)
def this_process() -> Iterator[None]:
    with in_process():
        yield


@pytest.fixture(scope="module")
def teacher(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 that prefers the first tokens of the vocabulary, whatever it reads."""
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = AutoTokenizer.from_pretrained(runner.model)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight[0] = 0.0
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight[:FIRST_LETTERS] *= 20.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def steps_of(runner: Runner, teacher: Path, folder: Path, *changes: str) -> list[dict[str, Any]]:
    run_in_process(
        *runner.arguments(folder, *TWO_ROWS), "recipe=distillation",
        f"distillation.teacher_models.teacher_model.model_path={teacher}", "trainer.total_training_steps=6",
        "actor_rollout_ref.actor.optim.lr=3e-3", "actor_rollout_ref.rollout.n=4", *changes,
    )  # fmt: skip
    return [step for step in read_jsonl(folder / "metrics.jsonl") if "distillation/loss" in step]


def test_the_policy_nears_its_teacher(runner: Runner, teacher: Path, tmp_path: Path) -> None:
    steps = steps_of(runner, teacher, tmp_path / "run", f"{LOSS}.topk=16", "trainer.total_training_steps=6")
    losses, masses = ([step[f"distillation/{name}"] for step in steps] for name in ("loss", "student_mass"))
    assert losses[-1] < 0.9 * losses[0] and masses[-1] > masses[0]
    assert all(step["timing_s/ref"] > 0 and "actor/pg_loss" not in step for step in steps)


@pytest.mark.parametrize(
    "changes",
    [
        (f"{LOSS}.loss_mode=k2", f"{LOSS}.use_task_rewards=true", "actor_rollout_ref.actor.ppo_mini_batch_size=1"),
        (
            f"{LOSS}.loss_mode=k1",
            f"{LOSS}.use_policy_gradient=true",
            f"{LOSS}.loss_max_clamp=0.01",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=1",
        ),
    ],
    ids=["in the loss beside rewards, in two steps", "as a reward, clamped, of one sample"],
)
def test_what_the_teacher_says_of_sampled_tokens_is_learnt_from(
    runner: Runner, teacher: Path, tmp_path: Path, changes: tuple[str, ...]
) -> None:
    (step,) = steps_of(runner, teacher, tmp_path / "run", *changes, "trainer.total_training_steps=1")
    is_clamped = f"{LOSS}.loss_max_clamp=0.01" in changes
    assert abs(step["distillation/loss"]) > 0 and is_clamped == (abs(step["distillation/loss"]) < 0.0101)
    assert step["actor/grad_norm"] > 0 and "actor/pg_loss" in step
