"""Ten thousand hostile cases, in a process of their own whose memory is bounded: no traceback among them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.faults import Fault, Outcome
from tests.fuzz.cases import CASES_VARIABLE
from tests.fuzz.targets import targets

CASES = int(os.environ.get(CASES_VARIABLE, "10000"))
"""Of all targets together."""
PATIENCE_S = 3600.0


def _share(name: str) -> Callable[[Path], Outcome]:
    every = targets()
    (weight,) = (target.weight for target in every if target.name == name)
    cases = round(CASES * weight / sum(target.weight for target in every))

    def inject(folder: Path) -> Outcome:
        began = time.monotonic()
        command = [sys.executable, "-m", "tests.fuzz", str(cases), "1", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        seconds = time.monotonic() - began
        found = re.search(rf"{re.escape(name)}: (\d+) cases, (\d+) refused, (\d+) findings", done.stdout)
        if found is None:
            return Outcome(0, seconds, f"exit status {done.returncode}: {done.stderr[-200:]}")
        message = f"{found[1]} cases, {found[2]} refused with a reason, {found[3]} with another traceback"
        return Outcome(2 if done.returncode == 0 and found[3] == "0" else 0, seconds, message)

    return inject


FAULTS = [Fault("hostile input, fuzzed", target.name, _share(target.name)) for target in targets()]
