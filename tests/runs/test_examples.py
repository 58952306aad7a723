"""The examples, run as their docstrings say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.runner import ROOT, Runner

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]

QUICK = ("actor_rollout_ref.rollout.name=hf", "trainer.total_training_steps=1", "data.val_max_samples=2")


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_trains(runner: Runner, tmp_path: Path, example: Path) -> None:
    assert len(example.read_text().splitlines()) < 40
    run = runner(tmp_path / "run", *QUICK, script=str(example))
    record = run.metrics[-1]
    assert record["actor/grad_norm"] >= 0
    if example.stem == "brevity":
        assert "reward/brevity_discount" in record
