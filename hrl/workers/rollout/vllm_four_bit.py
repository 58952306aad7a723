"""A vLLM engine whose weights are the trainer's in 4 bits: it rounds them as they come from the model's folder.

Under an adapter that is sent alone the model's own weights never travel, and an engine with other numbers than the
trainer's would sample from another policy. So vLLM's loader hands on, in place of each weight that the trainer holds in
4 bits, what that weight is there (`hrl.models.four_bit.rounded`). The engine holds it in its own dtype.

vLLM imports this module in the processes that load the model, by the name of the extension of their worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.model_loader import register_model_loader

from hrl.models.checkpoint_form import CheckpointForm
from hrl.models.four_bit import FourBitError, names_to_hold, rounded
from hrl.models.loading import ModelSource, load_causal_lm
from hrl.workers.rollout.vllm_loading import AdapterLoader
from hrl.workers.rollout.vllm_worker import RolloutWorkerExtension

#: Name of the loader in vLLM, and of what it finds in vLLM's `additional_config`.
LOAD_FORMAT, NAMES = "hrl_4bit", "hrl_weights_in_4bit"


def loading_options(source: ModelSource) -> dict[str, Any]:
    """Return the arguments of vLLM's engine by which it rounds weights as it loads them."""
    model = load_causal_lm(source, torch.bfloat16, meta=True).model
    form = CheckpointForm.of(model)
    names = [piece.name for name in names_to_hold(model) for piece in form.pieces(name)]
    extension = f"{FourBitWorkerExtension.__module__}.{FourBitWorkerExtension.__name__}"
    return {
        "load_format": LOAD_FORMAT,
        "additional_config": {NAMES: sorted(names)},
        "worker_extension_cls": extension,
    }


@register_model_loader(LOAD_FORMAT)
class FourBitLoader(AdapterLoader):
    """Reads a folder of weights as vLLM does by default, and rounds those that are named in the configuration."""

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield name and weight of everything in the folder.

        Raises:
            FourBitError: It has none of a name that the trainer has, or bitsandbytes does not run here.
        """
        config = get_current_vllm_config()
        # A draft model, of which there is no trainer, is loaded by the same class.
        names = set(config.additional_config[NAMES]) if model_config is config.model_config else set()
        device = "cuda" if torch.cuda.is_available() else "cpu"  # as the trainer does beside it
        for name, weight in super().get_all_weights(model_config, model):
            if name in names:
                names.discard(name)
                yield name, rounded(weight.to(device))
            else:
                yield name, weight
        if names:
            raise FourBitError(
                f"the trainer holds {min(names)} in 4 bits ({len(names)} such weights), which the engine does not find "
                f"in {model_config.model}: set actor_rollout_ref.model.lora.merge=true, with which it gets them from "
                "the trainer"
            )


class FourBitWorkerExtension(RolloutWorkerExtension):
    """The same methods; its name is what has vLLM import this module."""
