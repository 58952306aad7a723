"""The picture of what runs at once in each placement: drawn again from the timelines that are kept of runs."""

from __future__ import annotations

import runpy
from pathlib import Path

from tests.runs.runner import ROOT

SCRIPT = runpy.run_path(str(ROOT / "docs" / "pictures" / "placements.py"), run_name="placements")
#: Placement → phases of which some run at once in it.
AT_ONCE = {
    "separate": {"log-probs", "reference log-probs", "values", "reward model", "critic update", "policy update"},
    "pairs": {"log-probs", "reference log-probs", "values", "critic update", "policy update"},
    "merged": {"reference log-probs", "values"},
    "spare": {"log-probs", "reference log-probs", "values", "critic update", "policy update"},
    "split": {"log-probs", "reference log-probs", "values", "critic update", "policy update"},
    "cpu_scorers": {"log-probs", "reference log-probs", "values", "reward model"},
}


def test_the_picture_is_drawn_again_from_what_is_kept_and_shown(tmp_path: Path) -> None:
    SCRIPT["draw"](tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == SCRIPT["PICTURE"].read_text()
    assert f"pictures/{SCRIPT['PICTURE'].name}" in (ROOT / "docs" / "gpus-and-memory.md").read_text()


def test_every_placement_is_in_it_with_what_runs_at_once_in_it_and_nothing_else() -> None:
    placements = {file.stem for file in (ROOT / "configs" / "placement").glob("*.yaml")}
    assert {SCRIPT["file_of"](name).stem for name in SCRIPT["names"]()} >= placements
    for name in SCRIPT["names"]():
        bars = SCRIPT["bars"](name)
        at_once = {
            bar["phase"]
            for bar in bars
            for other in bars
            if bar is not other and bar["start"] < other["end"] - 1e-3 and other["start"] < bar["end"] - 1e-3
        }
        assert bool(at_once) == (name in AT_ONCE) and at_once <= AT_ONCE.get(name, set()) | {"reward"}, name
