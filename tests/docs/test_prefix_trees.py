"""The picture of prefix trees: drawn from what the benchmark found, with the figures of the table beside it."""

from __future__ import annotations

import runpy
from pathlib import Path

from tests.runs.runner import ROOT

SCRIPT = runpy.run_path(str(ROOT / "docs" / "pictures" / "prefix_trees.py"), run_name="prefix_trees")


def test_the_picture_is_drawn_again_from_the_results_and_shown(tmp_path: Path) -> None:
    SCRIPT["draw"](tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == SCRIPT["PICTURE"].read_text()
    assert f"pictures/{SCRIPT['PICTURE'].name}" in (ROOT / "docs" / "architecture.md").read_text()


def test_the_table_beside_it_has_the_picture_s_figures() -> None:
    values = {(bar["quantity"], bar["case"], bar["packing"]): bar["value"] for bar in SCRIPT["bars"]()}
    page = (ROOT / "docs" / "architecture.md").read_text()
    tokens, seconds = SCRIPT["QUANTITIES"].values()
    for case, beginning in (
        ("8 rows, nothing shared", "8 rows that have nothing"),
        ("8 samples, turns in common", "the same, four samples"),
        ("3 episodes of 6 turns, a branch each", "3 episodes of 6 turns"),
    ):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {beginning}")]
        cells = [cell.strip() for cell in row.split("|")]
        assert [cells[2], cells[4]] == [f"{values[tokens, case, packing]:.0f}" for packing in ("whole rows", "trees")]
        assert cells[5] == f"{values[seconds, case, 'whole rows']:.2f}"
