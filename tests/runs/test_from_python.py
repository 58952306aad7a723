"""A run driven from Python: a configuration object, rows in memory, a function as reward, hooks; errors are raised."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from hrl.config.model import OptimConfig
from hrl.config.ppo import PPOTrainerConfig
from hrl.errors import ConfigError
from hrl.preflight.findings import PreflightError
from hrl.preflight.given import Given
from hrl.protocol import DataProto
from hrl.report.console import RunConsole
from hrl.report.run_folder import read_jsonl, rollouts_file
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from hrl.trainer.run import run
from tests.runs.in_process import in_this_process
from tests.runs.runner import Runner

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("this_process")]

ROWS = [{"prompt": f"What is {a} plus {a}?", "data_source": "doubles", "reward_model": {}} for a in range(8)]


def configuration(model: Path, folder: Path, **trainer: Any) -> PPOTrainerConfig:
    return PPOTrainerConfig.model_validate(
        {
            "data": {"train_batch_size": 2, "max_prompt_length": 64, "max_response_length": 8},
            "actor_rollout_ref": {
                "model": {"path": str(model)},
                "actor": {"ppo_mini_batch_size": 2, "optim": OptimConfig(lr=1e-3)},
                "rollout": {"name": "hf", "n": 4},
            },
            "trainer": {"device": "cpu", "total_training_steps": 1, "default_local_dir": str(folder), **trainer},
        }
    )


class Watching(RayPPOTrainer):
    """Hooks: notes what a step was made of."""

    seen: list[tuple[str, float]] = []  # noqa: RUF012 (emptied by the test)

    def on_batch_scored(self, batch: DataProto, metrics: dict[str, float]) -> DataProto:
        self.seen += [(source, 0.0) for source in batch.non_tensor_batch["data_source"]]
        return batch

    def on_step_end(self, batch: DataProto, metrics: dict[str, float]) -> None:
        self.seen.append(("grad_norm", metrics["actor/grad_norm"]))


def test_a_step_is_trained_on_rows_and_a_reward_that_no_file_holds(runner: Runner, tmp_path: Path) -> None:
    letters = {"e", "a", "t"}  # what the function refers to travels with it

    def count_letters(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
        return sum(map(solution_str.count, letters)) + len(solution_str) / 100

    Watching.seen.clear()
    shown = io.StringIO()
    display = RunConsole(Console(file=shown, width=200, color_system=None))
    with ThreadPoolExecutor(1) as elsewhere:  # only the main thread may set signal handlers
        folder = elsewhere.submit(
            run,
            "ppo",
            configuration(runner.model, tmp_path / "run"),
            Given(train_rows=ROWS, reward=count_letters),
            trainer_cls=in_this_process(Watching),
            display=display,
        ).result()
    assert folder == (tmp_path / "run").resolve()
    (record,) = read_jsonl(folder / "metrics.jsonl")
    assert record["step"] == 1 and record["reward/mean"] > 0
    *rows, (_, grad_norm) = Watching.seen
    assert rows == [("doubles", 0.0)] * 8 and grad_norm > 0
    samples = read_jsonl(rollouts_file(folder / "rollouts", 1))
    for sample in samples:
        assert sample["score"] == pytest.approx(count_letters("", sample["response"], None), abs=0.2)
    written = yaml.safe_load((folder / "config.yaml").read_text())
    (function,) = written["reward"]["functions"]
    assert function["label"] == "count_letters" and function["path"].startswith(f"python:{__name__}:")
    assert function["path"].endswith(f"count_letters of {Path(__file__).resolve()}")
    kept = written["data"]
    assert (kept["train_files"], kept["val_files"]) == (["python:train_rows"], [])
    assert "step" in shown.getvalue()


def test_rows_of_a_generator_are_trained_on_twice_in_one_process(runner: Runner, tmp_path: Path) -> None:
    given = Given(train_rows=(row for row in ROWS), reward=lambda solution_str, **_: float(len(solution_str)))
    for folder in (tmp_path / "first", tmp_path / "second"):
        run("ppo", configuration(runner.model, folder), given, trainer_cls=in_this_process(Watching))
    first, second = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("first", "second"))
    assert first[0]["reward/mean"] == second[0]["reward/mean"] > 0


def test_a_validation_that_has_no_rows_is_refused_before_anything_starts(runner: Runner, tmp_path: Path) -> None:
    config = configuration(runner.model, tmp_path / "run", test_freq=1)
    with pytest.raises(ConfigError, match=r"trainer\.test_freq is 1, but data\.val_files is empty"):
        run("ppo", config, Given(train_rows=ROWS, reward=lambda **_: 1.0))
    assert not (tmp_path / "run").exists()


def test_what_is_wrong_is_raised_and_nothing_is_made(runner: Runner, tmp_path: Path) -> None:
    config = configuration(tmp_path / "no model", tmp_path / "run")
    with pytest.raises(PreflightError, match=r"actor_rollout_ref\.model\.path can't be used"):
        run("ppo", config)
    with pytest.raises(ConfigError, match=r"trainer\.resume_from_path"):  # a rule between keys
        run("ppo", configuration(runner.model, tmp_path / "run", resume_mode="resume_path"))
    with pytest.raises(TypeError, match="PPOTrainerConfig"):
        run("dpo", config)
    with pytest.raises(ValueError, match="no run of kind 'grpo'; there are ppo, dpo, sft, rm"):
        run("grpo", config)
    assert not (tmp_path / "run").exists()


def test_a_given_function_that_would_score_nothing_is_refused(runner: Runner, tmp_path: Path) -> None:
    config = configuration(runner.model, tmp_path / "run")
    weightless = config.model_copy(
        update={
            "reward": config.reward.model_copy(
                update={
                    "functions": [],
                    "reward_model": config.reward.reward_model.model_copy(
                        update={"enable": True, "model_path": str(runner.reward_model)}
                    ),
                }
            )
        }
    )
    with pytest.raises(PreflightError, match=r"as an object, and none by reward\.functions; leave one"):
        run("ppo", weightless, Given(train_rows=ROWS, reward=lambda **sample: 1.0))
