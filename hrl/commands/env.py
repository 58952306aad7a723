"""`hrl env`: what this machine is and whether a run can work here, for a bug report too."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the form of the answer."""
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text", dest="as_json")
    parser.add_argument(
        "--no-test", action="store_true", help="leave out the self-test, which takes ten seconds of CPU"
    )


def run(options: Namespace) -> int:
    """Write facts, versions and the self-test; return 0, or 1 if a check failed."""
    import json

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hrl.preflight.self_test import self_test, tested_matrix
    from hrl.report.environment import environment_facts, facts_table

    facts, matrix = environment_facts(), tested_matrix()
    if options.as_json:
        outcomes = [] if options.no_test else list(self_test())
        checks = [outcome.as_dict() for outcome in outcomes]
        sys.stdout.write(json.dumps({**facts, "versions": matrix, "self_test": checks}, indent=2) + "\n")
        return int(any(not outcome.ok for outcome in outcomes))
    console = Console(highlight=False)
    console.print(facts_table(facts))
    table = Table(box=None, header_style="bold", padding=(0, 2))
    for name in ("package", "here", "hrl takes", "fits"):
        table.add_column(name)
    for row in matrix:
        table.add_row(
            row["package"], row["here"], row["tested"], row["fits"], style="red" if row["fits"] == "no" else ""
        )
    console.print("\n", table, sep="")
    if options.no_test:
        return 0
    console.print("\nSelf-test", style="bold")
    failed = 0
    # Most of it is the import of packages in several processes, about ten seconds of CPU: a busy machine takes longer.
    with console.status("importing torch and vLLM in several processes", spinner="line"):
        for outcome in self_test():
            failed += not outcome.ok
            word = Text("ok    ", "green") if outcome.ok else Text("failed", "red")
            console.print(Text.assemble("  ", word, f"  {outcome.name:<22}{outcome.detail}"), soft_wrap=True)
            if not outcome.ok:
                console.print(f"          {outcome.remedy}", markup=False, soft_wrap=True)
    return int(failed > 0)
