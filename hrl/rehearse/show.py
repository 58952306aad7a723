"""What `hrl rehearse` prints: each part as it ends, then one table, what was reduced, and what was not rehearsed."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hrl.masking import masked_text
from hrl.rehearse.rehearsal import Part, Rehearsal


class Shown:
    """Shows a rehearsal while it goes on.

    Args:
        quiet: Show nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(highlight=False, quiet=quiet)
        self._status = self._console.status("")
        self._is_moving = self._console.is_terminal and not quiet

    def __call__(self, what: Part | str) -> None:
        """Show a part that has ended, or what begins."""
        if isinstance(what, Part):
            self._console.print(_line(what), soft_wrap=True)
        elif self._is_moving:
            self._status.update(masked_text(what))
            self._status.start()

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._status.stop()

    def table(self, found: Rehearsal) -> None:
        """Show what came of it."""
        for line in lines(found):
            self._console.print(line)


def _line(part: Part) -> Text:
    return Text(masked_text(f"{part.seconds:7.1f} s  {part.name}"), style="" if part.outcome == "ok" else "red")


def lines(found: Rehearsal) -> list[Text | Table]:
    """Return the table, what was reduced, what was not rehearsed, and the verdict."""
    shown: list[Text | Table] = [Text(""), Text("Rehearsed", style="bold")]
    table = Table.grid(padding=(0, 2))
    for part in found.parts:
        style = "green" if part.outcome == "ok" else "red"
        table.add_row(Text(part.outcome, style=style), Text(masked_text(part.name)),
                      Text(f"{part.seconds:.1f} s", justify="right"), Text(masked_text(part.detail)))  # fmt: skip
    shown.append(table)
    if found.changes:
        shown += [Text(""), Text("Reduced", style="bold")]
        reduced = Table.grid(padding=(0, 2))
        for change in found.changes:
            reduced.add_row(Text(change.what), Text(masked_text(f"{change.was} → {change.now}")))
        shown.append(reduced)
    shown += [Text(""), Text("Not rehearsed", style="bold")]
    missing = Table.grid(padding=(0, 2))
    for what, why in (*((one, "needs more processes: --processes 4") for one in found.lost), *found.absent):
        missing.add_row(Text(what), Text(why))
    shown.append(missing)
    failed = [part for part in found.parts if part.outcome == "failed"]
    seconds = sum(part.seconds for part in found.parts)
    verdict = f"failed: {failed[0].name}" if failed else "passed"
    shown += [Text(""), Text(f"{verdict}, {seconds:.0f} s", style="red" if failed else "green")]
    return shown


def as_data(found: Rehearsal) -> dict[str, Any]:
    """Return a rehearsal as plain data."""
    return {
        "passed": found.status == 0,
        "rehearsed": [
            {"part": one.name, "outcome": one.outcome, "seconds": round(one.seconds, 3), "detail": one.detail}
            for one in found.parts
        ],
        "reduced": [change._asdict() for change in found.changes],
        "not_rehearsed": [{"what": what, "why": why} for what, why in found.absent]
        + [{"what": what, "why": "too few processes"} for what in found.lost],
    }
