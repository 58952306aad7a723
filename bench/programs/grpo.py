"""GRPO on the bundled addition task, by hrl's command and by TRL's trainer: the same model, prompts and settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.programs.program import Ran, run

SAMPLES = 8
_MODEL = "bundled:smollm2-135m-instruct"
_DEADLINE_S = 600
# Of samples of one model for the same sums: standard deviations of a length, and of a reward of 0 or 1 of which a fifth
# is 1. Two means may be four standard errors of their difference apart.
_STD_TOKENS, _STD_REWARD, _ERRORS = 11.0, 0.4, 4.0


def hrl(folder: Path, *, steps: int, prompts: int) -> Ran:
    """Run hrl's quickstart as its users do, with a number of steps and prompts, and without validation."""
    overrides = {
        "trainer.total_training_steps": steps,
        "data.train_batch_size": prompts,
        "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
        "trainer.val_before_train": "false",
        "trainer.test_freq": -1,
        "trainer.default_local_dir": folder,
    }
    command = [sys.executable, "-m", "hrl.trainer.main_ppo", *(f"{key}={value}" for key, value in overrides.items())]
    return run(command, folder / "metrics.jsonl", "timing_s/step", deadline_s=_DEADLINE_S)


def trl(folder: Path, sampled: Path, *, steps: int, config: Mapping[str, Any]) -> Ran:
    """Run TRL's trainer on the prompts that a run of hrl sampled for, in the same order.

    Args:
        folder: Its own.
        sampled: The run folder of hrl.
        steps: How many of its steps.
        config: Members of `GRPOConfig`.
    """
    from hrl.models.source import resolve_model

    rows = [row for step in range(1, steps + 1) for row in _prompts(sampled / "rollouts" / f"step_{step}.jsonl")]
    asked = {
        "model": str(resolve_model(_MODEL)),
        "questions": [row["question"] for row in rows],
        "answers": [row["ground_truth"] for row in rows],
        "steps": steps,
        "n": SAMPLES,
        "folder": str(folder),
        "config": dict(config),
    }
    folder.mkdir()
    command = [sys.executable, "-m", "bench.programs.trl_grpo", json.dumps(asked)]
    return run(command, folder / "metrics.jsonl", "reward", deadline_s=_DEADLINE_S)


def check_same_task(ours: Ran, theirs: Ran) -> None:
    """Check that the first steps of both saw the same prompts, sampled from one model, and had one definition of loss.

    Which samples they drew differs, so means agree within sampling noise only; the loss of either is compared with
    what it has to be for its own samples: minus the mean advantage of all their tokens.
    """
    mine, other = ours.metrics[0], theirs.metrics[0]
    length, reward = other["completions/mean_length"], other["reward"]
    rows = round(mine["perf/total_num_tokens"] / (mine["prompt_length/mean"] + mine["response_length/mean"]))
    assert round(rows * mine["prompt_length/mean"]) == round(other["num_tokens"] - rows * length), "other prompts"
    apart = _ERRORS * (2 / rows) ** 0.5
    _close("mean response length", mine["response_length/mean"], length, _STD_TOKENS * apart)
    _close("mean reward", mine["reward/mean"], reward, _STD_REWARD * apart)
    _close("loss of hrl", mine["actor/pg_loss"], -mine["critic/advantages/mean"], 1e-3)
    _close("loss of TRL", other["loss"], other["loss_before_update"], 1e-3)


def _close(what: str, one: float, other: float, tolerance: float) -> None:
    assert abs(one - other) <= tolerance, f"{what}: {one:.4g} and {other:.4g}"


def _prompts(file: Path) -> Sequence[dict[str, Any]]:
    """Return a row for each prompt of a step."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return rows[::SAMPLES]
