"""The notebooks run in a real kernel, in few steps; what they show is one output per run, and they are stored empty."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.runs.runner import Runner

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SMALL = '"actor_rollout_ref.rollout.name": "hf", "actor_rollout_ref.rollout.n": 2, "trainer.device": "cpu"'


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    for cell in book.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


def executed(path: Path, folder: Path, edits: dict[str, str]) -> Any:
    """Run a notebook with a few words replaced, each of which it must have."""
    book = nbformat.read(path, as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    for old, new in edits.items():
        assert any(old in cell.source for cell in code), old
        for cell in code:
            cell.source = cell.source.replace(old, new)
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    client = NotebookClient(book, timeout=500, resources={"metadata": {"path": str(folder)}})
    client.execute(env=env)
    return code


def outputs_of(code: Any, having: str) -> Any:
    return next(cell.outputs for cell in code if having in cell.source)


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_the_first_hour_runs_in_a_kernel(runner: Runner, tmp_path: Path) -> None:
    code = executed(
        FOLDER / "first_hour.ipynb",
        tmp_path,
        {
            "hrl.GRPO(": f"hrl.GRPO({str(runner.model)!r}, config={{{SMALL}}}, batch_size=2,",
            "steps=30,": "steps=2,",
            "max_response_length=32,": "max_response_length=4,",
            "held_out, rows = sums[::10]": "held_out, rows = sums[::50]",
        },
    )
    shown = [output.get("data", {}).get("text/html", "") for cell in code for output in cell.outputs]
    (progress,) = [html for html in shown if "<progress" in html]
    assert "value='2' max='2'" in progress and "step 2/2" in progress  # one output, in its last state
    summary = outputs_of(code, "trainer.train()")[-1]["data"]["text/html"]
    assert "<table>" in summary and "reward/mean" in summary and "data:image/png;base64" in summary
    assert (tmp_path / "outputs/notebook/first_hour/model/model.safetensors").exists()


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_the_notebook_of_dpo_runs_in_a_kernel(runner: Runner, tmp_path: Path) -> None:
    code = executed(
        FOLDER / "dpo_and_evaluate.ipynb",
        tmp_path,
        {
            "hrl.DPO(": f"hrl.DPO({str(runner.model)!r}, config={{'trainer.device': 'cpu'}}, batch_size=2,",
            "steps=10,": "steps=1,",
            "hrl.GRPO(model,": f"hrl.GRPO(model, config={{{SMALL}}},",
            "sums[::5]]": "sums[::50]]",
            "batch_size=4, max_response_length=32": "batch_size=2, max_response_length=4",
            "evaluated(None,": f"evaluated({str(runner.model)!r},",
        },
    )
    assert "mean@1" in outputs_of(code, "before, first, after, last")[-1]["data"]["text/plain"]
