"""Try many hostile cases: `python -m tests.fuzz [CASES] [SEED] [WORD …]`, with words that name targets.

CASES is the number of all together. The exit status is 1 if one ended in another way than promised, and 2 if no target
was named.
"""

from __future__ import annotations

import resource
import sys
import time

from rich.console import Console

from tests.fuzz.cases import explore
from tests.fuzz.targets import targets

MEMORY_BYTES = 8 << 30
"""What this process may map: a file that unpacks to more than any memory must not take the machine along."""


def main(arguments: list[str]) -> int:
    """Try the cases and print what came of them."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    numbers = [int(word) for word in arguments if word.isdigit()]
    words = [word for word in arguments if not word.isdigit()]
    cases, random_seed = [*numbers, *[10_000, 0][len(numbers) :]][:2]
    chosen = [target for target in targets() if not words or any(word in target.name for word in words)]
    if not chosen:
        sys.stderr.write(
            f"no target has {' or '.join(words)} in its name: {', '.join(each.name for each in targets())}\n"
        )
        return 2
    console, total, findings = Console(highlight=False), 0, 0
    for target in chosen:
        began = time.monotonic()
        tried = explore(target, round(cases / sum(each.weight for each in chosen)), random_seed)
        total, findings = total + tried.cases, findings + len(tried.findings)
        console.print(f"{target.name}: {tried} in {time.monotonic() - began:.0f} s", markup=False, soft_wrap=True)
    console.print(f"{total} cases, {findings} findings, seed {random_seed}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
