"""The environment of a run is loaded where it will live, before torch or a tokenizer are: a typo costs no seconds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hrl.episodes.pool import environment_of, try_environment
from hrl.errors import ConfigError, Problem

if TYPE_CHECKING:
    from hrl.config.environment import EnvironmentConfig
    from hrl.environments.loading import EnvironmentSpec


def load_environment(settings: EnvironmentConfig) -> EnvironmentSpec:
    """Return the environment that a configuration names, once a process has loaded it.

    Raises:
        ConfigError: None is named.
        EnvironmentLoadError: It can't be loaded.
    """
    if not settings.is_used:
        hint = "Name a class (hrl env-test my_env.py:Class), or a name that `hrl env-test --list` shows."
        raise ConfigError([Problem("environment.path", "is not set, so there is nothing to try.", hint)])
    spec = environment_of(settings)
    asyncio.run(try_environment(spec, settings))
    return spec
