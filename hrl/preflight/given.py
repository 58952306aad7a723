"""Objects that a caller in Python gives to a run instead of files named in the configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hrl.config.compose import YOURS
from hrl.config.data import held_out_beside
from hrl.config.environment import EnvironmentConfig
from hrl.config.outline import RunConfiguration
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.reward import FROM_PYTHON, RewardConfig, RewardEntry
from hrl.config.section import Section
from hrl.environments.loading import EnvironmentLoadError
from hrl.errors import DatasetError
from hrl.reward.function import RewardFunctionError, unwrapped
from hrl.reward.weighted import Rewards, entries_of

TRAIN_ROWS, VAL_ROWS = "python:train_rows", "python:val_rows"
"""The name of rows given as objects in `config.yaml` and messages."""


@dataclass(frozen=True)
class Given:
    """Objects given by the caller; for None the configuration applies.

    Attributes:
        train_rows: Rows to train on, in the format of rows in `data.train_files`. A generator is read here, once.
        val_rows: Rows to validate on. Without them, a run with `train_rows` validates on `data.val_files`, unless
            these belong to the configuration's own training rows.
        reward: The reward function, called like `compute_score`, or several; see `PickledFunction.of` for how one is
            sent.
        environment: The environment's class, a function that makes one, or a list of functions as tools; see
            `EnvironmentSpec.of`.

    Raises:
        DatasetError: Rows are not an iterable of rows.
    """

    train_rows: Iterable[Mapping[str, Any]] | None = None
    val_rows: Iterable[Mapping[str, Any]] | None = None
    reward: Rewards | None = None
    environment: Any = None

    def __post_init__(self) -> None:
        for name in ("train_rows", "val_rows"):
            object.__setattr__(self, name, _as_list(name, getattr(self, name)))

    def named_in(self, config: RunConfiguration) -> RunConfiguration:
        """Return a configuration with the names of these rows in place of files, and those of these functions.

        If only training rows are given, the configuration's bundled validation rows leave with its bundled training
        rows, and with them what was to be done with them by default. A `trainer.test_freq` of the caller's stays, and
        is refused by the rules if there is nothing left to validate on.

        Raises:
            DatasetError: The caller named files as well.
        """
        for key, rows, name in (("train_files", self.train_rows, TRAIN_ROWS), ("val_files", self.val_rows, VAL_ROWS)):
            is_set = config.origins is not None and config.origins.get(f"data.{key}") == YOURS
            named = getattr(config.data, key)
            if rows is not None and is_set and named not in ([], [name]):
                raise DatasetError(f"data.{key} is {named}, and rows are given as objects too: leave one of them out")
        names: dict[str, list[str]] = {}
        if self.train_rows is not None:
            names["train_files"] = [TRAIN_ROWS]
            beside = [held_out_beside(name) for name in config.data.train_files if isinstance(name, str)]
            if all(name in beside for name in config.data.val_files):
                names["val_files"] = []
        if self.val_rows is not None:
            names["val_files"] = [VAL_ROWS]
        changes: dict[str, Section] = {}
        if self.reward is not None and isinstance(config, PPOTrainerConfig):
            changes["reward"] = _with_functions_named(config.reward, self.reward)
        if self.environment is not None and isinstance(config, PPOTrainerConfig):
            changes["environment"] = _with_environment_named(config.environment, self.environment)
        if names:
            changes["data"] = config.data.model_copy(update=names)
        if names.get("val_files") == []:
            never: dict[str, Any] = {"val_before_train": False}
            if config.origins is not None and config.origins.get("trainer.test_freq") != YOURS:
                never["test_freq"] = -1
            changes["trainer"] = config.trainer.model_copy(update=never)
        return config.model_copy(update=changes)


def _with_environment_named(settings: EnvironmentConfig, given: Any) -> EnvironmentConfig:
    """Return the section `environment` with the name of what a run is given as an object.

    Raises:
        EnvironmentLoadError: The section names another one.
    """
    if settings.path is not None and not settings.is_object:
        raise EnvironmentLoadError(
            f"environment.path is {settings.path}, and an environment is given as an object too: leave one of them out"
        )
    return settings.model_copy(update={"path": name_of_environment(given)})


def name_of_environment(given: Any) -> str:
    """Return how `config.yaml` calls an environment that a run is given as an object."""
    # Functions are the tools of an environment that is hrl's own.
    return "tools" if isinstance(given, Sequence) else FROM_PYTHON + where_from(given)


def _with_functions_named(reward: RewardConfig, given: Rewards) -> RewardConfig:
    """Return the section `reward` with the functions that a run is given as objects among its functions, by name."""
    names_others = reward.functions is not None and not any(entry.is_object for entry in reward.functions)
    if names_others or reward.custom_reward_function.path is not None:
        return reward  # which is refused where the functions are read
    try:
        return reward.model_copy(update={"functions": functions_named(given)})
    except RewardFunctionError:
        return reward  # told with everything else that is wrong, by `reward_look`


def functions_named(given: Rewards) -> list[RewardEntry]:
    """Return rewards as entries of `reward.functions`, an object by the name of where it comes from.

    Raises:
        RewardFunctionError: One is not a reward.
    """
    return [
        RewardEntry(path=FROM_PYTHON + where_from(entry[1]), label=entry[0], weight=entry[2])
        if isinstance(entry, tuple)
        else entry
        for entry in entries_of(given)
    ]


def where_from(function: Callable[..., Any]) -> str:
    """Return module and name of a function or of an object's class, and its file where it has one."""
    function = unwrapped(function)
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    name = f"{named.__module__}:{named.__qualname__}"
    try:
        file = inspect.getsourcefile(named)
    except TypeError:  # built in, or made in a notebook that is closed
        file = None
    return f"{name} of {Path(file).resolve()}" if file is not None and Path(file).is_file() else name


def _as_list(name: str, rows: Any) -> list[Mapping[str, Any]] | None:
    """Return rows as a list, so that they can be read again; the rows themselves are checked when they are read."""
    if rows is None:
        return None
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        raise DatasetError(f"{name} is of type {type(rows).__name__}; give a list of rows, each a dict")
    listed = list(rows)
    if listed and isinstance(listed[0], str):  # names of columns, or of files
        raise DatasetError(
            f"{name}, of type {type(rows).__name__}, yields strings and not rows; give a list of dicts (of a pandas "
            "DataFrame, df.to_dict('records')), or name files in data.train_files and data.val_files"
        )
    return listed
