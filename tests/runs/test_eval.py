"""`hrl eval` from the command line to the table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hrl import cli
from hrl.report.run_folder import read_jsonl
from hrl.trainer.kinds import KINDS
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from tests.runs.in_process import in_process, in_this_process
from tests.runs.runner import Runner

pytestmark = pytest.mark.cluster

ROWS = [{"prompt": f"What is {a} plus {a}?", "answer": str(2 * a), "data_source": "doubles"} for a in range(6)]


@pytest.fixture
def this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    here = in_this_process(RayPPOTrainer)
    with in_process():
        monkeypatch.setattr("hrl.trainer.run.KINDS", {**KINDS, "ppo": replace(KINDS["ppo"], trainer=lambda _: here)})
        yield


def test_eval_samples_and_scores_as_a_run_does(
    runner: Runner,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    this_process: None,
) -> None:
    def trained(*_: Any, **__: Any) -> None:
        raise AssertionError("an evaluation loads no model to train beside the engine")

    monkeypatch.setattr("hrl.workers.policy.Policy.__init__", trained)
    monkeypatch.setenv("COLUMNS", "120")
    rows, reward, out = tmp_path / "rows.jsonl", tmp_path / "reward.py", tmp_path / "out"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    reward.write_text(
        "def compute_score(response, answer):\n"
        "    return {'score': float(len(response) % 2 == 0), 'pred': response[:1]}\n"
    )
    status = cli.main(
        [
            "eval", str(runner.model), str(rows), "-n", "4", "-k", "1,4", "--engine", "hf", "--max-tokens", "4",
            "--limit", "5", "--reward", str(reward), "--folder", str(out), "trainer.device=cpu",
            "data.max_prompt_length=64",
        ]
    )  # fmt: skip
    said = capsys.readouterr()
    assert status == 0, said.err
    samples = list(read_jsonl(out / "samples.jsonl"))
    assert len(samples) == 5 * 4
    scores = json.loads((out / "scores.json").read_text())["doubles"]
    assert scores["prompts"] == 5
    mean = sum(sample["score"] for sample in samples) / 20
    assert scores["estimates"]["mean@4"]["value"] == pytest.approx(mean)
    assert set(scores["estimates"]) == {"mean@4", "pass@1", "pass@4", "maj@4"}
    assert "mean@4" in said.out and "doubles" in said.out and str(out / "samples.jsonl") in said.out
