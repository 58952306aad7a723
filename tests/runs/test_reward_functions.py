"""What a reward function may do, in a whole run: each of it works, or is one error that says what to look at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hrl.config.ppo import PPOTrainerConfig
from hrl.preflight.findings import PreflightError
from hrl.preflight.given import Given
from hrl.report.run_folder import read_jsonl, rollouts_file
from hrl.reward.actor import RewardError
from tests.runs.in_process import in_process, run_configured
from tests.runs.runner import Runner

pytestmark = pytest.mark.cluster

ODD = """
import sys, time
import numpy as np

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth == "raise":
        raise ZeroDivisionError("by the user")
    if ground_truth == "hang":
        time.sleep(1000)
    if ground_truth == "exit":
        sys.exit("enough")
    if ground_truth == "nan":
        return float("nan")
    if ground_truth == "no score":
        return {"value": 1.0}
    return np.float32(0.5)
"""
CHATTY = """
import asyncio, sys
import numpy as np

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    print("{not json " + "x" * 200_000)
    sys.stdout.write("nor this")
    await asyncio.sleep(0)
    return {"score": np.float64(len(solution_str)), "acc": np.bool_(len(solution_str) > 3), "pred": solution_str}
"""
FIFTH = """
calls = 0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    if calls == 5:
        raise KeyError(f"answer {calls}")
    return 1.0
"""


@pytest.fixture(scope="module", autouse=True)
def this_process() -> Iterator[None]:
    with in_process():
        yield


@pytest.fixture
def run(runner: Runner, tmp_path: Path) -> Any:
    """Runs a step of four prompts, two samples each, with the reward function of a file."""

    def started(source: str, *truths: str, logger: str = "console", **reward: Any) -> Path:
        file = tmp_path / "my_reward.py"
        file.write_text(source)
        config = PPOTrainerConfig.model_validate(
            {
                "data": {"train_batch_size": 4, "max_prompt_length": 64, "max_response_length": 8},
                "actor_rollout_ref": {
                    "model": {"path": str(runner.model)},
                    "actor": {"ppo_mini_batch_size": 4},
                    "rollout": {"name": "hf", "n": 2},
                },
                "reward": {"custom_reward_function": {"path": str(file)}, **reward},
                "trainer": {
                    "device": "cpu",
                    "total_training_steps": 1,
                    "default_local_dir": str(tmp_path / "run"),
                    "logger": logger,
                },
            }
        )
        rows = [
            {"prompt": f"Say {number}.", "data_source": "odd", "reward_model": {"ground_truth": truth}}
            for number, truth in enumerate([*truths, "fine", "fine", "fine", "fine"][:4])
        ]
        return run_configured("ppo", config, Given(train_rows=rows))

    return started


def test_every_failure_is_left_out_and_counted_where_it_is_allowed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hrl.reward.actor.MAX_FAILED_SHARE", 1.0)
    folder = run(ODD, "raise", "exit", "nan", on_error="skip")
    (record,) = read_jsonl(folder / "metrics.jsonl")
    assert (record["reward/num_errors"], record["reward/num_crashes"], record["reward/mean"]) == (6, 0, 0.5)
    samples = read_jsonl(rollouts_file(folder / "rollouts", 1))
    assert [sample["score"] for sample in samples] == [None] * 6 + [0.5] * 2
    assert all(sample["response"] is not None for sample in samples)


@pytest.mark.parametrize(
    ("source", "truth", "told"),
    [
        (FIFTH, "fine", r"1 of 8 samples of step 1.*\(data source 'odd'\), error.*my_reward\.py.*answer 5"),
        (ODD, "hang", r"timeout: took longer than 1 s and was killed"),
        (ODD, "no score", r"returned a dict without the key 'score'; it has \['value'\]"),
    ],
)
def test_the_first_failure_ends_the_run_and_names_function_and_sample(
    run: Any, source: str, truth: str, told: str
) -> None:
    with pytest.raises(RewardError, match=rf"(?s)reward function compute_score in .*my_reward\.py failed on.*{told}"):
        run(source, truth, timeout_s=1.0)


def test_a_file_that_fails_at_import_is_told_before_anything_starts(run: Any, tmp_path: Path) -> None:
    told = r"(?s)custom_reward_function\.path.*can't be used.*my_reward\.py.*no licence"
    with pytest.raises(PreflightError, match=told):
        run("def compute_score(**sample):\n    return 1.0\n\nraise RuntimeError('no licence')\n")
    assert not (tmp_path / "run").exists()


def test_what_an_async_function_prints_does_not_get_between_the_lines_of_the_json_console(
    run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = run(CHATTY, logger="console-json")
    shown, errors = capfd.readouterr()
    events = [json.loads(line) for line in shown.splitlines()]
    (record,) = read_jsonl(folder / "metrics.jsonl")
    (step,) = [event for event in events if event["event"] == "step"]
    assert record.items() <= step.items() and step["total_steps"] == 1
    assert {"banner", "note", "step"} <= {event["event"] for event in events}
    assert errors.count("{not json") == 8
    samples = read_jsonl(rollouts_file(folder / "rollouts", 1))
    assert [sample["score"] for sample in samples] == [len(sample["response"]) for sample in samples]
    assert all(sample["reward_parts"]["acc"] == (sample["score"] > 3) for sample in samples)


def test_parts_of_a_sum_are_in_metrics_validation_and_samples(runner: Runner, tmp_path: Path) -> None:
    def brief(response: str, level: int) -> dict[str, float] | None:
        return None if level == 0 else {"score": 1.0 / (1 + len(response)), "level": level}

    config = PPOTrainerConfig.model_validate(
        {
            "data": {"train_batch_size": 4, "max_prompt_length": 64, "max_response_length": 8},
            "actor_rollout_ref": {
                "model": {"path": str(runner.model)},
                "actor": {"ppo_mini_batch_size": 4},
                "rollout": {"name": "hf", "n": 2},
            },
            "trainer": {
                "device": "cpu",
                "total_training_steps": 1,
                "default_local_dir": str(tmp_path / "run"),
                "logger": "console",
            },
        }
    )
    rows = [{"prompt": f"{n}?", "answer": str(n), "level": n, "data_source": "sums"} for n in range(4)]
    rewards = ["numeric", (brief, 0.5), ({"name": "length", "most": 3, "label": "short"}, -1.0)]
    folder = run_configured("ppo", config, Given(train_rows=rows, val_rows=rows, reward=rewards))
    record = next(record for record in read_jsonl(folder / "metrics.jsonl") if record["step"] == 1)
    samples = read_jsonl(rollouts_file(folder / "rollouts", 1))
    assert record["reward/brief/missing"] == 2 and record["reward/brief/level/mean"] == 2.0
    assert "reward/numeric/missing" not in record
    for part in ("numeric", "brief", "short"):
        values = [sample["reward_parts"][part] for sample in samples if sample["reward_parts"][part] is not None]
        assert record[f"reward/{part}/mean"] == pytest.approx(sum(values) / len(values))
    for sample in samples:
        parts = sample["reward_parts"]
        whole = parts["numeric"] + 0.5 * (parts["brief"] or 0.0) - parts["short"]
        assert sample["score"] == pytest.approx(whole, abs=1e-5)
    assert {"val/sums/numeric/mean@1", "val/sums/brief/mean@1", "val/sums/short/mean@1"} <= record.keys()
    assert record["val/sums/brief/missing"] == 1
