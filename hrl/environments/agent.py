"""An environment that asks the policy itself, such as an agent framework that speaks nothing but OpenAI's protocol."""

from __future__ import annotations

import asyncio
import inspect
import json
from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hrl.environments.interface import (
    Action,
    Environment,
    EnvironmentReplyError,
    Message,
    Observation,
    StepResult,
)

_END_S = 1.0
"""How long a program may take to end when its episode is over."""
_AT_WORK: Message = {"role": "user", "content": "the agent is at work"}


@dataclass(frozen=True)
class ClientSettings:
    """Where the policy of an episode is reached. The key is good for this episode alone.

    Attributes:
        base_url: Of the API, as clients take it: `http://127.0.0.1:…/v1`.
        api_key: Of this episode.
        model: The name of the policy.
    """

    base_url: str
    api_key: str
    model: str

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables in which OpenAI's client and most frameworks look for them."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}


class AgentEnvironment(Environment):
    """An episode that is a program of its own: it calls the policy as often as it likes, and returns a reward.

    Each answer that it gets is a turn of the episode. The run decides how turns are sampled, whatever the program asks
    for: temperature, top-p, top-k and seed are those of the run. Calls at the same time, and calls with a changed
    history, are branches. `environment.max_turns`, `data.max_prompt_length`, `data.max_response_length` and
    `environment.episode_timeout_s` hold for it: a call beyond one of them gets an error, and the episode counts as cut
    off. Its calls take none of its seconds.

    Attributes:
        seed: For what the program draws itself, the same for all samples of a prompt; set by `reset`.
        sample_seed: The same, of this sample alone.
    """

    seed: int = 0
    sample_seed: int = 0

    @abstractmethod
    def run(
        self, row: Mapping[str, Any], client: ClientSettings
    ) -> float | StepResult | Awaitable[float | StepResult | None] | None:
        """Play the episode. A plain method runs on a thread of its own; it may also be `async def`.

        It may take as long as the episode. When that is over, an `async` one is cancelled; a plain one ends with its
        next call, which is refused. One that makes none has its process replaced once no other episode is there.

        Args:
            row: The row of the data set, as it was read.
            client: Where the policy is reached.

        Returns:
            The reward, of the whole episode; None leaves it to the run's reward functions. Or a `StepResult` with
            `reward`, `truncated` and `metrics`.
        """

    def reset(self, row: Mapping[str, Any], seed: int, sample_seed: int = 0) -> Observation:
        self._row, self.seed, self.sample_seed = row, seed, sample_seed
        self._running: asyncio.Future[Any] | None = None
        return Observation(messages=row["prompt"], is_agent=True)

    async def step(self, action: Action) -> StepResult:  # type: ignore[override]  # the base allows both
        """Begin `run` with the settings that the first action has, or see whether it has ended."""
        if self._running is None:
            settings = json.loads(action.text)
            self._poll_s = float(settings.pop("poll_s"))
            self._running = asyncio.ensure_future(self._called(ClientSettings(**settings)))
        if not (await asyncio.wait({self._running}, timeout=self._poll_s))[0]:
            return StepResult(observation=[_AT_WORK])
        value = self._running.result()
        if not isinstance(value, StepResult):
            value = StepResult(reward=value)
        reward: Any = value.reward
        if (isinstance(reward, Sequence) and not isinstance(reward, str)) or getattr(reward, "ndim", 0) > 0:
            raise EnvironmentReplyError(
                "returned rewards of tokens, of which a program knows none: give one number, for the whole episode"
            )
        return StepResult(reward=value.reward, done=True, truncated=value.truncated, metrics=value.metrics)

    async def close(self) -> None:  # type: ignore[override]  # the base allows both
        """Cancel an `async` program that still runs, and let a plain one end, as it does with its next call.

        Its key is no longer good. A plain one that asks nothing goes on until its process is replaced.
        """
        running = getattr(self, "_running", None)
        if running is None:
            return
        if inspect.iscoroutinefunction(self.run):
            running.cancel()
        await asyncio.wait({running}, timeout=min(_END_S, self._poll_s))
        running.cancel()
        if running.done() and not running.cancelled():
            running.exception()  # of a program that nobody waits for any more

    async def _called(self, client: ClientSettings) -> Any:
        if inspect.iscoroutinefunction(self.run):
            return await self.run(self._row, client)
        value = await asyncio.get_running_loop().run_in_executor(None, self.run, self._row, client)
        return await value if inspect.isawaitable(value) else value
