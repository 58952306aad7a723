"""Run one benchmark in this process, and write what was found: `python -m bench.measure gae build/bench/gae.json`."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

from bench import origin, peers
from bench.harness import Comparison, measure
from bench.results import Found, write


def main(name: str, out: Path) -> None:
    """Measure the cases of `bench/NAME.py`; each is said on stderr as soon as it is there.

    A benchmark that has no peer yields what it has compared with a limit.
    """
    began, commit = time.perf_counter(), origin.commit()
    peers.importable()
    module = importlib.import_module(f"bench.{name}")
    rows: list[Comparison] = []
    for case in module.cases():
        first, *others = [case] if isinstance(case, Comparison) else measure(case)
        rows += [first, *others]
        unit = "s" if first.quantity == "seconds" else first.quantity
        sys.stderr.write(
            f"  {name}: {case.label}: {first.ours:.4g} {unit}, {case.peer} {first.theirs:.4g}, {first.ratio:.1f}×\n"
        )
    took_s = time.perf_counter() - began
    write(out, Found(origin.Origin(commit, origin.today(), origin.threads(), took_s, origin.machine()), rows))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
