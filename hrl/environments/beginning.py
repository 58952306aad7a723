"""How an episode of an environment begins, whether in a process of its own or not."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from hrl.environments.interface import Observation
from hrl.environments.replies import read_observation
from hrl.environments.tools import ToolEnvironment


def arguments_of_reset(reset: Any, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return what `reset` is called with beside the row: its seed, if it names it."""
    try:
        parameters = inspect.signature(reset).parameters.values()
    except (TypeError, ValueError):
        return {}  # written in C, without a signature
    takes_seed = any(one.name == "seed" or one.kind is one.VAR_KEYWORD for one in parameters)
    return {"seed": seed} if takes_seed else {}


def first_observation(environment: Any, value: object) -> Observation:
    """Read what `reset` of an environment returned, with the environment's tools.

    Raises:
        EnvironmentReplyError: It is no observation.
    """
    observation = read_observation(value)
    return environment.with_tools(observation) if isinstance(environment, ToolEnvironment) else observation
