"""A run is asked from outside: answers come from its rounds of generation, and nothing of them is kept."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, AuthenticationError, InternalServerError

from hrl.config.environment import EnvironmentConfig
from hrl.episodes.play import Limits, PlaySetup
from hrl.episodes.router import Router
from hrl.serve.agents import MODEL, AgentDoor, Outside
from hrl.serve.outside import OutsideCalls, write_address
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import RolloutError, SampleOutput
from hrl.workers.rollout.single_requests import serve_requests
from tests.serve.doors import Engine, echo, tokenizer_with_merges

KEY = "hrl-of-this-run"
CHAT: list[Any] = [{"role": "user", "content": "abc"}]


@dataclass
class Run:
    router: Router
    door: AgentDoor
    engine: Engine
    client: AsyncOpenAI

    async def ask(self, **more: Any) -> Any:
        return await self.client.chat.completions.create(model=MODEL, messages=CHAT, **more)

    async def round(self, over: asyncio.Event) -> None:
        """A rank serves until the round is over."""
        self.router.open(1)
        serving = serve_requests(
            self, lambda: self.router.next_work(0), self.router.answered, len(self.engine.tokenizer)
        )
        serving = asyncio.ensure_future(serving)
        await over.wait()
        self.router.close()
        await serving

    @property
    def policy_version(self) -> int:
        return self.engine.version

    async def generate(self, ids: list[int], sampling: SamplingParams, name: str) -> SampleOutput:
        return await self.engine.generate(ids, sampling, name)


@asynccontextmanager
async def run(monkeypatch: pytest.MonkeyPatch, longest_wait_s: float = 30.0, **engine: Any) -> AsyncIterator[Run]:
    tokenizer = tokenizer_with_merges()
    monkeypatch.setattr("hrl.serve.agents.OutsideCalls", lambda router: OutsideCalls(router, longest_wait_s))
    setup = PlaySetup(tokenizer, (tokenizer.eos_token_id,), {}, EnvironmentConfig(), Limits(200, 300))
    router = Router()
    door = AgentDoor(setup, router, Outside(KEY, SamplingParams()))
    url = await door.listen()
    try:
        async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            yield Run(router, door, Engine(tokenizer, echo, **engine), client)
    finally:
        await door.close()


def test_a_call_between_rounds_is_answered_in_the_next_one_with_the_newest_policy(monkeypatch: pytest.MonkeyPatch):
    async def play() -> None:
        async with run(monkeypatch) as one:
            for version in (3, 4):
                one.engine.version = version
                asking = asyncio.ensure_future(one.ask(extra_body={"return_token_ids": True}))
                while not any(not session.is_idle for session in one.door._door.sessions):
                    await asyncio.sleep(0.005)
                assert not one.engine.record[version - 3 :], "no engine is asked between rounds"
                over = asyncio.Event()
                serving = asyncio.ensure_future(one.round(over))
                choice = (await asking).choices[0]
                over.set()
                await serving
                assert (choice.message.content, choice.policy_version) == ("ABC", version)
            (session,) = one.door._door.sessions
            assert session.counts["calls"] == 2 and not session.calls, "nothing is kept that could be trained on"

    asyncio.run(play())


def test_a_call_that_a_round_leaves_unfinished_is_sampled_anew_and_holds_no_round_up(monkeypatch: pytest.MonkeyPatch):
    async def play() -> None:
        async with run(monkeypatch, delay_s=60.0) as one:
            over = asyncio.Event()
            serving = asyncio.ensure_future(one.round(over))
            asking = asyncio.ensure_future(one.ask())
            while not sum(one.router.outstanding_tokens):
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            over.set()
            async with asyncio.timeout(10):
                await serving
            assert one.engine.cancelled == 1 and not asking.done()
            one.engine.delay_s, over = 0.0, asyncio.Event()
            serving = asyncio.ensure_future(one.round(over))
            assert (await asking).choices[0].message.content == "ABC"
            over.set()
            await serving

    asyncio.run(play())


def test_a_call_that_no_round_has_time_for_is_to_be_made_again(monkeypatch: pytest.MonkeyPatch):
    async def play() -> None:
        async with run(monkeypatch, longest_wait_s=0.05) as one:
            with pytest.raises(InternalServerError, match="answers while it samples") as found:
                await one.ask()
            assert found.value.status_code == 503 and "Retry-After" in found.value.response.headers

    asyncio.run(play())


def test_a_call_that_the_engine_can_not_answer_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch):
    async def play() -> None:
        async with run(monkeypatch, error=RolloutError("too much")) as one:
            over = asyncio.Event()
            serving = asyncio.ensure_future(one.round(over))
            with pytest.raises(InternalServerError, match="gave this request up"):
                await one.ask()
            one.engine.error = None
            assert (await one.ask()).choices[0].message.content == "ABC"
            over.set()
            await serving

    asyncio.run(play())


def test_a_run_lets_in_nobody_else(monkeypatch: pytest.MonkeyPatch):
    async def play() -> None:
        async with run(monkeypatch) as one:
            for key in ("hrl-", KEY[:-1], f"{KEY}x"):
                async with AsyncOpenAI(base_url=one.client.base_url, api_key=key, max_retries=0) as other:
                    with pytest.raises(AuthenticationError):
                        await other.models.list()

    asyncio.run(play())


def test_address_and_key_are_for_the_users_eyes_alone(tmp_path: Path):
    file = write_address(tmp_path, "http://127.0.0.1:9/v1", KEY)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().splitlines() == [
        "export OPENAI_BASE_URL=http://127.0.0.1:9/v1",
        f"export OPENAI_API_KEY={KEY}",
    ]
