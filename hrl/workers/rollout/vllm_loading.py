"""How a vLLM engine that gets an adapter alone loads the model beside it.

vLLM imports this module in the processes that load the model, by the name of the extension of their worker.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from hrl.workers.rollout.vllm_worker import RolloutWorkerExtension

#: Name of the loader in vLLM.
LOAD_FORMAT = "hrl_beside_adapter"


def loading_options() -> dict[str, Any]:
    """Return the arguments of vLLM's engine by which it loads a model beside an adapter on a CPU."""
    extension = f"{AdapterWorkerExtension.__module__}.{AdapterWorkerExtension.__name__}"
    return {"load_format": LOAD_FORMAT, "worker_extension_cls": extension}


@register_model_loader(LOAD_FORMAT)
class AdapterLoader(DefaultModelLoader):
    """Reads a folder of weights as vLLM does by default, into the layers of an engine without adapters on a CPU.

    With adapters vLLM gives experts the kernels by which they could have some, whatever the device; on a CPU these
    don't run. Routed experts have no adapter, and the products of other layers are `vllm_adapter.multiply_plainly`.
    """

    def __init__(self, load_config: Any) -> None:
        usual = copy.copy(load_config)
        usual.load_format = "auto"
        super().__init__(usual)

    def load_model(self, vllm_config: VllmConfig, *args: Any, **more: Any) -> nn.Module:
        """Return the model with its weights; the manager of adapters wraps its layers later."""
        if torch.cuda.is_available():
            return super().load_model(vllm_config, *args, **more)
        asked, vllm_config.lora_config = vllm_config.lora_config, None
        try:
            return super().load_model(vllm_config, *args, **more)
        finally:
            vllm_config.lora_config = asked


class AdapterWorkerExtension(RolloutWorkerExtension):
    """The same methods; its name is what has vLLM import this module."""
