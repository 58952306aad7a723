"""Whole runs on data as it lies there: several sources with shares, a sampler, rows on disk; resumed exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hrl.cluster.checkpoints import PARTS
from hrl.config.offline import SFTTrainerConfig
from hrl.config.ppo import PPOTrainerConfig
from hrl.preflight.given import Given
from hrl.report.run_folder import read_jsonl, rollouts_file
from hrl.trained.folders import find_trained
from tests.runs.in_process import run_configured
from tests.runs.runner import Runner

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("this_process")]


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, Any]]:
    """Sums in JSON lines and in CSV, with columns of other names."""
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} + 1?", "meta": {"result": str(n + 1)}}) + "\n" for n in range(9))
    )
    text = "question,solution,level\n" + "".join(f'"What is {n}, doubled?",{2 * n},{n % 3}\n' for n in range(4))
    (tmp_path / "doubles.csv").write_text(text)
    return [
        {"path": str(tmp_path / "sums.jsonl"), "weight": 1.0, "map": {"answer": "meta.result"}},
        {"path": str(tmp_path / "doubles.csv"), "weight": 1.0, "prompt_key": "question", "answer_key": "solution"},
    ]


def configuration(model: Path, folder: Path, steps: int, data: dict[str, Any]) -> PPOTrainerConfig:
    return PPOTrainerConfig.model_validate(
        {
            "data": {"train_batch_size": 2, "max_prompt_length": 64, "max_response_length": 8, "seed": 5, **data},
            "actor_rollout_ref": {
                "model": {"path": str(model)},
                "actor": {"ppo_mini_batch_size": 2, "optim": {"lr": 1e-3}, "fsdp_config": {}},
                "rollout": {"name": "hf", "n": 2},
            },
            "trainer": {
                "device": "cpu",
                "total_training_steps": steps,
                "default_local_dir": str(folder),
                "save_freq": 1,
                "max_ckpt_to_keep": None,
            },
        }
    )


def spread() -> Any:
    """A reward function that is sent by value: each of its processes would import this file, and torch with it."""

    def reward(response: str, answer: str, meta: object = None, level: str | None = None) -> dict[str, Any]:
        """Differs between samples; the sums with an even answer are solved."""
        assert (meta is None) == (level is not None), "a row has the columns of its own source"
        return {"score": len(set(response)) / 10, "acc": float(int(answer) % 2 == 0)}

    return reward


def drawn(folder: Path, step: int) -> list[tuple[str, str]]:
    records = read_jsonl(rollouts_file(folder / "rollouts", step, "train"))
    return [(record["data_source"], record["prompt"]) for record in records]


def test_a_run_on_two_sources_with_a_sampler_resumes_exactly(runner: Runner, sources: Any, tmp_path: Path) -> None:
    data = {"train_files": sources, "sampler": "pass_rate"}
    for name, parts in (("straight", (4,)), ("resumed", (2, 4))):
        for steps in parts:
            run_configured("ppo", configuration(runner.model, tmp_path / name, steps, data), Given(reward=spread()))
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert not (straight / "model").exists()  # its checkpoints have the weights
    for step in range(1, 5):
        assert drawn(straight, step) == drawn(resumed, step)
    states = [json.loads((one / "checkpoints" / "step_4" / "state.json").read_text()) for one in (straight, resumed)]
    assert states[0].keys() - PARTS == {
        "kl_coef",
        "drift_gate_closed",
        "nonfinite_in_a_row",
        "reward_shaping",
        "sampler",
    }
    assert states[0]["sampler"] == states[1]["sampler"]
    assert states[0]["data"]["mix"] == [[9, 4], [1.0, 1.0]]
    metrics = list(read_jsonl(straight / "metrics.jsonl"))
    assert [record["data/epoch"] for record in metrics] == pytest.approx([step * 2 / 13 for step in range(1, 5)])
    assert metrics[-1]["data/pass_rate/seen"] == len(states[0]["sampler"]["rows"]) / 13
    assert set(states[0]["sampler"]["rates"]) <= {0.0, 1.0}
    assert {source for step in range(1, 5) for source, _ in drawn(straight, step)} == {"sums", "doubles"}


def test_a_step_that_is_sampled_beside_a_validation_is_the_same_in_a_run_that_resumes_between_them(
    runner: Runner, sources: Any, tmp_path: Path
) -> None:
    """In float32, where a sample does not depend on its company: the resumed run samples the step alone."""
    files = [{name: value for name, value in source.items() if name != "weight"} for source in sources]
    data = {"train_files": files, "val_files": files}

    def answers(folder: str, *steps: int) -> list[list[tuple[Any, ...]]]:
        for up_to in steps:
            values = configuration(runner.model, tmp_path / folder, up_to, data).model_dump(exclude_unset=True)
            for part in (values["actor_rollout_ref"]["rollout"], values["actor_rollout_ref"]["actor"]["fsdp_config"]):
                part["dtype"] = "float32"
            values["trainer"] |= {"test_freq": 1, "val_before_train": True}
            run_configured("ppo", PPOTrainerConfig.model_validate(values), Given(reward=spread()))
        rollouts = tmp_path / folder / "rollouts"
        found = [read_jsonl(rollouts_file(rollouts, step, kind)) for step in (1, 2) for kind in ("train", "val")]
        return [[(each["uid"], each["response"], each["score"]) for each in records] for records in found]

    straight = answers("straight", 2)
    assert [len(records) for records in straight] == [4, 13, 4, 13]
    assert answers("resumed", 1, 2) == straight


def test_a_prompt_that_comes_twice_in_a_step_is_two_groups(runner: Runner, sources: Any, tmp_path: Path) -> None:
    """A source of one row with half of the prompts."""
    (tmp_path / "one.csv").write_text("question,solution,level\nWhat is 3?,3,1\n")
    data = {
        "train_files": [sources[0], {**sources[1], "path": str(tmp_path / "one.csv")}],
        "train_batch_size": 4,
    }
    config = configuration(runner.model, tmp_path / "run", 1, data)
    actor = config.actor_rollout_ref.actor.model_copy(update={"ppo_mini_batch_size": 4})
    roles = config.actor_rollout_ref.model_copy(update={"actor": actor})
    trainer = config.trainer.model_copy(update={"save_freq": -1})
    run_configured(
        "ppo", config.model_copy(update={"actor_rollout_ref": roles, "trainer": trainer}), Given(reward=spread())
    )
    assert find_trained(str(tmp_path / "run")).name == str(tmp_path / "run" / "model")  # which no checkpoint holds
    records = list(read_jsonl(rollouts_file(tmp_path / "run" / "rollouts", 1, "train")))
    of_one = [record["uid"] for record in records if record["data_source"] == "one"]
    assert len(of_one) == 4 and len(set(of_one)) == 2


def test_imitation_of_rows_on_disk_resumes_exactly(runner: Runner, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} + 1?", "completion": f"It is {n + 1}."} for n in range(20)]
    rows[3]["completion"] = ""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    losses = {}
    for name, parts in (("straight", (4,)), ("resumed", (2, 4))):
        for steps in parts:
            config = SFTTrainerConfig.model_validate(
                {
                    "data": {
                        "train_files": [{"path": str(tmp_path / "rows.jsonl"), "streaming": True}],
                        "train_batch_size": 6,
                        "max_length": 64,
                        "bad_rows": "skip",
                    },
                    "model": {"path": str(runner.model)},
                    "trainer": {
                        "device": "cpu",
                        "total_training_steps": steps,
                        "default_local_dir": str(tmp_path / name),
                        "save_freq": 1,
                    },
                }
            )
            run_configured("sft", config)
        losses[name] = [record["train/loss"] for record in read_jsonl(tmp_path / name / "metrics.jsonl")]
    assert losses["straight"] == losses["resumed"] and len(losses["straight"]) == 4
    assert list(read_jsonl(tmp_path / "straight" / "metrics.jsonl"))[-1]["data/dropped_bad"] == 1.0
