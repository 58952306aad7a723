"""Programs that play episodes over OpenAI's protocol; environments of the tests."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI, OpenAI

from hrl.environments import StepResult
from hrl.environments.agent import AgentEnvironment, ClientSettings

KEYS: list[str] = []
"""Of all episodes of a process that a thief has had."""


def agent(kind: str) -> AgentEnvironment:
    """Make one."""
    made: AgentEnvironment = globals()[kind]()
    return made


class Plain(AgentEnvironment):
    """Two turns with a client that waits; the reward is the length of the last answer."""

    def run(self, row: Mapping[str, Any], client: ClientSettings) -> float:
        messages: list[Any] = list(row["prompt"])
        with OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as ask:
            for more in ("more", None):
                answer = ask.chat.completions.create(
                    model=client.model, messages=messages, temperature=0.0, max_tokens=50
                )
                messages += [answer.choices[0].message, {"role": "user", "content": more}]
        return float(len(answer.choices[0].message.content))


class PaysTokens(Plain):
    """Gives rewards of tokens, as no program can."""

    def run(self, row: Mapping[str, Any], client: ClientSettings) -> StepResult:
        super().run(row, client)
        return StepResult(reward=[])


class Several(AgentEnvironment):
    """Agents at the same time, each with a history of its own."""

    async def run(self, row: Mapping[str, Any], client: ClientSettings) -> StepResult:
        async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as ask:
            first = await ask.chat.completions.create(model=client.model, messages=row["prompt"])
            history = [*row["prompt"], first.choices[0].message]
            await asyncio.gather(
                *(
                    ask.chat.completions.create(
                        model=client.model, messages=[*history, {"role": "user", "content": f"u{i}"}]
                    )
                    for i in range(2)
                )
            )
        return StepResult(reward=0.5, metrics={"agents": 3.0})


class Critic(AgentEnvironment):
    """Shows an answer that it wrote itself, asks, has a longer conversation of its own, and asks on."""

    def run(self, row: Mapping[str, Any], client: ClientSettings) -> float:
        shown = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "mine"}]
        other: list[Any] = [*shown, *shown, {"role": "user", "content": "second"}]
        messages: list[Any] = [*shown, {"role": "user", "content": "first"}]
        with OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as ask:
            answer = ask.chat.completions.create(model=client.model, messages=messages)
            ask.chat.completions.create(model=client.model, messages=other)
            messages += [answer.choices[0].message, {"role": "user", "content": "third"}]
            ask.chat.completions.create(model=client.model, messages=messages)
        return 1.0


class Endless(AgentEnvironment):
    """Asks until it is refused."""

    def run(self, row: Mapping[str, Any], client: ClientSettings) -> float:
        messages: list[Any] = list(row["prompt"])
        with OpenAI(base_url=client.base_url, api_key=client.api_key) as ask:
            while True:
                answer = ask.chat.completions.create(model=client.model, messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]


class Wordy(AgentEnvironment):
    """Asks, and then with a long chat, which goes on from the first one if the row's answer is `on`."""

    def run(self, row: Mapping[str, Any], client: ClientSettings) -> float:
        messages: list[Any] = list(row["prompt"])
        begun = [*messages, {"role": "assistant", "content": "mine"}] if row["answer"] == "on" else []
        with OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as ask:
            for asked in (messages, [*begun, {"role": "user", "content": "x" * 200}]):
                ask.chat.completions.create(model=client.model, messages=asked)
        return 1.0


class Hanging(AgentEnvironment):
    """Asks once, and never returns."""

    async def run(self, row: Mapping[str, Any], client: ClientSettings) -> float:
        async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as ask:
            await ask.chat.completions.create(model=client.model, messages=row["prompt"])
        await asyncio.Event().wait()
        return 0.0


class HangingOnThread(AgentEnvironment):
    """The same, as a plain method."""

    def run(self, row: Mapping[str, Any], client: ClientSettings) -> float:
        with OpenAI(base_url=client.base_url, api_key=client.api_key) as ask:
            ask.chat.completions.create(model=client.model, messages=row["prompt"])
        time.sleep(1000)
        return 0.0


class Slow(AgentEnvironment):
    """Takes longer than one call of an environment may."""

    def run(self, row: Mapping[str, Any], client: ClientSettings) -> float:
        time.sleep(1.5)
        with OpenAI(base_url=client.base_url, api_key=client.api_key) as ask:
            ask.chat.completions.create(model=client.model, messages=row["prompt"])
        return 1.0


class Silent(AgentEnvironment):
    """Asks nothing."""

    def run(self, row: Mapping[str, Any], client: ClientSettings) -> float:
        return 1.0


class Failing(AgentEnvironment):
    """Raises on its own account."""

    def run(self, row: Mapping[str, Any], client: ClientSettings) -> float:
        raise ValueError("no luck")


class Thief(AgentEnvironment):
    """Keeps its key beyond its episode, for the next one to use."""

    def run(self, row: Mapping[str, Any], client: ClientSettings) -> StepResult:
        KEYS.append(client.api_key)
        with OpenAI(base_url=client.base_url, api_key=client.api_key) as ask:
            ask.chat.completions.create(model=client.model, messages=row["prompt"])
        refused = 0
        for key in KEYS[:-1]:
            with OpenAI(base_url=client.base_url, api_key=key) as ask:
                try:
                    ask.models.list()
                except Exception as error:  # noqa: BLE001
                    refused += "401" in str(error)
        return StepResult(reward=0.0, metrics={"refused": refused, "pid": float(os.getpid())})
