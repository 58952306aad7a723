"""What the workers of all roles have in common."""

from __future__ import annotations

import logging
import re
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from hrl.algos.policy_losses import POLICY_LOSSES
from hrl.config.model import LearnerConfig
from hrl.metrics import Metric
from hrl.models.source import find_on_this_node
from hrl.single_controller.dispatch import Dispatch, register
from hrl.single_controller.worker import Worker
from hrl.workers.runtime import Runtime, join_world, local_device

if TYPE_CHECKING:
    from hrl.config.critic import CriticModelConfig
    from hrl.config.model import BackboneConfig, CheckpointConfig
    from hrl.config.offline import OfflineModelConfig
    from hrl.config.reward import RewardBackboneConfig
    from hrl.models.loading import ModelSource
    from hrl.workers.engine.engine import Engine
    from hrl.workers.requests import Training
    from hrl.workers.value_model import ValueModel

logger = logging.getLogger(__name__)

_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


class ModelWorker(Worker):
    """One rank of a role that holds a model.

    Args:
        model: Its section.
        training: How it learns; `None` for a role that does not.
        checkpoint: What is saved and loaded of a model that learns; `None` for its whole state.
        runtime: Device, threads and deadlines of this process.
        model_path: Folder of the model on the driver's node.
    """

    def __init__(
        self,
        model: BackboneConfig | RewardBackboneConfig,
        training: Training | None = None,
        checkpoint: CheckpointConfig | None = None,
        *,
        runtime: Runtime,
        model_path: str,
    ) -> None:
        super().__init__()
        self.model = model
        self.training = training
        self.checkpoint = checkpoint
        self.runtime = runtime
        self.model_path = model_path
        POLICY_LOSSES.take(runtime.own_losses)

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The sharded model."""

    def model_source(self) -> ModelSource:
        """Return which model to load and how: its section, its folder on this node, and what holds for all roles."""
        from hrl.models.adapter import adapter_of
        from hrl.models.loading import ModelSource

        learner = self.model if isinstance(self.model, LearnerConfig) else None
        return ModelSource(
            self.model_path,
            self.model.override_config,
            self.model.enable_gradient_checkpointing,
            self.runtime.share_prefix,
            self.runtime.trust_remote_code,
            self.runtime.max_model_len,
            None if learner is None else adapter_of(learner, self.runtime.seed),
            self.model.recompute_num_layers,
            self.model.enable_activation_offload,
            self.runtime.shows_pictures,
            self.runtime.freeze_vision_tower,
            self.runtime.packs_rows,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> str:
        """Have the sharded state written to `folder`; return the file that will be there when this rank's part is."""
        contents = None if self.checkpoint is None else self.checkpoint.save_contents
        return str(self.engine.begin_save(Path(folder), contents))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_save(self, wait: bool = True) -> None:
        """Wait until all that this rank was to write is on disk, or only look; raise what went wrong."""
        self.engine.finish_save(wait=wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def abandon_save(self) -> None:
        """Wait until this rank writes nothing any more, whatever became of it."""
        self.engine.abandon_save()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def bytes_to_save(self) -> dict[str, int]:
        """Return the bytes of tensors that this rank writes in `save_checkpoint`, by what a checkpoint holds."""
        return self.engine.bytes_to_save(None if self.checkpoint is None else self.checkpoint.save_contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def bytes_to_export(self) -> int:
        """Return the bytes of weights in the folder that `export_hf` writes."""
        return self.engine.bytes_to_export()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Load what `save_checkpoint` wrote."""
        self.engine.load(Path(folder), None if self.checkpoint is None else self.checkpoint.load_contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, folder: str, record: str | None = None) -> None:
        """Have weights for transformers and vLLM written to `folder`; a file named will say when they are."""
        self.engine.begin_export(Path(folder), None if record is None else Path(record))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def peak_memory(self) -> dict[str, Metric]:
        """Return the most memory that this process, with all roles in it, and its engine have held.

        See `peak_memory`.
        """
        return peak_memory(local_device(self.runtime))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def start_profile(self) -> None:
        """Profile this process, with all roles in it."""
        from hrl.profiling.recorder import start_profile

        start_profile()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def stop_profile(self, name: str) -> dict[str, Any]:
        """Write the trace `<name>_rank_<rank>.json.gz`, and return the profile of this process (`Profile.to_plain`)."""
        from hrl.profiling.recorder import stop_profile

        return stop_profile(self.trace_file(name)).to_plain()

    def trace_file(self, name: str) -> Path:
        """Return the file of this rank's trace."""
        return Path(self.runtime.run_folder) / "profile" / f"{name}_rank_{self.rank}.json.gz"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def files_below(self, folder: str) -> dict[str, int]:
        """Return what this rank sees below a folder: bytes of every file, by path relative to it."""
        return file_sizes(Path(folder))


class ScalarModelWorker(ModelWorker):
    """One rank of a model with one number per token: a critic or a reward model."""

    model: CriticModelConfig | RewardBackboneConfig | OfflineModelConfig
    value_model: ValueModel

    @property
    def engine(self) -> Engine:
        """The sharded model."""
        return self.value_model.engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the backbone with its head and, where it learns, its optimizer and schedule."""
        from hrl.workers.value_model import ValueModel

        self.model_path = str(find_on_this_node(self.model_path))
        device = join_world(self.runtime)
        self.value_model = ValueModel(self.model_source(), self.training, self.model.fsdp_config, device=device)


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
