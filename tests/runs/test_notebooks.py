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


def executed(path: Path, folder: Path, edits: dict[str, str], before: str = "") -> Any:
    """Run a notebook with a few words replaced, each of which it must have, and a cell of the test's before its own."""
    book = nbformat.read(path, as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    for old, new in edits.items():
        assert any(old in cell.source for cell in code), old
        for cell in code:
            cell.source = cell.source.replace(old, new)
    if before:
        book.cells.insert(0, nbformat.v4.new_code_cell(before))
    client = NotebookClient(book, timeout=500, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment())
    return code


def environment() -> dict[str, str]:
    """The environment of a kernel that finds this checkout."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def outputs_of(code: Any, having: str) -> Any:
    return next(cell.outputs for cell in code if having in cell.source)


IN_PROCESS = """
import hrl
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from tests.runs.in_process import in_process, in_this_process

inside = in_process()
inside.__enter__()
---
def letters(response):  # of this cell
    return len(set(response)) / 10

trainer = hrl.GRPO(
    MODEL, letters, [{"prompt": f"{a}?"} for a in range(8)], steps=2, batch_size=2, n=2, max_prompt_length=64,
    max_response_length=4, config={"actor_rollout_ref.rollout.name": "hf", "trainer.device": "cpu"},
    trainer_cls=in_this_process(RayPPOTrainer),
)
run = trainer.train()
run
---
class Stops(hrl.Callback):
    def on_step_end(self, run, metrics):
        raise KeyboardInterrupt  # as the stop button does

again = hrl.GRPO(config=run.config, data=trainer._train_rows, reward=letters, folder="stopped", callbacks=[Stops()],
                 trainer_cls=trainer._trainer_cls)
try:
    again.train()
except KeyboardInterrupt:
    again._callbacks.clear()
second = again.train()
assert [record["step"] for record in second.metrics] == [1, 2]
---
inside.__exit__(None, None, None)
"""


@pytest.mark.cluster
def test_a_run_in_a_kernel_is_one_output_and_its_result_a_summary(runner: Runner, tmp_path: Path) -> None:
    book = nbformat.v4.new_notebook()
    book.cells = [
        nbformat.v4.new_code_cell(code.strip())
        for code in IN_PROCESS.replace("MODEL", repr(str(runner.model))).split("---\n")
    ]
    NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute(env=environment())
    outputs = book.cells[1].outputs
    assert [output.output_type for output in outputs] == ["display_data", "execute_result"], outputs
    progress, summary = (output["data"]["text/html"] for output in outputs)
    assert "value='2' max='2'" in progress and "step 2/2" in progress and "Traceback" not in progress
    assert "<table>" in summary and "reward/mean" in summary


@pytest.mark.cluster
def test_the_first_hour_runs_in_a_kernel(runner: Runner, tmp_path: Path) -> None:
    code = executed(
        FOLDER / "first_hour.ipynb",
        tmp_path,
        {
            "hrl.GRPO(": f"hrl.GRPO({str(runner.model)!r}, config={{{SMALL}}}, batch_size=2, max_prompt_length=64,",
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


IN_ONE_PROCESS = """
from hrl.trainer.offline.dpo import DPOTrainer
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from tests.runs.in_process import in_process, in_this_process

inside = in_process()
inside.__enter__()
"""


@pytest.mark.cluster
def test_the_notebook_of_dpo_runs_in_a_kernel(runner: Runner, tmp_path: Path) -> None:
    """Without a Ray of its own for each of its runs: that a notebook starts one is said above."""
    policy = f"config={{{SMALL}}}, trainer_cls=in_this_process(RayPPOTrainer)"
    code = executed(
        FOLDER / "dpo_and_evaluate.ipynb",
        tmp_path,
        {
            "hrl.DPO(": f"hrl.DPO({str(runner.model)!r}, config={{'trainer.device': 'cpu'}}, max_length=64, "
            "trainer_cls=in_this_process(DPOTrainer),",
            "steps=10,": "steps=1,",
            "reward=correct,": f"{policy}, max_prompt_length=64, reward=correct,",
            "sums[::5]]": "sums[::50]]",
            "batch_size=4, max_response_length=32": "batch_size=2, max_response_length=4",
            "evaluated(None,": f"evaluated({str(runner.model)!r},",
        },
        before=IN_ONE_PROCESS,
    )
    assert "mean@1" in outputs_of(code, "before, first, after, last")[-1]["data"]["text/plain"]
