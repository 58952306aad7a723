"""When phases ran: what they shared, and the trace that shows it."""

from __future__ import annotations

import json

import pytest

from hrl.report.charts import run_columns
from hrl.report.timeline import Span, chrome_trace, overlap_metrics, timeline_text

#: Reference and critic at once, then advantages on the driver, then both updates; the step around them.
SPANS = [
    Span("ref", "ref", 11.0, 13.0),
    Span("values", "critic", 11.5, 12.0),
    Span("adv", None, 13.0, 13.5),
    Span("update_actor", "actor", 14.0, 17.0),
    Span("update_critic", "critic", 14.0, 18.0),
    Span("step", None, 10.0, 19.0),
]


def test_the_overlap_is_what_the_phases_took_less_the_time_in_which_any_ran() -> None:
    assert overlap_metrics(SPANS) == {"perf/overlap_s": pytest.approx(0.5 + 3.0)}


def test_phases_one_after_another_share_nothing() -> None:
    assert overlap_metrics(SPANS[:1] + SPANS[2:4] + SPANS[5:]) == {}
    assert overlap_metrics([]) == {}


def test_the_trace_has_a_row_for_each_pool_and_microseconds_from_the_beginning() -> None:
    trace = json.loads(timeline_text(3, SPANS))
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert list(names.values()) == ["driver", "ref", "critic", "actor"]
    phases = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], names[event["tid"]], event["ts"], event["dur"]) for event in phases] == [
        ("step", "driver", 0, 9e6),
        ("reference log-probs", "ref", 1e6, 2e6),
        ("values", "critic", 1.5e6, 0.5e6),
        ("advantages", "driver", 3e6, 0.5e6),
        ("critic update", "critic", 4e6, 4e6),
        ("policy update", "actor", 4e6, 3e6),
    ]
    assert chrome_trace(3, [])["traceEvents"][0]["args"]["name"] == "step 3"


def test_in_the_picture_of_a_step_phases_that_ran_at_once_share_the_time() -> None:
    seconds = {f"timing_s/{span.name}": span.end - span.start for span in SPANS}
    columns = run_columns([{"step": 1, **seconds, **overlap_metrics(SPANS)}])["values"]
    shown = {name.removeprefix("seconds of "): values[0] for name, values in columns.items() if "seconds of" in name}
    # The groups took 9.5 s, of which 3.5 beside another; outside of them lie the advantages and what no phase covers.
    assert shown == {
        "log-probs and values": pytest.approx(2.5 * 6 / 9.5, rel=1e-4),
        "update": pytest.approx(7 * 6 / 9.5, rel=1e-4),
        "other": pytest.approx(3.0, rel=1e-4),
    }
