"""Runs whose reward models come as they are published: with a tokenizer and a chat template of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.runs.in_process import in_process, run_in_process
from tests.runs.runner import TWO_ROWS, FinishedRun, Runner
from tests.trainer.ppo.test_reward_model_rows import TEMPLATE, chat_of, classifier_of, tokenizer_of


@pytest.fixture(scope="module", autouse=True)
def process() -> Iterator[None]:
    with in_process():
        yield


def test_a_policy_is_scored_by_what_transformers_says_of_its_chats(runner: Runner, tmp_path: Path) -> None:
    words = tokenizer_of("Say a number and a sum", TEMPLATE)
    folder = classifier_of(tmp_path / "rm", words, positions=512)
    run_in_process(
        *runner.arguments(tmp_path / "run", *TWO_ROWS)[1:],
        "reward.custom_reward_function.path=null",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={folder}",
        "reward.reward_model.model.fsdp_config.dtype=float32",
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=1",
    )
    run = FinishedRun(tmp_path / "run", 0, "")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer, special = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(runner.model)
    scores = []
    for sample in run.samples(1):
        answer = special.decode(special.encode(sample["response"]), skip_special_tokens=True)
        chat = chat_of(sample["question"], answer)
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        with torch.no_grad():
            scores.append(float(model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits))
        assert sample["reward_parts"]["reward_model"] == pytest.approx(scores[-1], rel=1e-4, abs=1e-5)
    assert len({*scores}) > 1 and run.metrics[0]["actor/grad_norm"] > 0


def test_steps_of_answers_are_paid_where_they_end(runner: Runner, tmp_path: Path) -> None:
    words = tokenizer_of("Say a number and a sum", TEMPLATE)
    folder = classifier_of(tmp_path / "prm", words, positions=512)
    run_in_process(
        *runner.arguments(tmp_path / "run", *TWO_ROWS)[1:],
        "reward.custom_reward_function.path=null",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={folder}",
        "reward.reward_model.step_token='<s>'",
        "reward.reward_model.step_separator=' '",
        "reward.reward_model.weight=2",
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=1",
    )
    run = FinishedRun(tmp_path / "run", 0, "")
    several = 0
    for sample in run.samples(1):
        text = sample["response"].replace("<|im_end|>", "")
        steps = len([piece for piece in text.split(" ") if piece.strip()])
        several += steps > 1
        mean = sample["reward_parts"]["reward_model"]
        assert sample["score"] == pytest.approx(mean, rel=1e-4)
        assert sample.get("shaped_score", sample["score"]) == pytest.approx(2 * steps * mean, rel=1e-3, abs=1e-4)
    assert several and run.metrics[0]["actor/grad_norm"] > 0
