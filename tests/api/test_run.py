"""What a run left, as a notebook shows it."""

from __future__ import annotations

import json
from pathlib import Path

from hrl.api.run import Run


def test_the_summary_has_first_and_last_values_parts_and_validation(tmp_path: Path) -> None:
    folder = tmp_path / "<b>mine"
    folder.mkdir()
    records = [
        {"step": 0, "val/a/mean@1": 0.125, "val/a/n": 8.0},
        {"step": 1, "reward/mean": 0.25, "reward/brief/mean": 0.75, "actor/pg_loss": 0.1},
        {"step": 2, "reward/mean": 0.5, "reward/brief/mean": 1.0, "val/a/mean@1": 0.625},
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (folder / "reward_curve.png").write_bytes(b"picture")
    html = Run(folder, "ppo")._repr_html_()
    for name, first, last in (
        ("reward/mean", "0.25", "0.5"),
        ("reward/brief/mean", "0.75", "1"),
        ("val/a/mean@1", "0.125", "0.625"),
    ):
        assert f">{name}</td><td>{first}</td><td>{last}</td>" in html
    assert "2 steps" in html and "data:image/png;base64,cGljdHVyZQ==" in html
    assert "&lt;b&gt;mine" in html and "<b>mine" not in html
    assert "pg_loss" not in html and "val/a/n" not in html and "report" not in html


def test_a_run_that_has_not_begun_has_nothing_to_show(tmp_path: Path) -> None:
    run = Run(tmp_path, "sft")
    assert run.metrics == [] and run.samples() == [] and "0 steps" in run._repr_html_()
