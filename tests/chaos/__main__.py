"""Inject every known fault and print what came of it: `python -m tests.chaos [WORD …]`, with words those that name one.

The table is also written to `build/chaos.md`. The exit status is 1 if an outcome is not what hrl promises, and 2 if no
fault was named. `--list` prints `kind: variant` of the faults instead, one a line, and injects nothing.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
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
    """Run the faults that some word names, or all, and print the table; or list them."""
    only_list, words = LIST in words, [word for word in words if word != LIST]
    chosen = [
        fault for fault in faults() if not words or any(word in f"{fault.kind} {fault.variant}" for word in words)
    ]
    if not chosen:
        sys.stderr.write(f"no fault has {' or '.join(words)} in its name; `python -m tests.chaos {LIST}` shows all\n")
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
    kinds: dict[str, int] = {}
    for fault, outcome in outcomes:
        kinds[fault.kind] = min(outcome.score, kinds.get(fault.kind, 2))
    whole = sum(score == 2 for score in kinds.values())
    took = time.monotonic() - began
    summary = f"{whole} of {len(kinds)} kinds as promised, {len(outcomes)} faults in {took:.0f} s"
    console.print(summary)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(outcomes, summary))
    return 0 if whole == len(kinds) else 1


def injected(fault: Fault) -> Outcome:
    """Inject a fault into a run in a folder of its own; one that breaks down is no reason not to try the others."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        try:
            return fault.inject(Path(folder))
        except Exception as error:  # noqa: BLE001  of the fault's own code, or of a run that never came so far
            return Outcome(0, time.monotonic() - began, f"it could not be judged: {type(error).__name__}: {error}")


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


def page(outcomes: list[tuple[Fault, Outcome]], summary: str) -> str:
    """Return the table in Markdown."""
    lines = ["| fault | variant | score | seconds | message |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {' | '.join(cell.replace('|', '¦') for cell in row)} |" for row in rows(outcomes)]
    return "\n".join([*lines, "", f"{summary}.", ""])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
