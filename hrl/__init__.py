"""hrl: reinforcement learning for language models, one driver that reads like the textbook."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hrl.api.run import Run
    from hrl.api.trainers import DPO, GRPO, PPO, SFT, RewardModel
    from hrl.protocol import DataProto
    from hrl.trainer.callbacks import Callback, RunState

__version__ = "0.1.0"
__all__ = [
    "DPO",
    "GRPO",
    "PPO",
    "SFT",
    "Callback",
    "DataProto",
    "RewardModel",
    "Run",
    "RunState",
    "__version__",
]

# Torch costs a second, hydra a half: what needs them loads when it is first read.
_LAZY = {
    **dict.fromkeys(("PPO", "GRPO", "DPO", "SFT", "RewardModel"), "hrl.api.trainers"),
    "Run": "hrl.api.run",
    **dict.fromkeys(("Callback", "RunState"), "hrl.trainer.callbacks"),
    "DataProto": "hrl.protocol",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hrl' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
