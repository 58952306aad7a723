import struct
import sys

import pytest

from hrl.report.reward_curve import phase_seconds, series, write_reward_curve
from hrl.report.run_folder import json_line


def record(step, **numbers):
    return {"step": step, "timing_s/step": 5.0, "timing_s/gen": 2.0, "timing_s/update_actor": 2.5} | numbers


def test_a_series_has_only_the_steps_that_measured_it():
    records = [record(1, **{"val/a/mean@1": 0.5}), record(2), record(3, **{"val/a/mean@1": None})]
    assert series(records, "val/a/mean@1") == ([1], [0.5])


def test_seconds_that_no_phase_covers_are_shown_as_other_and_all_add_up():
    seconds = phase_seconds([record(1), record(2, **{"timing_s/old_log_prob": 0.25, "timing_s/ref": 0.25})])
    assert seconds == {
        "generation": [2.0, 2.0],
        "log-probs and values": [0.0, 0.5],
        "update": [2.5, 2.5],
        "other": [0.5, 0.0],
    }


def png_size(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize(
    "records",
    [
        [record(step, **{"reward/mean": step / 30, "val/addition/mean@1": 0.6 + step / 75}) for step in range(1, 31)],
        [record(1, **{"reward/mean": 0.5})],
        [{"step": 0, "val/addition/mean@1": 0.5}],
        [],
    ],
    ids=["whole run", "one step", "validation alone", "nothing"],
)
def test_every_run_leaves_a_picture(tmp_path, records):
    (tmp_path / "metrics.jsonl").write_text("".join(json_line(r) for r in records))
    assert png_size(write_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", "GRPO")) == (1080, 744)


def test_drawing_leaves_pyplot_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json_line(record(1)))
    loaded_before = "matplotlib.pyplot" in sys.modules
    write_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    assert ("matplotlib.pyplot" in sys.modules) == loaded_before
