"""Measure hrl against its peers: `python -m bench` runs all benchmarks, `python -m bench gae dispatch` those named.

Each runs in a process of its own, with as many threads as its module says, and leaves its figures in `bench/results`.
Those that run whole programs (`HEAVY`) come last; how long all take is said first, from the `SECONDS` of each.
`bench/RESULTS.md` and the pictures are written from these. The exit status is 1 if a ratio is below its floor, or if
results differ, and 2 if there is no such benchmark.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from bench import peers
from bench.results import FOLDER, HERE, below_floor, constant, read, write_page

_NOT_BENCHMARKS = {"__init__", "__main__", "harness", "measure", "origin", "peers", "results"}
DEADLINE_S = 900


def names() -> list[str]:
    """Return the benchmarks in the order of the page, in which they run: those of whole programs last."""
    found = (file.stem for file in HERE.glob("*.py") if file.stem not in _NOT_BENCHMARKS)
    return sorted(found, key=lambda name: (constant(name, "HEAVY"), name))


def seconds(name: str) -> int:
    """Return how long a benchmark takes, about, on two cores with nothing beside."""
    return int(constant(name, "SECONDS"))


def run(name: str) -> bool:
    """Run a benchmark in a process of its own, and return whether it ended well."""
    threads = constant(name, "THREADS") or "1"
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "bench.measure", name, str(FOLDER / f"{name}.json")]
    deadline_s = max(DEADLINE_S, 3 * seconds(name))
    try:
        return subprocess.run(command, env=environment, timeout=deadline_s, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"{name} did not end within {deadline_s} s\n")
        return False


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="*", help="benchmarks to run; all of them without any")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    arguments = parser.parse_args()
    known = names()
    if arguments.list:
        sys.stdout.write("\n".join(known) + "\n")
        return 0
    if unknown := [name for name in arguments.name if name not in known]:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    peers.install()
    asked = [name for name in known if name in (arguments.name or known)]
    sys.stderr.write(f"{', '.join(asked)}: about {sum(map(seconds, asked)) / 60:.0f} minutes\n")
    failed = [name for name in asked if not run(name)]
    # A benchmark that failed keeps its figures of before, with their commit, and no sentence about them.
    found = {name: one for name in known if (one := read(name)) is not None}
    write_page(found)
    below = below_floor({name: found[name] for name in asked if name not in failed})
    for line in [*(f"{name} failed" for name in failed), *below]:
        sys.stderr.write(f"{line}\n")
    return 1 if failed or below else 0


if __name__ == "__main__":
    sys.exit(main())
