"""A run from start to end: what it leaves, how it resumes, how it stops."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.runs.runner import FinishedRun, Runner

pytestmark = pytest.mark.engine

QUICK = ("actor_rollout_ref.rollout.name=hf", "trainer.test_freq=-1", "data.val_max_samples=4")


def test_a_terminated_run_ends_all_it_started_and_another_goes_on_from_its_checkpoint_to_the_end(
    runner: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one has pairs of roles and a pool of two engines; the other has all roles in one process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hrl.trainer.main_ppo import main
    from tests.runs.in_process import in_process

    folder = tmp_path / "run"
    arguments = (
        *QUICK,
        *runner.with_reward_model,
        "recipe=ppo",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.save_freq=1",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    )
    second_step = folder / "checkpoints" / "step_2" / "state.json"
    pairs = ("placement=pairs", "trainer.resource_pools.rollout=[2]")
    process = runner.start_and_wait(folder, second_step.exists, *arguments, *pairs)
    os.kill(process.pid, signal.SIGTERM)
    first = runner.finish(process, folder, timeout_s=240)
    assert first.returncode == 75, first.output
    assert "SIGTERM: stopping after step" in first.output
    assert all(record["rollout/logprob_diff_mean"] < 0.02 for record in first.metrics[1:])
    (said,) = re.findall(r"the same command continues after step (\d+)", first.output)
    last = int(said)
    assert last >= 2 and "val/bundled/addition/mean@1" in first.metrics[0]
    assert len(first.samples(1)) == 16
    exported = folder / "checkpoints" / f"step_{last}" / "hf"
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokens = AutoTokenizer.from_pretrained(exported)("2 + 2", return_tensors="pt")
    start = AutoModelForCausalLM.from_pretrained(runner.model)
    assert not torch.equal(model(**tokens).logits, start(**tokens).logits)  # it has learnt something

    capsys.readouterr()
    ending = ("trainer.device=cpu", f"trainer.total_training_steps={last + 1}", "trainer.logger=console-json")
    with in_process(reports=True):
        assert main(runner.arguments(folder, *arguments, *ending)) == 0
    output = capsys.readouterr().out
    assert f"continuing after step {last}" in output
    records = FinishedRun(folder, 0, output).metrics
    assert [record["step"] for record in records] == list(range(last + 2))
    assert "val/bundled/addition/mean@1" in records[-1]
    events = [json.loads(line) for line in output.splitlines() if not line.startswith("WARNING")]
    (step,) = [event for event in events if event["event"] == "step"]
    assert step.items() >= records[-1].items()
    for name in ("config.yaml", "environment.json", "reward_curve.png", f"checkpoints/step_{last + 1}/state.json"):
        assert (folder / name).stat().st_size > 0, name


def test_a_failing_reward_function_stops_the_run_naming_function_and_sample(
    runner: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hrl.trainer.main_ppo import main
    from tests.runs.in_process import in_process

    reward = tmp_path / "my_reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return float('nan')\n"
    )
    changes = ("trainer.device=cpu", "trainer.val_before_train=false", f"reward.custom_reward_function.path={reward}")
    with in_process():
        assert main(runner.arguments(tmp_path / "run", *QUICK, *changes)) == 1
    said = capsys.readouterr().err
    assert "compute_score in" in said
    assert "not finite" in said
