"""A run from start to end: what it leaves, how it resumes, how it stops."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.runs.runner import Runner

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]

QUICK = ("actor_rollout_ref.rollout.name=hf", "trainer.test_freq=-1", "data.val_max_samples=4")


def test_a_run_leaves_what_it_promises_and_resumes_from_its_checkpoint(runner: Runner, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "run"
    arguments = (
        *QUICK,
        "trainer.save_freq=1",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    )
    first = runner(folder, *arguments, "trainer.total_training_steps=2")
    assert [record["step"] for record in first.metrics] == [0, 1, 2]
    assert "val/bundled/addition/mean@1" in first.metrics[0]
    assert "val/bundled/addition/mean@1" in first.metrics[2]
    for name in ("config.yaml", "environment.json", "reward_curve.png", "checkpoints/step_2/state.json"):
        assert (folder / name).stat().st_size > 0, name
    assert len(first.samples(1)) == 16

    exported = folder / "checkpoints" / "step_2" / "hf"
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokens = AutoTokenizer.from_pretrained(exported)("2 + 2", return_tensors="pt")
    start = AutoModelForCausalLM.from_pretrained(runner.model)
    assert not torch.equal(model(**tokens).logits, start(**tokens).logits)  # it has learnt something

    second = runner(folder, *arguments, "trainer.total_training_steps=3", "trainer.logger=console-json")
    assert [record["step"] for record in second.metrics] == [0, 1, 2, 3]
    assert "continuing after step 2" in second.output
    events = [json.loads(line) for line in second.output.splitlines() if not line.startswith("WARNING")]
    (step,) = [event for event in events if event["event"] == "step"]
    assert step.items() >= second.metrics[3].items()


@pytest.mark.parametrize(("number", "engine"), [(signal.SIGINT, "vllm"), (signal.SIGTERM, "hf")])
def test_a_signal_ends_the_run_and_everything_it_started(
    runner: Runner, tmp_path: Path, number: signal.Signals, engine: str
) -> None:
    folder = tmp_path / "run"
    process = runner.start(
        folder,
        *QUICK,
        f"actor_rollout_ref.rollout.name={engine}",
        "trainer.total_training_steps=1000",
        "trainer.val_before_train=false",
    )
    deadline = time.monotonic() + 200
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.5)
    os.kill(process.pid, number)
    run = runner.finish(process, folder, timeout_s=60)
    assert run.returncode == 130, run.output


def test_a_failing_reward_function_stops_the_run_naming_function_and_sample(runner: Runner, tmp_path: Path) -> None:
    reward = tmp_path / "my_reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return float('nan')\n"
    )
    folder = tmp_path / "run"
    run = runner.finish(
        runner.start(folder, *QUICK, "trainer.val_before_train=false", f"reward.custom_reward_function.path={reward}"),
        folder,
    )
    assert run.returncode == 1
    assert "compute_score in" in run.output
    assert "not finite" in run.output
