"""A run of KTO, in one process: the loss moves good answers up, and what it reports is what it computed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hrl.config.compose import compose_kind
from hrl.config.run_kind import DPO
from tests.runs.in_process import in_process, run_configured
from tests.runs.runner import FinishedRun, Runner


def test_a_run_on_labelled_answers_learns_and_measures_how_far_it_went(runner: Runner, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    said = [(number, answer) for number in range(32) for answer in ("yes", "no")]
    lines = [{"prompt": f"{number}?", "completion": answer, "label": answer == "yes"} for number, answer in said]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = (
        f"trainer.default_local_dir={tmp_path / 'run'}",
        f"model.path={runner.model}",
        "algorithm.loss_type=kto",
        "algorithm.undesirable_weight=1.5",
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        "data.train_batch_size=16",
        "data.max_length=64",
        "optim.lr=1e-3",
        "model.fsdp_config.dtype=float32",
        "trainer.device=cpu",
        "trainer.total_training_steps=4",
        "trainer.test_freq=4",
        "trainer.save_freq=-1",
    )
    with in_process():
        run_configured("dpo", compose_kind(DPO, arguments))
    records = FinishedRun(tmp_path / "run", 0, "").metrics
    first, last = records[1] if records[0]["step"] == 0 else records[0], records[-1]
    # Before the first step nothing has moved: r = z = 0, so that every loss is half of its weight.
    unmoved = pytest.approx(0, abs=1e-5)
    assert {name: first[name] for name in ("train/kl", "rewards/chosen", "rewards/rejected")} == dict.fromkeys(
        ("train/kl", "rewards/chosen", "rewards/rejected"), unmoved
    )
    share = 0.5 * (1 + 1.5) / 2
    assert 0.5 < first["train/loss"] < 0.75  # as many of each label as the batch has
    assert last["rewards/chosen"] > last["rewards/rejected"]
    source = "val/rows"
    validated = [record for record in records if f"{source}/loss" in record]
    assert validated[0][f"{source}/loss"] == pytest.approx(share) and validated[-1][f"{source}/loss"] < 0.95 * share
    assert math.isfinite(validated[-1][f"{source}/rewards"])
    assert validated[-1][f"{source}/rewards_accuracies"] > 0.5 and validated[-1][f"{source}/n"] == 64
