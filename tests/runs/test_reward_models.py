"""Runs whose reward models come as they are published: with a tokenizer and a chat template of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.runs.in_process import run_in_process
from tests.runs.runner import TWO_ROWS, FinishedRun, Runner
from tests.trainer.ppo.test_reward_model_rows import (
    TEMPLATE,
    chat_of,
    classifier_of,
    language_model_of,
    tokenizer_of,
)

WORDS = "Say a number and a sum + -"


def scored_by(model: Path, *more: str) -> list[str]:
    """Arguments of a step whose rewards are a reward model's alone."""
    return [
        *TWO_ROWS,
        "reward.custom_reward_function.path=null",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={model}",
        "reward.reward_model.model.fsdp_config.dtype=float32",
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=1",
        *more,
    ]


def run_here(runner: Runner, folder: Path, arguments: list[str]) -> FinishedRun:
    run_in_process(*runner.arguments(folder, *arguments)[1:])
    return FinishedRun(folder, 0, "")


def check_scores_of_chats(run: FinishedRun, runner: Runner, model: Path, exact: float) -> None:
    """Each sample has the score that transformers' own classifier gives its chat."""
    classifier = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    tokenizer, special = AutoTokenizer.from_pretrained(model), AutoTokenizer.from_pretrained(runner.model)
    scores = []
    for sample in run.samples(1):
        answer = special.decode(special.encode(sample["response"]), skip_special_tokens=True)
        chat = chat_of(sample["question"], answer)
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        with torch.no_grad():
            scores.append(float(classifier(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits))
        found = sample["reward_parts"].get("reward_model", sample["score"])  # of a function alone there are no parts
        assert found == pytest.approx(scores[-1], rel=exact, abs=exact)
    assert len({*scores}) > 1 and run.metrics[0]["actor/grad_norm"] > 0


@pytest.mark.usefixtures("this_process")
def test_a_policy_is_scored_by_what_transformers_says_of_its_chats(runner: Runner, tmp_path: Path) -> None:
    folder = classifier_of(tmp_path / "rm", tokenizer_of(WORDS, TEMPLATE), positions=512)
    check_scores_of_chats(run_here(runner, tmp_path / "run", scored_by(folder)), runner, folder, 1e-4)


@pytest.mark.usefixtures("this_process")
@pytest.mark.parametrize("made", [classifier_of, language_model_of])
def test_steps_of_answers_are_paid_where_they_end(runner: Runner, tmp_path: Path, made: Any) -> None:
    folder = made(tmp_path / "prm", tokenizer_of(WORDS, TEMPLATE), positions=512)
    keys = {"step_token": "'<s>'", "step_separator": "' '", "weight": "2"}
    if made is language_model_of:
        keys["reward_tokens"] = "['+','-']"
    given = [f"reward.reward_model.{key}={value}" for key, value in keys.items()]
    run = run_here(runner, tmp_path / "run", scored_by(folder, *given))
    several = 0
    for sample in run.samples(1):
        text = sample["response"].replace("<|im_end|>", "")
        steps = len([piece for piece in text.split(" ") if piece.strip()])
        several += steps > 1
        mean = sample["reward_parts"]["reward_model"]
        assert sample["score"] == pytest.approx(mean, rel=1e-4)
        assert sample.get("shaped_score", sample["score"]) == pytest.approx(2 * steps * mean, rel=1e-3, abs=1e-4)
    assert several and run.metrics[0]["actor/grad_norm"] > 0


@pytest.mark.engine
def test_a_run_serves_its_reward_model_on_a_pool_of_its_own(runner: Runner, tmp_path: Path) -> None:
    """vLLM's server scores as transformers does, and has ended with the run, as the runner asserts."""
    # Heads of 32 numbers, of which vLLM's attention on a CPU asks.
    folder = classifier_of(tmp_path / "rm", tokenizer_of(WORDS, TEMPLATE), positions=256, width=128)
    apart = [
        "reward.reward_model.serve=true",
        "reward.reward_model.server_kwargs={dtype: float32, max_model_len: 256}",
        "trainer.resource_pools={global: [1], judge: [1]}",
        "trainer.role_pools={rm: judge}",
        "actor_rollout_ref.rollout.name=hf",
    ]
    run = runner(tmp_path / "run", *scored_by(folder, *apart))
    check_scores_of_chats(run, runner, folder, 1e-4)
