"""The tables of docs/scaling.md are those that its script writes."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from hrl.cluster.precision import with_dtypes
from hrl.config.compose import compose_kind, to_yaml
from hrl.config.outline import outline_of
from hrl.config.run_kind import PPO
from hrl.plan.lengths import Lengths
from hrl.plan.shapes import shapes_of
from hrl.plan.step import CostModel
from hrl.plan.workload import Workload
from tests.plan.recorded import TWO_CORES
from tests.runs.runner import ROOT

FOLDER = ROOT / "docs" / "scaling"
TABLES = runpy.run_path(str(FOLDER / "tables.py"), run_name="tables")
PAGE = (ROOT / "docs" / "scaling.md").read_text()


def block(name: str) -> list[str]:
    (found,) = re.findall(rf"(?s)<!-- table {re.escape(name)} -->\n\n(.*?)\n\n<!-- end -->", PAGE)
    return found.splitlines()


@pytest.mark.parametrize("name", ["measured", "episodes", "others", "hardware", "constants"])
def test_a_table_of_the_model_is_up_to_date(name: str) -> None:
    assert block(name) == TABLES["of_episodes" if name == "episodes" else name]()


def test_the_table_of_published_steps_is_up_to_date() -> None:
    assert block("published") == runpy.run_path(str(FOLDER / "published.py"))["rows"]()


@pytest.mark.parametrize(("model", "devices"), [("Qwen2.5-7B", 64), ("Llama-3.1-70B", 8), ("Qwen3-30B-A3B", 16)])
def test_a_predicted_row_is_up_to_date(model: str, devices: int) -> None:
    assert TABLES["row"](model, devices) in block(model)


def test_a_run_is_compared_with_the_model(tmp_path: Path) -> None:
    compare = runpy.run_path(str(FOLDER / "compare.py"), run_name="compare")
    config = compose_kind(PPO, ["trainer.device=cpu"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    config = with_dtypes(config, "cpu")
    cost = CostModel(config, shapes_of(outline_of(config)), TWO_CORES, Workload.of(config, Lengths(45, 20, 0.5))).cost()
    step = {f"timing_s/{phase.name}": phase.seconds for phase in cost.phases} | {"timing_s/step": 2 * cost.seconds}
    step |= {"prompt_length/mean": 45, "response_length/mean": 20, "actor/rows_run": 32}
    lines = [step | {"step": number} for number in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    cells = [line.strip("| ").split(" | ") for line in compare["compared"](tmp_path, TWO_CORES)]
    assert {(run, steps) for run, _, steps, *_ in cells} == {(str(tmp_path), "2")}
    said = {phase: offs for _, phase, _, _, _, *offs in cells}
    right = ["+0%", "+0%"]
    assert said == {"gen": right, "update_actor": right, "weight_sync": right, "step": ["-50%", "-50%"]}


def test_a_run_of_one_step_cannot_be_compared(tmp_path: Path) -> None:
    compare = runpy.run_path(str(FOLDER / "compare.py"), run_name="compare")
    (tmp_path / "config.yaml").write_text(to_yaml(compose_kind(PPO, ["trainer.device=cpu"])))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "timing_s/step": 3.0}\n')
    assert compare["compared"](tmp_path, TWO_CORES) == [f"| {tmp_path} | has no step after its first | | | | | |"]


def test_the_picture_is_shown() -> None:
    assert "pictures/scaling.svg" in PAGE
    assert (ROOT / "docs" / "pictures" / "scaling.svg").read_text().startswith("<svg ")
