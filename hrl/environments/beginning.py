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


def arguments_of_reset(reset: Any, seeds: Mapping[str, int]) -> dict[str, int]:
    """Return what `reset` is called with beside the row: those of the seeds that it names.

    Args:
        reset: The method.
        seeds: `seed` and `sample_seed`. Arguments by any name (`**kwargs`) are given `seed` alone, as gymnasium's are.
    """
    try:
        parameters = inspect.signature(reset).parameters.values()
    except (TypeError, ValueError):
        return {}  # written in C, without a signature
    named = {"seed" if one.kind is one.VAR_KEYWORD else one.name for one in parameters}
    return {name: seed for name, seed in seeds.items() if name in named}


def first_observation(environment: Any, value: object) -> Observation:
    """Read what `reset` of an environment returned, with the environment's tools.

    Raises:
        EnvironmentReplyError: It is no observation.
    """
    observation = read_observation(value)
    return environment.with_tools(observation) if isinstance(environment, ToolEnvironment) else observation
