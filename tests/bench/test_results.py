"""`bench.results`: figures are read as they were written, and the page says where they come from."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import results
from bench.harness import Comparison
from bench.origin import Origin
from bench.results import Found, below_floor, read, write, write_page

ORIGIN = Origin("abc1234+", "2026-11-23", 1, 41.2, "2 cores of a machine, Python 3.11.7")
ROW = Comparison("512 rows", "verl 0.9.1", "seconds", 0.5, 2.0, 3.0, 512, "", (0.1, 0.25), (7, 7))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one benchmark `sorting`, to which figures and page are written."""
    (tmp_path / "results").mkdir()
    (tmp_path / "sorting.py").write_text('"""Sorting.\n\nNumbers in order.\n"""\n\nAXIS = "rows"\nSECONDS = 3\n')
    for name, path in (("HERE", ""), ("FOLDER", "results"), ("PAGE", "RESULTS.md")):
        monkeypatch.setattr(results, name, tmp_path / path)
    return tmp_path


def page(here: Path, *rows: Comparison) -> str:
    write_page({"sorting": Found(ORIGIN, rows)})
    return (here / "RESULTS.md").read_text()


def test_figures_are_read_as_they_were_written(here: Path) -> None:
    found = Found(ORIGIN, [ROW, replace(ROW, floor=None, x=None, rounds=(4, 1))])
    write(here / "results" / "sorting.json", found)
    assert read("sorting") == found


def test_a_benchmark_that_has_not_run_has_no_figures(here: Path) -> None:
    assert read("sorting") is None


def test_the_page_has_title_command_origin_and_text_of_a_benchmark(here: Path) -> None:
    lines = page(here, ROW).splitlines()
    at = lines.index("## Sorting")
    assert lines[at : at + 8] == [
        "## Sorting",
        "",
        "`make bench NAME=sorting`",
        "",
        "Commit abc1234+, 2026-11-23, 1 thread, took 41 s. 2 cores of a machine, Python 3.11.7.",
        "",
        "Numbers in order.",
        "",
    ]


def test_a_row_has_ratio_floor_rounds_and_spread(here: Path) -> None:
    assert "| 512 rows | seconds | 0.5 | 2 | verl 0.9.1 | 4.0 | 3 | 7 | 10 % 25 % |\n" in page(here, ROW)


def test_a_missed_floor_and_unequal_rounds_are_said(here: Path) -> None:
    row = replace(ROW, floor=5.0, rounds=(4, 1), spread=(0.0, 0.0))
    assert "| 4.0 | 5 **missed** | 4, 1 |  |\n" in page(here, row)


def test_cpu_time_is_left_out_where_its_ratio_is_that_of_wall_time(here: Path) -> None:
    alike = replace(ROW, quantity="CPU seconds", ours=0.49, theirs=1.9, floor=None)
    other = replace(alike, theirs=0.6)
    assert "CPU seconds" not in page(here, ROW, alike)
    assert "| 512 rows | CPU seconds | 0.49 | 0.6 |" in page(here, ROW, other)


def test_growth_is_drawn_where_there_are_two_points(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", SimpleNamespace(vegalite_to_svg=lambda chart: chart))
    assert "sorting.svg" not in page(here, ROW)
    assert "![Sorting](results/sorting.svg)" in page(here, ROW, replace(ROW, x=1024, ours=0.75))
    chart = json.loads((here / "results" / "sorting.svg").read_text())
    points = {(value["who"], value["x"]): value["seconds"] for value in chart["data"]["values"]}
    assert points == {("hrl", 512): 0.5, ("verl 0.9.1", 512): 2.0, ("hrl", 1024): 0.75, ("verl 0.9.1", 1024): 2.0}


def test_only_rows_below_their_floor_are_told_of() -> None:
    rows = [ROW, replace(ROW, floor=None), replace(ROW, label="1,024 rows", floor=4.5)]
    assert below_floor({"sorting": Found(ORIGIN, rows)}) == [
        "sorting: 1,024 rows: 4.0 times less seconds than verl 0.9.1; the floor is 4.5"
    ]
