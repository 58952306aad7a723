"""Inject every known fault, or those that are named, and print what came of it: `python -m tests.chaos [PART …]`.

A fault is named by any part of the line that `--list` prints for it, which injects nothing. The table is also written
to `build/chaos.md`, after one with a row for each kind. The exit status is 1 if an outcome is not what hrl promises,
and 2 if no fault was named.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.chaos.faults import Fault, Outcome, faults

LIST = "--list"
PAGE = Path("build/chaos.md")
_WIDTH_IN_FILES = 200
_LONGEST = 240


def main(words: list[str]) -> int:
    """Inject the faults that have one of these parts in their names, or all, and print the table; or list them."""
    only_list, parts = LIST in words, [word for word in words if word != LIST]
    chosen = [
        fault for fault in faults() if not parts or any(part in f"{fault.kind}: {fault.variant}" for part in parts)
    ]
    if not chosen:
        sys.stderr.write(f"no fault has {' or '.join(parts)} in its name; `python -m tests.chaos {LIST}` shows all\n")
        return 2
    if only_list:
        sys.stdout.writelines(f"{fault.kind}: {fault.variant}\n" for fault in chosen)
        return 0
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=_WIDTH_IN_FILES)
    began, outcomes = time.monotonic(), []
    for number, fault in enumerate(chosen, start=1):
        outcome = injected(fault)
        outcomes.append((fault, outcome))
        told = f"{number}/{len(chosen)} {fault.kind}: {fault.variant}: {outcome.score} in {outcome.seconds:.1f} s"
        told += f": {one_line(outcome.message)}" if outcome.score < 2 else ""
        console.print(told, markup=False, highlight=False)
    console.print(table(outcomes))
    kinds = by_kind(outcomes)
    whole = sum(worst(of_kind).score == 2 for of_kind in kinds.values())
    took = time.monotonic() - began
    summary = f"{whole} of {len(kinds)} kinds as promised, {len(outcomes)} faults in {took:.0f} s"
    console.print(summary)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(outcomes, kinds, summary))
    return 0 if whole == len(kinds) else 1


def injected(fault: Fault) -> Outcome:
    """Inject a fault into a run in a folder of its own; one that breaks down is no reason not to try the others."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        try:
            return fault.inject(Path(folder))
        except Exception as error:  # noqa: BLE001  of the fault's own code, or of a run that never came so far
            return Outcome(0, time.monotonic() - began, f"it could not be judged: {type(error).__name__}: {error}")


def by_kind(outcomes: list[tuple[Fault, Outcome]]) -> dict[str, list[Outcome]]:
    """Return the outcomes of each kind of fault."""
    kinds: dict[str, list[Outcome]] = {}
    for fault, outcome in outcomes:
        kinds.setdefault(fault.kind, []).append(outcome)
    return kinds


def worst(of_kind: list[Outcome]) -> Outcome:
    """Return the outcome by which a kind counts."""
    return min(of_kind, key=lambda outcome: outcome.score)


def rows(outcomes: list[tuple[Fault, Outcome]]) -> list[tuple[str, ...]]:
    """Return kind, variant, score, seconds and message of each, as text on one line each."""
    return [
        (fault.kind, fault.variant, str(outcome.score), f"{outcome.seconds:.1f}", one_line(outcome.message))
        for fault, outcome in outcomes
    ]


def one_line(message: str) -> str:
    """Return a message on one line, without the names of temporary folders, cut where it is long."""
    text = re.sub(r"/\S*?(chaos-|pytest-)\w+", "…", " ".join(message.split()))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def table(outcomes: list[tuple[Fault, Outcome]]) -> Table:
    """Return fault → score → seconds → message."""
    shown = Table("fault", "variant", "score", "seconds", "message")
    for row in rows(outcomes):
        shown.add_row(*map(escape, row))
    return shown


def page(outcomes: list[tuple[Fault, Outcome]], kinds: dict[str, list[Outcome]], summary: str) -> str:
    """Return the tables in Markdown: by kind, and of every fault."""
    in_short = [
        (kind, str(len(of_kind)), str(worst(of_kind).score), told_seconds(of_kind), one_line(worst(of_kind).message))
        for kind, of_kind in kinds.items()
    ]
    parts = [
        markdown(("fault", "variants", "score", "seconds", "message"), in_short),
        f"{summary}.",
        markdown(("fault", "variant", "score", "seconds", "message"), rows(outcomes)),
    ]
    return "\n\n".join(parts) + "\n"


def told_seconds(of_kind: list[Outcome]) -> str:
    """Return the shortest and the longest time of a kind's faults."""
    shortest, longest = (pick(outcome.seconds for outcome in of_kind) for pick in (min, max))
    return f"{shortest:.1f}" if len(of_kind) == 1 else f"{shortest:.1f} to {longest:.1f}"


def markdown(header: tuple[str, ...], cells: Iterable[tuple[str, ...]]) -> str:
    """Return a table."""
    lines = [header, tuple("---" for _ in header), *cells]
    return "\n".join(f"| {' | '.join(cell.replace('|', '¦') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
