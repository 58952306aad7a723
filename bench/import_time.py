"""Time to import the library.

What a user waits for at the first line of a script, and a command line before it can answer: each import runs in a
new Python process, the start of which is in both times. Bare `import trl` only registers names, as `import hrl` does,
so the class that one trains GRPO with is imported as well, from both. OpenRLHF's package is empty at the top, and so
takes nothing to import; it is left out. Files are in the page cache: every import has run before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

from bench import peers
from bench.harness import Case
from bench.peers import TRL, VERL

SECONDS = 50
THREADS = 1
_MOST_S = 0.3


def cases() -> Iterator[Case]:
    """Yield the bare imports, then the class that one trains with."""
    for ours, theirs, peer, floor, rounds in (
        ("import hrl", "import verl", VERL, 12.0, 5),  # verl takes four seconds
        ("import hrl", "import trl", TRL, None, 7),
        ("from hrl import GRPO", "from trl import GRPOTrainer", TRL, None, 2),  # and TRL eight
    ):
        label = f"`{ours}`, `{theirs}`"
        yield Case(label, peer, _imports(ours), _imports(theirs), _light if floor else _any, floor, rounds=rounds)


def _imports(statement: str) -> Callable[[], float]:
    """Return a function that runs an import in a process of its own, and returns the seconds that it took there."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(peers.FOLDER))))
    code = f"import time; begin = time.perf_counter()\n{statement}\nprint(time.perf_counter() - begin)"
    command = [sys.executable, "-W", "ignore", "-c", code]

    def run() -> float:
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        return float(done.stdout.split()[-1])

    return run


def _light(ours: float, theirs: float) -> None:
    assert ours <= _MOST_S, f"import hrl took {ours:.2f} s"


def _any(ours: float, theirs: float) -> None:
    pass
