"""What the workers of all roles have in common."""

from __future__ import annotations

from pathlib import Path

from hrl.metrics import Metric
from hrl.single_controller.base import Worker
from hrl.single_controller.base.decorator import Dispatch, register
from hrl.workers.folder import file_sizes
from hrl.workers.memory import peak_memory
from hrl.workers.runtime import Runtime, local_device


class ModelWorker(Worker):
    """One rank of a role that holds a model.

    Args:
        runtime: device, threads, widths and deadlines of this process.
        model_path: folder of the model on the driver's node.
    """

    def __init__(self, runtime: Runtime, model_path: str) -> None:
        super().__init__()
        self.runtime = runtime
        self.model_path = model_path

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def peak_memory(self) -> dict[str, Metric]:
        """The most memory that this process, with all roles in it, and its engine have held; see ``peak_memory``."""
        return peak_memory(local_device(self.runtime))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def files_below(self, folder: str) -> dict[str, int]:
        """What this rank sees below a folder: bytes of every file, by path relative to it."""
        return file_sizes(Path(folder))
