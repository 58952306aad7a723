"""What is looked at of an environment before a run starts."""

from __future__ import annotations

import asyncio

from hrl.config.arithmetic import Fact
from hrl.config.ppo import PPOTrainerConfig
from hrl.environments.loading import EnvironmentLoadError
from hrl.episodes.pool import environment_of, try_environment
from hrl.preflight.findings import Findings, sentence
from hrl.preflight.given import Given


def look_at_environment(findings: Findings, config: PPOTrainerConfig, given: Given) -> None:
    """Load the environment in a process of its own, as the run will.

    Args:
        findings: Collects problems.
        config: The validated configuration.
        given: An environment that the caller gave as an object.
    """
    settings = config.environment
    if not settings.is_used:
        return
    if settings.is_object and given.environment is None:
        findings.problem(
            "environment.path",
            f"is {settings.path}: an environment that an earlier run was given from Python, and this run is not.",
            "Give it again (hrl.GRPO(environment=…)), or name its file (my_env.py:Class).",
        )
        return
    try:
        spec = environment_of(settings, given.environment)
        asyncio.run(try_environment(spec, settings))
    except EnvironmentLoadError as error:
        findings.problem("environment.path", f"can't be used: {sentence(str(error))}")
        return
    findings.facts.append(Fact("environment", f"{spec.source.title}, at most {settings.max_turns} turns"))
