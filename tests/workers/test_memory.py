"""A peak is a peak: it stays when the memory is gone, and an engine's processes count."""

from __future__ import annotations

import subprocess
import sys

import torch

from hrl.workers.model_worker import peak_memory

MIB = 2**20
HOLDS_AND_LETS_GO = """
import sys
held = b"x" * int(sys.argv[1])
del held
print("done", flush=True)
sys.stdin.read()
"""


def peaks() -> dict[str, float]:
    return {name: metric.result() for name, metric in peak_memory(torch.device("cpu")).items()}


def test_memory_that_was_given_back_still_counts() -> None:
    before = peaks()["perf/max_memory_gib"]
    held = torch.ones(int(before * 2**30) + 300 * MIB, dtype=torch.uint8)  # more than there ever was
    del held
    after = peaks()["perf/max_memory_gib"]
    assert after > before + 0.29
    assert peaks()["perf/max_memory_gib"] >= after


def test_the_processes_below_count_together_and_apart_from_this_one() -> None:
    before = peaks().get("perf/max_child_memory_gib", 0.0)
    children = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", HOLDS_AND_LETS_GO, str(200 * MIB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == "done\n"
        with_children = peaks()
    finally:
        for child in children:
            child.communicate()
    assert 0.39 < with_children["perf/max_child_memory_gib"] - before < 0.6
    assert peaks().get("perf/max_child_memory_gib", 0.0) < before + 0.1
