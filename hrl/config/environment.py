"""`environment.*`: what the policy acts in, over several turns."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from hrl.config.reward import FROM_PYTHON
from hrl.config.section import Section, Unit

WITH_TOOLS = ("tools", "python", "mcp")
"""Environments of hrl in which the policy calls tools."""
UNPAID = ("single_turn", *WITH_TOOLS)
"""Environments of hrl that give no rewards, so that reward functions decide."""


class EnvironmentConfig(Section):
    """`environment.*`: what the policy acts in, over several turns. Without `path` every prompt has one answer."""

    path: str | None = None
    """The environment: `my_env.py:Class`, `package.module:Class`, or a name that `hrl env-test --list` shows. A row's
    column `env` may name another one."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor. A text `env:NAME` stands for the environment variable NAME."""
    row_environments: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Environments that a row's `env` names, with arguments of their constructors as in `kwargs`. `mcp`, `openenv` and
    `verifiers` can't be named by rows otherwise."""
    tools: list[str] = Field(default_factory=list)
    """What the policy may call, where the environment is `tools`: Python functions, as `my_tools.py:function`
    or `package.module:function`, or `python`, which runs programs in a sandbox."""
    max_turns: Annotated[PositiveInt, Unit("turns of the policy")] = 8
    """Turns after which an episode is cut off. Its tokens are limited by `data.max_response_length`."""
    max_turn_tokens: Annotated[PositiveInt | None, Unit("tokens")] = None
    """Longest turn of the policy in tokens; null lets a turn take all that is left of the episode."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts that end a turn, such as `</search>`, and stay part of it. The engine samples on to the end of its answer,
    whose rest is dropped, so set `max_turn_tokens` beside it."""
    max_observation_tokens: Annotated[PositiveInt | None, Unit("tokens")] = 1024
    """Longest text of one message of the environment in tokens; what is longer loses its middle. null cuts nothing."""
    tool_parser: str | None = None
    """How tool calls are written, a name of vLLM's tool parsers, such as hermes, llama3_json, mistral or pythonic. Null
    chooses by the chat template."""
    reasoning_parser: str | None = None
    """How reasoning is written, a name of vLLM's reasoning parsers, such as deepseek_r1 or qwen3; null reads none."""
    num_workers: Annotated[PositiveInt, Unit("processes")] = 2
    """Processes in which environments live."""
    step_timeout_s: PositiveFloat = 60.0
    """Seconds that one call of an environment's `reset`, `step` or `close` may take."""
    tool_timeout_s: PositiveFloat = 30.0
    """Seconds that one call of a tool may take; the policy is told when it takes longer, or when all calls of its turn
    together take longer than nine tenths of `step_timeout_s`."""
    max_parallel_calls: Annotated[PositiveInt, Unit("calls")] = 16
    """Calls of tools that are made in one turn; of further ones the policy is told that they were not made."""
    episode_timeout_s: PositiveFloat = 600.0
    """Seconds that an episode may take, with all its attempts; one that takes longer is cut off and trains nothing.
    Time in which it waits for the engine, or in the sandbox's line, does not count."""
    memory_limit_gib: PositiveFloat | None = 8.0
    """Address space of one such process in GiB; null sets no limit."""
    env: list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(=.*)?$")]] = Field(default_factory=list)
    """Environment variables of these processes, as `reward.env` names them."""
    on_error: Literal["raise", "skip"] = "skip"
    """What happens when an environment fails: stop the run (raise), or leave the episode out of training and count it
    (skip); more than a tenth of a step's episodes, and more than one, stop the run in any case."""
    max_attempts: PositiveInt = 2
    """How often an episode is begun before it counts as failed, where its process dies."""
    on_truncation: Literal["score", "mask", "bootstrap"] = "score"
    """What becomes of an episode that was cut off, by its environment or by a limit other than seconds: it has the
    rewards that it got (score), it trains nothing (mask), or it has the rewards that it got and behind them what the
    critic expects (bootstrap)."""
    max_concurrent_episodes: Annotated[NonNegativeInt, Unit("episodes")] = 0
    """Episodes that are played at the same time; 0 plays all of a step at once."""

    @property
    def is_used(self) -> bool:
        """Whether responses are episodes."""
        return self.path is not None

    @property
    def is_object(self) -> bool:
        """Whether it stands for an environment that a run was given as an object."""
        return (self.path or "").startswith(FROM_PYTHON)

    @property
    def will_be_parsed(self) -> bool:
        """Whether it is known beforehand that turns are read by the engine's parsers; other environments show tools."""
        named = self.tool_parser or self.reasoning_parser or self.tools
        return bool(named) or self.path in WITH_TOOLS

    @property
    def pays(self) -> bool:
        """Whether it gives rewards of its own, so that a run needs no reward function."""
        return self.path is not None and self.path not in UNPAID
