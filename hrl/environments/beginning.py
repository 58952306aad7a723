"""How an episode of an environment begins, whether in a process of its own or not."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from hrl.environments.interface import Observation
from hrl.environments.replies import read_observation
from hrl.environments.tools import ToolEnvironment
from hrl.nearest import did_you_mean

_LONGEST_NAME = 80


class NoColumnError(KeyError):
    """A row was asked for a column that it does not have."""

    def __str__(self) -> str:
        return str(self.args[0])


class Row(dict[str, Any]):
    """A row as `reset` is given it: a dict that says what it has where it is asked for something else."""

    def __missing__(self, column: object) -> Any:
        meant = did_you_mean(str(column)[:_LONGEST_NAME], self)
        raise NoColumnError(
            f"the row has no column {column!r:.{_LONGEST_NAME}}; it has {', '.join(self) or 'none'}. {meant}".rstrip()
            + " Rows that have it are named with data.train_files"
        )


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
