"""The examples, run as their docstrings say, in this process."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hrl.report.run_folder import read_jsonl
from tests.runs.in_process import in_process
from tests.runs.runner import ROOT, Runner

pytestmark = [pytest.mark.engine]


@pytest.fixture(scope="module", autouse=True)
def this_process() -> Iterator[None]:
    with in_process():
        yield


@pytest.mark.usefixtures("own_registries")
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_trains(
    runner: Runner, tmp_path: Path, example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(example.read_text().splitlines()) < 40
    arguments = runner.arguments(
        tmp_path,
        "actor_rollout_ref.rollout.name=hf",
        "trainer.device=cpu",
        "trainer.total_training_steps=1",
        "data.val_max_samples=2",
    )
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(example), run_name="__main__")
    assert ended.value.code == 0
    record = read_jsonl(tmp_path / "metrics.jsonl")[-1]
    assert record["actor/grad_norm"] >= 0
    if example.stem == "brevity":
        assert "reward/brevity_discount" in record
