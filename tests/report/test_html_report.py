import re
import struct
import sys
from html.parser import HTMLParser

import pytest

from hrl.report.html_report import (
    Outcome,
    phase_seconds,
    run_summary,
    series,
    timing_summary,
    validation_summary,
    write_html_report,
    write_reward_curve,
)
from hrl.report.run_folder import json_line
from tests.report.runs import CONFIG, HOSTILE, finished_run, started_run

VOID = {"meta", "img"}


class Page(HTMLParser):
    """The tags, attributes and texts of a page; fails where tags don't nest."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(path.read_text())
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


@pytest.fixture
def page(tmp_path):
    run = finished_run(tmp_path)
    write_reward_curve(run / "metrics.jsonl", run / "reward_curve.png")
    return Page(write_html_report(run, Outcome("finished"), 3))


def test_the_report_tells_what_ran_and_what_came_of_it(page):
    for fact in (
        "sums <1> finished",
        "model some/model",
        "8 prompts × 4 samples = 32 sequences",
        "steps 3 of 3",
        "a/sums mean@1 4 0.250 0.750 +0.500",
        "answered at step 0 and at step 3: 1 better, 0 worse, 1 as before",
        "best of 3",
        "median of 3",
        "worst of 3",
        "exact 0.5",
        "ended by stop",
        "generation 2.00 3",
        "temperature: 1.0",
    ):
        assert fact in page.text


def test_text_of_a_model_stays_text(page):
    assert not {"script", "bold"} & set(page.tags)
    assert page.tags.count("img") == 1
    assert not any(name.startswith("on") for name, _ in page.attributes)
    shown = HOSTILE.replace("\u202e", r"\u202e").replace("\x1b", r"\x1b").replace("\x00", r"\x00")
    assert page.text.count(shown) == 2  # as an answer after training and as the best sample


def test_the_page_needs_nothing_but_itself(page):
    sources = [value for name, value in page.attributes if name in ("src", "href", "action", "data")]
    assert [source[:22] for source in sources] == ["data:image/png;base64,"]
    assert "url(" not in page.text and "@import" not in page.text


def test_a_run_that_failed_before_its_first_step_says_why(tmp_path):
    folder = started_run(tmp_path)
    page = Page(write_html_report(folder.path, Outcome.of(RuntimeError("rank 1: <no memory>")), 3))
    assert "failed RuntimeError: rank 1: <no memory>" in page.text
    assert "No validation was run." in page.text
    assert "steps 0 of 3" in page.text
    assert "img" not in page.tags
    assert not {"Samples of step", "Before and after", "Where the time went"} & set(page.texts)


def test_a_run_with_one_validation_shows_it_and_compares_nothing(tmp_path):
    folder = started_run(tmp_path)
    folder.metrics_file.write_text('{"step": 0, "val/sums/mean@1": 0.5, "val/sums/n": 4}\n')
    folder.write_rollouts(0, [{"prompt": "p", "response": "r", "score": 0.5, "response_length": 1}], kind="val")
    page = Page(write_html_report(folder.path, Outcome.of(KeyboardInterrupt()), 3))
    assert "interrupted" in page.text
    assert "prompts step 0 sums mean@1 4 0.500" in page.text
    assert "change" not in page.text.split("Validation", 1)[1].split("To run it again")[0]


def test_numbers_that_were_not_finite_are_shown_as_missing(tmp_path):
    folder = started_run(tmp_path)
    folder.metrics_file.write_text(
        '{"step": 1, "val/sums/mean@1": null, "timing_s/gen": null, "timing_s/step": null}\n'
    )
    folder.write_rollouts(1, [{"prompt": "p", "response": "r", "score": float("nan"), "response_length": 1}])
    assert "sums mean@1 – –" in Page(write_html_report(folder.path, Outcome("finished"), 3)).text


def test_a_cut_line_of_a_killed_run_is_left_out(tmp_path):
    run = finished_run(tmp_path)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert "steps 3 of 3" in Page(write_html_report(run, Outcome("interrupted"), 3)).text


def test_first_and_last_validation_are_compared_per_source_and_metric():
    summary = validation_summary(
        [
            {"step": 0, "val/a/b/mean@1": 0.5, "val/a/b/n": 7.0},
            {"step": 1, "reward/mean": 1.0},
            {"step": 2, "val/a/b/mean@1": 0.9, "val/a/b/n": 7.0},
            {"step": 3, "val/a/b/mean@1": 0.75, "val/a/b/n": 7.0, "val/c/best@4": 1.0},
        ]
    )
    assert (summary["first_step"], summary["last_step"], summary["several"]) == (0, 3, True)
    assert summary["rows"] == [
        {"source": "a/b", "metric": "mean@1", "n": 7.0, "first": 0.5, "last": 0.75, "change": 0.25},
        {"source": "c", "metric": "best@4", "n": None, "first": None, "last": 1.0, "change": None},
    ]
    assert validation_summary([{"step": 1, "reward/mean": 1.0}]) is None


def test_timing_is_the_median_over_the_steps_that_had_the_phase():
    records = [{"timing_s/gen": s, "timing_s/step": 9.0, "timing_s/adv": 1.0} for s in (1.0, 2.0, 6.0)]
    records[2]["timing_s/my_phase"] = 4.0
    rows = timing_summary(records)
    assert [(row["phase"], row["median_s"], row["times"]) for row in rows] == [
        ("generation", 2.0, 3),
        ("advantages", 1.0, 3),
        ("my_phase", 4.0, 1),
    ]
    assert [row["share"] for row in rows] == pytest.approx([9 / 16, 3 / 16, 4 / 16])


def test_the_summary_leaves_out_what_the_configuration_does_not_say():
    assert dict(run_summary({}, [], total_steps=4)) == {"steps": "0 of 4", "time in steps": "0 s"}
    summary = dict(run_summary(CONFIG, [{"step": 2, "timing_s/step": 660.0}], total_steps=30))
    assert (summary["steps"], summary["time in steps"]) == ("2 of 30", "11 min")


def test_the_same_folder_gives_the_same_report(tmp_path):
    run = finished_run(tmp_path)
    first = write_html_report(run, Outcome("finished"), 3).read_bytes()
    assert write_html_report(run, Outcome("finished"), 3).read_bytes() == first
    assert not re.search(rb"\b(NaN|None|Undefined)\b", first.split(b"To run it again")[0])


# ---------------------------------------------------------------------------------------------- the picture


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
