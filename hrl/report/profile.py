"""The profile of a step: where the time of each kind of process went, as a file, a text and a line.

`profile/step_<n>.json` in the run folder has the numbers that the report shows, `step_<n>.txt` the same as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from hrl.files import write_whole
from hrl.processes.plain_data import first_misfit
from hrl.profiling.operators import CLASSES, PRODUCTS, Phase, Profile, Spent
from hrl.report.phases import TITLES
from hrl.report.run_folder import PROFILE, DamagedFileError, read_object

TIMER = "timing_s/"
_SHOWN_IN_LINE = 4
_SHORTEST_PHASE_S = 1e-3  # of those in which no operator ran
_NAMES = ("phase", "class", "of class", "operator")


def profile_record(
    step: int, profiles: Mapping[str, Sequence[Profile]], metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Return the profile of a step as it is written and shown.

    Args:
        step: Its number.
        profiles: Kind of process → the profile of each process. Its numbers are the mean of these.
        metrics: Of the step; the driver's phases are those of `timing_s/*`.
    """
    seconds = {name.removeprefix(TIMER): value for name, value in metrics.items() if name.startswith(TIMER)}
    return {
        "step": step,
        "driver": [{"phase": TITLES.get(name, name), "seconds": value} for name, value in seconds.items()],
        "processes": [_of_processes(name, found) for name, found in profiles.items()],
    }


def _of_processes(name: str, found: Sequence[Profile]) -> dict[str, Any]:
    mean = Profile.mean(found)
    total = sum(spent.seconds for spent in mean.classes.values())
    return {
        "name": name,
        "count": len(found),
        "seconds": total,
        "classes": [_row("class", kind, spent, total) for kind, spent in mean.classes.items()],
        "phases": [
            _phase_row(phase, of) for phase, of in mean.phases.items() if of.classes or of.seconds > _SHORTEST_PHASE_S
        ],
        "operators": [_row("operator", name, spent, total) | {"class": kind} for (kind, name), spent in _listed(mean)],
    }


def _listed(profile: Profile) -> Iterator[tuple[tuple[str, str], Spent]]:
    yield from sorted(profile.operators.items(), key=lambda item: -item[1].seconds)


def _row(what: str, name: str, spent: Spent, total: float) -> dict[str, Any]:
    return {
        what: name,
        "seconds": spent.seconds,
        "share": spent.seconds / total if total else 0.0,
        "calls": spent.calls,
        "gflop_per_s": spent.gflop_per_s,
    }


def _phase_row(name: str, phase: Phase) -> dict[str, Any]:
    products = phase.classes.get(PRODUCTS)
    return {
        "phase": name,
        "seconds": phase.seconds,
        "busy": phase.busy,
        "classes": {kind: phase.classes[kind].seconds for kind in CLASSES if kind in phase.classes},
        "gflop_per_s": None if products is None else products.gflop_per_s,
    }


# ---- files -----------------------------------------------------------------------------------------------------


class _DriverPhase(BaseModel):
    phase: str
    seconds: float


class _Spent(BaseModel):
    kind: str = Field(alias="class")
    seconds: float
    share: float
    calls: float
    gflop_per_s: float | None


class _Operator(_Spent):
    operator: str


class _Phase(BaseModel):
    phase: str
    seconds: float
    busy: float
    classes: dict[str, float]
    gflop_per_s: float | None


class _Process(BaseModel):
    name: str
    count: int
    seconds: float
    classes: list[_Spent]
    phases: list[_Phase]
    operators: list[_Operator]


class _Record(BaseModel):
    """What `profile_record` returns."""

    step: int
    driver: list[_DriverPhase]
    processes: list[_Process]


def profile_table(folder: Path, step: int) -> Path:
    """Return the file in a run folder for the tables of a step's profile."""
    return folder / PROFILE / f"step_{step}.txt"


def write_profile(folder: Path, record: Mapping[str, Any]) -> Path:
    """Write `profile/step_<n>.json` and `.txt` into a run folder; return the text's path."""
    file = profile_table(folder, record["step"])
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    return write_whole(file, profile_text(record))


def write_timeline(folder: Path, step: int, text: str) -> Path:
    """Write `profile/step_<n>_timeline.json` into a run folder, see `hrl.report.timeline`; return its path."""
    file = profile_table(folder, step).with_name(f"step_{step}_timeline.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(file, text)


def read_profiles(folder: Path) -> list[dict[str, Any]]:
    """Return the profiles of a run in the order of their steps.

    Raises:
        DamagedFileError: A file holds something else.
    """
    files = (folder / PROFILE).glob("step_*.json")
    records = [_read(file) for file in files if file.stem.removeprefix("step_").isdecimal()]
    return sorted(records, key=lambda record: int(record["step"]))


def _read(file: Path) -> dict[str, Any]:
    try:
        return _Record.model_validate(read_object(file)).model_dump(by_alias=True)
    except ValidationError as error:
        part, why = first_misfit(error)
        raise DamagedFileError(
            f"{file} is damaged: it holds no profile ({part}: {why}). Remove it; nothing else needs it."
        ) from error


# ---- text ------------------------------------------------------------------------------------------------------


def profile_line(record: Mapping[str, Any]) -> str:
    """Return the largest classes of each kind of process in one line."""
    return "; ".join(f"{_title(each)}: {', '.join(_shares(each))}" for each in record["processes"])


def _title(process: Mapping[str, Any]) -> str:
    count = process["count"]
    return process["name"] if count == 1 else f"{process['name']} (mean of {count} processes)"


def _shares(process: Mapping[str, Any]) -> Iterator[str]:
    rows = sorted(process["classes"], key=lambda row: -row["seconds"])[:_SHOWN_IN_LINE]
    for row in rows:
        rate = row["gflop_per_s"]
        yield f"{row['class']} {row['share']:.0%}" + ("" if rate is None else f" at {rate:,.0f} GFLOP/s")
    if not rows:
        yield "no operator ran"


def profile_text(record: Mapping[str, Any]) -> str:
    """Return the whole profile as tables of plain text."""
    lines = [f"profile of step {record['step']}", "", "the driver's phases"]
    lines += _table(("phase", "seconds"), [(row["phase"], _number(row["seconds"])) for row in record["driver"]])
    for process in record["processes"]:
        lines += ["", f"{_title(process)}: {process['seconds']:.3f} s in operators"]
        lines += _table(("class", "seconds", "share", "calls", "GFLOP/s"), map(_cells, process["classes"]))
        kinds = [row["class"] for row in process["classes"]]
        rows = [
            (
                row["phase"],
                _number(row["seconds"] or None),
                _number(row["busy"]),
                *(_number(row["classes"].get(kind)) for kind in kinds),
                _number(row["gflop_per_s"], 0),
            )
            for row in process["phases"]
        ]
        lines += ["", *_table(("phase", "seconds", "busy", *kinds, "GFLOP/s"), rows)]
        operators = [(row["class"], *_cells(row, "operator")) for row in process["operators"]]
        lines += ["", *_table(("of class", "operator", "seconds", "share", "calls", "GFLOP/s"), operators)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _cells(row: Mapping[str, Any], name: str = "class") -> tuple[str, ...]:
    rate = _number(row["gflop_per_s"], 0)
    return row[name], _number(row["seconds"]), f"{row['share']:.1%}", _number(row["calls"], 0), rate


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _table(header: Sequence[str], rows: Any) -> list[str]:
    """Return lines in columns: names to the left, numbers to the right."""
    cells = [tuple(header), *rows]
    widths = [max(len(row[place]) for row in cells) for place in range(len(header))]
    is_text = [name in _NAMES for name in header]
    return [
        "  "
        + "  ".join(
            text.ljust(width) if left else text.rjust(width)
            for text, width, left in zip(row, widths, is_text, strict=True)
        )
        for row in cells
    ]
