"""What to run on the first machine with a GPU: ``python -m tests.first_light`` or ``make first-light``.

See docs/first-gpu.md.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from tests.first_light.report import FAILED, Findings
from tests.first_light.runner import BUDGET_S, run_stages
from tests.first_light.stages import STAGES, Setup


def main(arguments: list[str] | None = None) -> int:
    """Runs the stages that are asked for; 1 if one of them failed or was ended."""
    parser = argparse.ArgumentParser(prog="python -m tests.first_light", description=__doc__)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stage", action="append", choices=names, help="run this one only; may be repeated")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test of this program, not of the machine")
    parser.add_argument("--out", type=Path, default=Path("first-light"), help="folder of the tables and logs")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="no stage begins later (%(default)s)")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    setup = Setup(given.device, given.tiny, str(given.out.resolve()))
    if given.inside:
        return _inside(given.inside, setup, given.rows)
    chosen = [stage for stage in STAGES if not given.stage or stage.name in given.stage]
    # Deadlines are those of a GPU; a CPU that others use too takes several times as long.
    results = run_stages(chosen, setup, given.budget_s, patience=1.0 if setup.device == "cuda" else 4.0)
    sys.stdout.write((given.out / "first-light.md").read_text())
    return int(any(result.status.startswith((FAILED, "ended")) for result in results))


def _inside(module: str, setup: Setup, rows: Path) -> int:
    findings = Findings(rows)
    importlib.import_module(f"tests.first_light.{module}").run(setup, findings)
    if findings.broken:
        sys.stderr.write(f"out of bounds: {', '.join(findings.broken)}\n")
    return int(bool(findings.broken))


if __name__ == "__main__":
    sys.exit(main())
