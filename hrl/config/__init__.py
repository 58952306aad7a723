"""The typed configuration: schema, composition, validation. Imports neither torch nor ray.

`compose_cli` and `load_config` are imported on first use, because a worker that unpickles a configuration needs only
the schema and not hydra.
"""

from typing import TYPE_CHECKING, Any

from hrl.config.ppo import PPOTrainerConfig
from hrl.errors import ConfigError, Problem

if TYPE_CHECKING:
    from hrl.config.compose import compose_cli
    from hrl.config.load import load_config

__all__ = ["ConfigError", "PPOTrainerConfig", "Problem", "compose_cli", "load_config"]

_LAZY = {"compose_cli": "compose", "load_config": "load"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
