"""What the workers of all roles have in common."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from hrl.metrics import Metric
from hrl.single_controller.dispatch import Dispatch, register
from hrl.single_controller.worker import Worker
from hrl.workers.runtime import Runtime, local_device

if TYPE_CHECKING:
    from hrl.config.model import BackboneConfig
    from hrl.config.reward import RewardBackboneConfig
    from hrl.models.loading import ModelSource

logger = logging.getLogger(__name__)

_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


class ModelWorker(Worker):
    """One rank of a role that holds a model.

    Args:
        runtime: Device, threads, widths and deadlines of this process.
        model_path: Folder of the model on the driver's node.
    """

    def __init__(self, runtime: Runtime, model_path: str) -> None:
        super().__init__()
        self.runtime = runtime
        self.model_path = model_path

    def model_source(self, section: BackboneConfig | RewardBackboneConfig) -> ModelSource:
        """Make it of the role's `model` section, the folder that this node has, and what holds for every role."""
        from hrl.models.loading import ModelSource

        return ModelSource(
            self.model_path,
            section.override_config,
            section.enable_gradient_checkpointing,
            self.runtime.share_prefix,
            self.runtime.trust_remote_code,
            self.runtime.max_model_len,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def peak_memory(self) -> dict[str, Metric]:
        """Return the most memory that this process, with all roles in it, and its engine have held.

        See `peak_memory`.
        """
        return peak_memory(local_device(self.runtime))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def files_below(self, folder: str) -> dict[str, int]:
        """Return what this rank sees below a folder: bytes of every file, by path relative to it."""
        return file_sizes(Path(folder))


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


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of every file below a folder, by path relative to it; empty where there is no such folder.

    Driver and ranks compare what they see, to know that they write to one disk.
    """
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
