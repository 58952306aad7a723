"""The curves of the examples: drawn again from what is kept of their runs, with the figures that the page has."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from hrl.report.run_folder import read_jsonl
from tests.runs.runner import ROOT

CURVES = runpy.run_path(str(ROOT / "docs" / "pictures" / "curves.py"), run_name="curves")
KEPT = sorted(CURVES["CURVES"].glob("*.jsonl"))
PAGE = (ROOT / "docs" / "examples.md").read_text()


def test_every_curve_that_is_kept_is_drawn_again_and_shown(tmp_path: Path) -> None:
    drawn = CURVES["draw"](tmp_path)
    assert [picture.stem for picture in drawn] == [file.stem for file in KEPT]
    for picture in drawn:
        assert picture.read_text().startswith("<svg ") and (CURVES["CURVES"] / picture.name).is_file()
        assert f"pictures/curves/{picture.name}" in PAGE


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.stem)
def test_the_page_has_the_figures_of_the_curve(file: Path) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{file.stem}` |") and "→" in line]
    assert CURVES["figures"](read_jsonl(file)) in row


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.stem)
def test_every_example_ends_better_than_it_begins(file: Path) -> None:
    for cell in CURVES["figures"](read_jsonl(file)).split(" | "):
        first, last = map(float, cell.split(" → "))
        assert last > first
