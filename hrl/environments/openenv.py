"""Environments of OpenEnv, which run on a server of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from openenv.core.generic_client import GenericEnvClient

from hrl.environments.global_random import game_seed
from hrl.environments.interface import Action, Environment, StepResult
from hrl.errors import HrlError


class OpenEnvError(HrlError, RuntimeError):
    """An environment's server can't be reached, or refuses what it is sent; names it."""


class OpenEnvEnvironment(Environment):
    """An environment that a server of OpenEnv runs: each episode is a session there.

    What the policy writes is one field of the action. The policy is shown one field of the observation, or all of it as
    JSON. Rewards are those of the server. Samples of one row get the same seed (`bundled:games`).

    Args:
        url: Address of the server.
        action: Name of the field of an action.
        observation: Name of the field of an observation; all fields as JSON by default.
        prompt: What the policy is told before the first observation.
    """

    def __init__(self, url: str, action: str = "message", observation: str | None = None, prompt: str = "") -> None:
        self._url, self._action, self._observation, self._prompt = url, action, observation, prompt
        self._client: Any = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> str:  # type: ignore[override]
        """Begin a session."""
        self._client = GenericEnvClient(base_url=self._url)
        try:
            result = await self._client.reset(seed=game_seed(row, seed) % 2**31)
        except (OSError, RuntimeError, TimeoutError) as error:
            raise OpenEnvError(
                f"the OpenEnv server {self._url} can't be used (environment.kwargs.url): {error}"
            ) from error
        return "\n\n".join(part for part in (self._prompt, self._shown(result.observation)) if part)

    async def step(self, action: Action) -> StepResult:  # type: ignore[override]
        """Send the action."""
        try:
            result = await self._client.step({self._action: action.answer})
        except (OSError, RuntimeError, TimeoutError) as error:
            raise OpenEnvError(
                f"the OpenEnv server {self._url} refuses an action whose field {self._action!r} is a text "
                f"(environment.kwargs.action): {error}"
            ) from error
        done = bool(result.done)
        reward = None if result.reward is None else float(result.reward)
        return StepResult(None if done else self._shown(result.observation), reward=reward, done=done)

    async def close(self) -> None:  # type: ignore[override]
        """End the session."""
        if self._client is not None:
            await self._client.close()

    def _shown(self, observation: Mapping[str, Any]) -> str:
        if self._observation is None:
            return json.dumps(dict(observation), ensure_ascii=False, default=str)
        if self._observation not in observation:
            raise OpenEnvError(
                f"an observation of {self._url} has no field {self._observation!r} (environment.kwargs.observation); "
                f"it has {', '.join(observation)}"
            )
        return str(observation[self._observation])
