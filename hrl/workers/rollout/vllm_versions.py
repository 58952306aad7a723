"""What differs between the versions of vLLM that the adapter spans. What is there decides, not the version's number."""

from __future__ import annotations

import importlib

from torch import Tensor, nn

from hrl.workers.rollout.base import RolloutError

#: The first version of the span, and the first one beyond it, as in pyproject.toml.
FIRST = (0, 24)
END = (0, 33)


def require_supported(version: str) -> None:
    """Refuse a vLLM whose interfaces hrl has not been held against.

    Args:
        version: `vllm.__version__`.

    Raises:
        RolloutError: Outside the span, or not a release; says what to install.
    """
    numbers = version.split(".")[:2]
    known = len(numbers) == 2 and all(number.isdecimal() for number in numbers)
    if not known or not FIRST <= tuple(map(int, numbers)) < END:
        first, end = (".".join(map(str, bound)) for bound in (FIRST, END))
        raise RolloutError(
            f"vLLM {version} is installed; rollout.name=vllm works with vLLM from {first} up to, not including, {end} "
            f"(0.24 to 0.26 are built for torch 2.11, 0.27 to 0.32 for torch 2.13): pip install 'vllm>={first},<{end}'"
        )


def request_errors() -> tuple[type[Exception], ...]:
    """Return what a failed request may raise: the ancestor of vLLM's errors; before 0.27 there is none."""
    exceptions = importlib.import_module("vllm.exceptions")
    if hasattr(exceptions, "VLLMError"):
        return (exceptions.VLLMError, RuntimeError, ValueError)
    engine = importlib.import_module("vllm.v1.engine.exceptions")
    return (engine.EngineGenerateError, engine.EngineDeadError, RuntimeError, ValueError)


def load_numel(parameter: Tensor) -> int:
    """Elements that a checkpoint has for the parameter: before 0.31, whose padding nobody declared, all of them."""
    utils = importlib.import_module("vllm.model_executor.model_loader.reload.utils")
    if hasattr(utils, "get_tensor_load_numel"):
        return int(utils.get_tensor_load_numel(parameter))
    return parameter.numel()


def has_head_dtype(logits_processor: nn.Module) -> bool:
    """Return whether a generating model's head can have a dtype of its own (from 0.26 on)."""
    return hasattr(logits_processor, "_apply_head")
