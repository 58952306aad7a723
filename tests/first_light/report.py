"""What a stage found, row by row, and the one table that everybody reads afterwards."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, ENDED, ABSENT = "passed", "failed", "ended at its deadline", "not run"
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Row:
    """One finding.

    Attributes:
        what: was measured or compared.
        value: as it is to be read, with its unit.
        wanted: the bound it was held against; empty for a mere figure.
        ok: whether it keeps the bound; ``None`` for a mere figure.
    """

    what: str
    value: str
    wanted: str = ""
    ok: bool | None = None


@dataclass
class StageResult:
    """How one stage ended.

    Attributes:
        stage: its name.
        status: ``PASSED``, ``FAILED``, ``ENDED`` or ``ABSENT``.
        seconds: it took.
        rows: what it found, also where it failed later.
        reason: why it did not pass.
    """

    stage: str
    status: str
    seconds: float
    rows: list[Row] = field(default_factory=list)
    reason: str = ""


class Findings:
    """Writes every row to a file at once: what a stage had found when it was ended is not lost."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.broken: list[str] = []

    def add(self, what: str, value: str, wanted: str = "", ok: bool | None = None) -> None:
        """One row; a stage with a row that is not ``ok`` fails when it has run to its end."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(Row(what, value, wanted, ok))) + "\n")
        if ok is False:
            self.broken.append(what)

    def below(self, what: str, value: float, limit: float, unit: str = "") -> None:
        """A row whose value must not exceed a limit; NaN does."""
        self.add(what, f"{value:.3g}{unit}", f"≤ {limit:g}{unit}", value <= limit)


def read_rows(path: Path) -> list[Row]:
    """The rows that a stage has written; a last line cut off in the middle is left out."""
    if not path.is_file():
        return []
    return [Row(**json.loads(line)) for line in path.read_text().splitlines() if line.endswith("}")]


def write_tables(folder: Path, machine: dict[str, Any], results: Iterable[StageResult]) -> None:
    """``first-light.json`` and ``first-light.md``."""
    results = list(results)
    content = {"machine": machine, "stages": [asdict(result) for result in results]}
    (folder / "first-light.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "first-light.md").write_text(markdown(machine, results))


def markdown(machine: dict[str, Any], results: Iterable[StageResult]) -> str:
    """One table: a line for each stage, and below it one for each of its rows."""
    lines = [
        "# First light",
        "",
        f"{time.strftime('%Y-%m-%d %H:%M')}; " + ", ".join(f"{name} {value}" for name, value in machine.items()),
        "",
        "| stage | what | found | wanted | |",
        "| --- | --- | --- | --- | --- |",
    ]
    for result in results:
        reason = f": {last_error(result.reason)}" if result.reason.strip() else ""
        lines.append(_line(f"**{result.stage}**", result.status + reason, f"{result.seconds:.0f} s", "", ""))
        for row in result.rows:
            lines.append(_line("", row.what, row.value, row.wanted, {True: "ok", False: "**no**", None: ""}[row.ok]))
    return "\n".join(lines) + "\n"


def last_error(log: str) -> str:
    """The exception that ended a process, from what it has printed; its last line where there is none.

    Warnings of threads and of libraries that are torn down come after it.
    """
    lines = log.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    # Behind the last traceback, the first line that is not indented and has the form of an exception.
    behind = lines[starts[-1] + 1 :] if starts else []
    return next((line for line in behind if re.match(r"[A-Za-z_][\w.]*(: |$)", line)), lines[-1])


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
