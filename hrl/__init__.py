"""hrl: reinforcement learning for language models, one driver that reads like the textbook."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hrl.api.run import Run
    from hrl.api.trainers import DPO, GRPO, KTO, PPO, SFT, RewardModel
    from hrl.environments.agent import AgentEnvironment
    from hrl.environments.interface import Action, Environment, Observation, StepResult, ToolCall
    from hrl.environments.single_turn import SingleTurn
    from hrl.environments.tool_functions import tool
    from hrl.environments.tools import ToolEnvironment
    from hrl.errors import HrlError
    from hrl.protocol import DataProto
    from hrl.trainer.callbacks import Callback, RunState

__version__ = "0.1.0"
__all__ = [
    "DPO",
    "GRPO",
    "KTO",
    "PPO",
    "SFT",
    "Action",
    "AgentEnvironment",
    "Callback",
    "DataProto",
    "Environment",
    "HrlError",
    "Observation",
    "RewardModel",
    "Run",
    "RunState",
    "SingleTurn",
    "StepResult",
    "ToolCall",
    "ToolEnvironment",
    "__version__",
    "tool",
]

# Torch costs a second, hydra a half: what needs them loads when it is first read.
_LAZY = {
    **dict.fromkeys(("PPO", "GRPO", "DPO", "KTO", "SFT", "RewardModel"), "hrl.api.trainers"),
    "Run": "hrl.api.run",
    **dict.fromkeys(("Callback", "RunState"), "hrl.trainer.callbacks"),
    "DataProto": "hrl.protocol",
    **dict.fromkeys(("Action", "Environment", "Observation", "StepResult", "ToolCall"), "hrl.environments.interface"),
    "SingleTurn": "hrl.environments.single_turn",
    "AgentEnvironment": "hrl.environments.agent",
    "ToolEnvironment": "hrl.environments.tools",
    "tool": "hrl.environments.tool_functions",
    "HrlError": "hrl.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hrl' has no attribute {name!r}{_meant_by(name)}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def _meant_by(name: str) -> str:
    """Return the hint for a name that probably stands for another, such as TRL's `GRPOTrainer`."""
    from hrl.nearest import did_you_mean

    if name.startswith("_"):
        return ""
    short = name.removesuffix("Trainer").removesuffix("Config")
    hint = did_you_mean("Callback" if name == "TrainerCallback" else short, __all__)
    if short == name or not short:
        return f". {hint}" if hint else ""
    takes = "What TRL's configuration sets are arguments there, or keys of its config."
    if short == "RLOO":
        return f'. Use hrl.GRPO(recipe="rloo"). {takes}'
    return f". {hint} {takes}" if hint else ""


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
