"""What a critic and a reward model have in common as workers: a backbone with a scalar head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hrl.models.source import find_on_this_node
from hrl.single_controller.dispatch import Dispatch, register
from hrl.workers.model_worker import ModelWorker
from hrl.workers.runtime import Runtime, join_world


class ScalarModelWorker(ModelWorker):
    """One rank of a model with one number per token.

    Args:
        config: Its section `model` is read.
        train: `optim`, `grad_clip` and what else its updates want; `None` for a frozen model.
        total_optimizer_steps: Length of the run, over which learning rate schedules are stretched.
        runtime: Device, threads, widths and deadlines of this process.
        model_path: Folder of the model it starts from, on the driver's node.
    """

    def __init__(
        self,
        config: Any,
        train: Any | None,
        total_optimizer_steps: int | None,
        *,
        runtime: Runtime,
        model_path: str,
    ) -> None:
        super().__init__(runtime, model_path)
        self.config = config
        self.train = train
        self.total_optimizer_steps = total_optimizer_steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the backbone with its head and, where it learns, its optimizer and schedule."""
        from hrl.workers.value_model import ValueModel

        self.model_path = str(find_on_this_node(self.model_path))
        device = join_world(self.runtime)
        source = self.model_source(self.config.model)
        self.value_model = ValueModel(
            source,
            self.train,
            self.config.model.fsdp_config,
            device=device,
            total_steps=self.total_optimizer_steps,
            run_folder=Path(self.runtime.run_folder),
            seed=self.runtime.seed,
        )
