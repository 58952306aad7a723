"""Inject every known fault and print what came of it: `python -m tests.chaos [WORD …]`, with words those that name one.

The exit status is 1 if an outcome is not what hrl promises.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.chaos.faults import Fault, Outcome, faults


def main(words: list[str]) -> int:
    """Run the faults that some word names, or all, and print the table."""
    chosen = [
        fault for fault in faults() if not words or any(word in f"{fault.kind} {fault.variant}" for word in words)
    ]
    console = Console()
    began, outcomes = time.monotonic(), []
    for number, fault in enumerate(chosen, start=1):
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            outcome = fault.inject(Path(folder))
        outcomes.append((fault, outcome))
        console.print(
            f"{number}/{len(chosen)} {fault.kind}: {fault.variant}: {outcome.score} in {outcome.seconds:.1f} s",
            markup=False,
        )
    console.print(table(outcomes))
    kinds: dict[str, int] = {}
    for fault, outcome in outcomes:
        kinds[fault.kind] = min(outcome.score, kinds.get(fault.kind, 2))
    whole = sum(score == 2 for score in kinds.values())
    console.print(
        f"{whole} of {len(kinds)} kinds as promised, {len(outcomes)} faults in {time.monotonic() - began:.0f} s"
    )
    return 0 if whole == len(kinds) else 1


def table(outcomes: list[tuple[Fault, Outcome]]) -> Table:
    """Return fault → score → seconds → message."""
    shown = Table("fault", "variant", "score", "seconds", "message")
    for fault, outcome in outcomes:
        row = fault.kind, fault.variant, str(outcome.score), f"{outcome.seconds:.1f}", outcome.message
        shown.add_row(*(cell.replace("[", r"\[") for cell in row))
    return shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
