"""How much memory a rank has held."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import torch

from hrl.metrics import Metric

_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def peak_memory(device: torch.device) -> dict[str, Metric]:
    """Return the most memory that this process and those below it have held since they started, in GiB.

    On a GPU it is what the process's CUDA allocator has given out; vLLM's share is a setting. On a CPU it is the
    resident set (RSS) at its largest; pages that several processes map, such as weights on their way, count in each.

    Args:
        device: Of the rank.

    Returns:
        `perf/max_memory_gib` of this process. On a CPU also `perf/max_child_memory_gib` of the processes below it,
        which are an engine's if it has one, taken together.
    """
    if device.type == "cuda":
        return {"perf/max_memory_gib": _gib(torch.cuda.max_memory_allocated(device))}
    own = psutil.Process()
    metrics = {"perf/max_memory_gib": _gib(_peak_resident_bytes(own.pid))}
    below = sum(_peak_resident_bytes(process.pid) for process in own.children(recursive=True))
    return metrics | ({"perf/max_child_memory_gib": _gib(below)} if below else {})


def _peak_resident_bytes(pid: int) -> int:
    """Return the resident set at its largest; 0 for a process that has ended."""
    try:
        found = _PEAK.search(Path(f"/proc/{pid}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[1]) * 1024 if found else 0


def _gib(num_bytes: int) -> Metric:
    return Metric.max(num_bytes / 2**30)
