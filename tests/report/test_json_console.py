"""A run told to a program: what it reads back is what was said, whatever stands in it."""

import io
import json
from datetime import UTC, datetime

import pytest

from hrl.config.load import validate
from hrl.report.console import RunConsole
from hrl.report.json_console import JsonConsole
from hrl.trainer.session import display_of
from tests.report.runs import HOSTILE, sample


@pytest.fixture
def file():
    return io.StringIO()


@pytest.fixture
def console(file):
    return JsonConsole(30, file)


def told(file):
    """What a program reads: an object a line. Its time is looked at and left out."""
    objects = [json.loads(line, parse_constant=pytest.fail) for line in file.getvalue().splitlines()]
    for number in objects:
        age = datetime.now(UTC) - datetime.fromisoformat(number.pop("time"))
        assert 0 <= age.total_seconds() < 60
    return objects


def test_a_step_is_one_object_with_the_metrics_under_their_own_names(console, file):
    with console.step_phases(3), console.phase("gen"):
        pass
    console.step(3, {"reward/mean": 0.5, "actor/grad_norm": float("nan"), "val/sums/mean@1": 1.0})
    assert told(file) == [
        {
            "event": "step",
            "step": 3,
            "total_steps": 30,
            "reward/mean": 0.5,
            "actor/grad_norm": None,
            "val/sums/mean@1": 1.0,
        }
    ]


def test_banner_notes_and_validation_are_objects_too(console, file):
    console.banner("hrl 1.0", {"batch": "8 prompts × 8 samples"})
    console.note("saved\nhere")
    console.validation(5, {"val/sums/mean@1": 0.5, "reward/mean": 0.25})
    console.validation(6, {"reward/mean": 0.25})
    assert told(file) == [
        {"event": "banner", "title": "hrl 1.0", "facts": {"batch": "8 prompts × 8 samples"}},
        {"event": "note", "text": "saved\nhere"},
        {"event": "validation", "step": 5, "val/sums/mean@1": 0.5},
    ]


def test_samples_carry_all_that_is_known_of_them(console, file):
    records = [sample(number, score, advantage=score - 0.5) for number, score in enumerate([0.25, 1.0, 0.0])]
    console.rollouts(5, records)
    console.rollouts(5, records[:1], kind="val")
    training, validation = told(file)
    assert [(picked["label"], picked["score"]) for picked in training["samples"]] == [
        ("best", 1.0),
        ("median", 0.25),
        ("worst", 0.0),
    ]
    assert training["samples"][0] == {"label": "best", **records[1]}
    assert (training["kind"], validation["kind"], len(validation["samples"])) == ("train", "val", 1)


def test_before_and_after_has_the_largest_changes_first(console, file):
    first = [sample(0, 0.0), sample(1, 0.0)]
    last = [sample(0, 0.0), sample(1, 1.0)]
    console.before_and_after(first, last, limit=1)
    console.before_and_after(first, [])
    (event,) = told(file)
    assert event["pairs"] == [{"before": first[1], "after": last[1]}]
    assert event["changes"] == "1 better, 0 worse, 1 as before; the 1 of 2 that changed most"


def test_text_of_a_model_breaks_no_line_and_steers_no_terminal(console, file):
    hostile = HOSTILE + "\u2028\x85\x9b31m\r\n"
    console.note(hostile)
    assert file.getvalue().count("\n") == 1 and file.getvalue().isascii()
    assert file.getvalue().rstrip("\n").isprintable()
    assert told(file)[0]["text"] == hostile


def test_the_configuration_chooses_who_is_told():
    assert isinstance(display_of(validate({"trainer.logger": "console-json"}), 3, []), JsonConsole)
    assert isinstance(display_of(validate({"trainer.logger": "console"}), 3, []), RunConsole)
    assert isinstance(display_of(validate({"trainer.logger": None}), 3, []), RunConsole)
