"""What the workers of all roles have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from hrl.metrics import Metric
from hrl.models.hf_config import ModelConfigError
from hrl.single_controller.dispatch import Dispatch, register
from hrl.single_controller.worker import Worker
from hrl.workers.folder import file_sizes
from hrl.workers.memory import peak_memory
from hrl.workers.runtime import Runtime, local_device

if TYPE_CHECKING:
    from hrl.config.model import ModelConfig
    from hrl.models.loading import ModelSource

logger = logging.getLogger(__name__)


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

    def model_source(self, section: ModelConfig) -> ModelSource:
        """From the role's `model` section, the folder that this node has, and what holds for every role."""
        from hrl.models.loading import ModelSource

        return ModelSource(
            self.model_path,
            section.override_config,
            section.enable_gradient_checkpointing,
            self.runtime.share_prefix,
            self.runtime.trust_remote_code,
            self.runtime.max_model_len,
        )

    def probe(self, check: Callable[[ModelSource], object], source: ModelSource) -> None:
        """Let rank 0 compare this role's model with its own forward; every rank calls it, before anything is started.

        Args:
            check: `require_right_causal_lm` or `require_right_scalar_model`.
            source: The role's model.

        Raises:
            ProbeError: On every rank, so that none waits for another.
        """
        from hrl.models.probe import ProbeError

        if not self.runtime.probe:
            logger.warning("%s: not compared with its own forward (model.probe=false)", source.path)
            return
        refusal: list[str | None] = [None]
        if self.rank == 0:
            try:
                check(source)
            except (ProbeError, ModelConfigError) as error:
                refusal = [str(error)]
        dist.broadcast_object_list(refusal, src=0)
        if refusal[0] is not None:
            raise ProbeError(refusal[0])

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
