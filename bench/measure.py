"""Run one benchmark in this process, and write what was found: `python -m bench.measure gae build/bench/gae.json`."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from bench import peers
from bench.harness import Comparison, measure


def main(name: str, out: Path) -> None:
    """Measure the cases of `bench/NAME.py`; each is said on stderr as soon as it is there."""
    peers.importable()
    module = importlib.import_module(f"bench.{name}")
    found: list[Comparison] = []
    for case in module.cases():
        first, *others = measure(case)
        found += [first, *others]
        sys.stderr.write(
            f"  {name}: {case.label}: {first.ours:.4g} s, {case.peer} {first.theirs:.4g} s, {first.ratio:.1f}×\n"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([asdict(one) for one in found], indent=1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
