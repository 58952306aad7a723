"""When the phases of a step ran, pool by pool: how much of them ran at once, and a picture of it.

`profile/step_<n>_timeline.json` in the run folder is a trace in Chrome's format, which Perfetto and chrome://tracing
show: a row for each pool and one for the driver.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hrl.report.phases import TITLES

#: Spans that contain phases, or lie outside of the step.
_AROUND = frozenset({"step", "profile"})
_DRIVER = "driver"


class Span(NamedTuple):
    """A phase on the clock.

    Attributes:
        name: Of its timer.
        pool: The pool that it ran on; None for the driver.
        start, end: Seconds, of any clock.
    """

    name: str
    pool: str | None
    start: float
    end: float


def overlap_metrics(spans: Iterable[Span]) -> dict[str, float]:
    """Return `perf/overlap_s`, by how much the seconds of phases exceed the time in which any ran; nothing if by none.

    Phases that contain each other would count as well, but none does.
    """
    total, covered, until = 0.0, 0.0, float("-inf")
    for span in sorted((span for span in spans if span.name not in _AROUND), key=lambda span: span.start):
        total += span.end - span.start
        covered += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    overlap = total - covered
    return {"perf/overlap_s": overlap} if overlap > 1e-6 else {}  # below is the rounding of a sum


def chrome_trace(step: int, spans: Sequence[Span]) -> dict[str, Any]:
    """Return the phases of a step as a trace with microseconds from its beginning.

    Args:
        step: Its number.
        spans: Its phases, with `step` itself.
    """
    began = min((span.start for span in spans), default=0.0)
    pools = dict.fromkeys(span.pool or _DRIVER for span in sorted(spans, key=lambda span: span.start))
    rows = {pool: row for row, pool in enumerate([_DRIVER, *(pool for pool in pools if pool != _DRIVER)])}
    names = [_meta("process_name", 0, f"step {step}")] + [_meta("thread_name", row, pool) for pool, row in rows.items()]
    orders = [_meta("thread_sort_index", row, row, key="sort_index") for row in rows.values()]
    events = [
        {
            "name": TITLES.get(span.name, span.name),
            "cat": "phase",
            "ph": "X",
            "pid": 0,
            "tid": rows[span.pool or _DRIVER],
            "ts": round(1e6 * (span.start - began), 1),
            "dur": round(1e6 * (span.end - span.start), 1),
            "args": {"timer": f"timing_s/{span.name}"},
        }
        for span in sorted(spans, key=lambda span: (span.start, -span.end))
    ]
    return {"traceEvents": [*names, *orders, *events], "displayTimeUnit": "ms"}


def _meta(what: str, row: int, value: str | int, key: str = "name") -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": row, "args": {key: value}}


def timeline_text(step: int, spans: Sequence[Span]) -> str:
    """Return the trace as the text of its file."""
    return json.dumps(chrome_trace(step, spans)) + "\n"
