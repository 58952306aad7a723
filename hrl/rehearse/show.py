"""What `hrl rehearse` prints: each part as it ends, then one table, what was reduced, and what was not rehearsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hrl.masking import masked_text
from hrl.rehearse.layout import MOST_PROCESSES
from hrl.rehearse.parts import Part, Rehearsal


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
            self._console.print(line, soft_wrap=isinstance(line, Text))


def _line(part: Part) -> Text:
    return Text(masked_text(f"{part.seconds:7.1f} s  {part.name}"), style="" if part.passed else "red")


def lines(found: Rehearsal) -> list[Text | Table]:
    """Return the table, what was reduced, what was not rehearsed, and the verdict; of what never ran, that alone."""
    failed = next((part for part in found.parts if not part.passed), None)
    if failed is not None and not found.has_run:
        return [Text(""), Text(masked_text(f"{failed.name}: {failed.detail}"), style="red")]
    shown: list[Text | Table] = [Text(""), Text("Rehearsed", style="bold")]
    table = Table.grid(padding=(0, 2))
    for part in found.parts:
        outcome = Text("ok", style="green") if part.passed else Text("failed", style="red")
        detail = Text(masked_text(part.detail if part.passed else part.detail.partition("\n")[0]))
        table.add_row(outcome, Text(masked_text(part.name)), Text(f"{part.seconds:.1f} s", justify="right"), detail)
    shown.append(table)
    shown += _section("Reduced", [(change.what, f"{change.was} → {change.now}") for change in found.changes])
    more = f"needs {MOST_PROCESSES} processes in a pool, and memory for them"
    shown += _section("Not rehearsed", [*((one, more) for one in found.lost), *found.absent])
    seconds = sum(part.seconds for part in found.parts)
    if failed is None:
        return [*shown, Text(""), Text(f"passed, {seconds:.0f} s", style="green")]
    return [*shown, Text(""), Text(masked_text(f"failed: {failed.name}: {failed.detail}"), style="red")]


def _section(title: str, rows: Sequence[tuple[str, str]]) -> list[Text | Table]:
    if not rows:
        return []
    table = Table.grid(padding=(0, 2))
    for what, detail in rows:
        table.add_row(Text(masked_text(what)), Text(masked_text(detail)))
    return [Text(""), Text(title, style="bold"), table]


def as_data(found: Rehearsal) -> dict[str, Any]:
    """Return a rehearsal as plain data."""
    return {
        "passed": found.status == 0 and all(one.passed for one in found.parts),
        "rehearsed": [
            {
                "part": masked_text(one.name),
                "passed": one.passed,
                "seconds": round(one.seconds, 3),
                "detail": masked_text(one.detail),
            }
            for one in found.parts
        ],
        "reduced": [{name: masked_text(text) for name, text in change._asdict().items()} for change in found.changes],
        "not_rehearsed": [{"what": masked_text(what), "why": masked_text(why)} for what, why in found.absent]
        + [{"what": what, "why": "too few processes"} for what in found.lost],
    }
