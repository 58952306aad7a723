"""What a critic and a reward model have in common as workers: a backbone with a scalar head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hrl.models.source import find_on_this_node
from hrl.single_controller.dispatch import Dispatch, register
from hrl.workers.model_worker import ModelWorker
from hrl.workers.runtime import Runtime, join_world

if TYPE_CHECKING:
    from hrl.config.critic import CriticModelConfig
    from hrl.config.offline import OfflineModelConfig
    from hrl.config.reward import RewardBackboneConfig
    from hrl.workers.requests import Training

    ScalarModelSection = CriticModelConfig | RewardBackboneConfig | OfflineModelConfig


class ScalarModelWorker(ModelWorker):
    """One rank of a model with one number per token.

    Args:
        model: Its section.
        training: How it learns; `None` for a frozen model.
        runtime: Device, threads, widths and deadlines of this process.
        model_path: Folder of the model it starts from, on the driver's node.
    """

    def __init__(
        self, model: ScalarModelSection, training: Training | None = None, *, runtime: Runtime, model_path: str
    ) -> None:
        super().__init__(runtime, model_path)
        self.model = model
        self.training = training

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the backbone with its head and, where it learns, its optimizer and schedule."""
        from hrl.workers.value_model import ValueModel

        self.model_path = str(find_on_this_node(self.model_path))
        device = join_world(self.runtime)
        source = self.model_source(self.model)
        self.value_model = ValueModel(source, self.training, self.model.fsdp_config, device=device)
