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
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, InternalServerError

from hrl.config.environment import EnvironmentConfig
from hrl.episodes.play import Limits, PlaySetup
from hrl.episodes.router import Router
from hrl.serve.agents import MODEL, AgentDoor, Outside
from hrl.serve.outside import OutsideCalls, write_address
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import RolloutError, SampleOutput
from hrl.workers.rollout.single_requests import serve_requests
from tests.serve.doors import Engine, echo, tokenizer_with_merges, until

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

    async def generate(self, ids: list[int], sampling: SamplingParams, name: str, **_: object) -> SampleOutput:
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
                await until(lambda: any(not session.is_idle for session in one.door._door.sessions))
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
            await until(lambda: one.engine.begun == 1)
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


def test_a_call_that_is_too_long_for_the_rounds_is_given_up_after_a_few_and_makes_way_for_others(
    monkeypatch: pytest.MonkeyPatch,
):
    async def play() -> None:
        monkeypatch.setattr("hrl.serve.outside._AT_ONCE", 1)
        async with run(monkeypatch, delay_s=60.0) as one:
            calls, sampled = [asyncio.ensure_future(one.ask(max_tokens=7))], []
            for _ in range(5):
                over = asyncio.Event()
                serving = asyncio.ensure_future(one.round(over))
                await until(lambda: one.router.is_open.is_set() and sum(one.router.outstanding_tokens) > 0)
                sampled.append(sum(one.router.outstanding_tokens))
                if len(calls) < 2:
                    calls.append(asyncio.ensure_future(one.ask(max_tokens=5)))
                    await until(lambda: sum(len(session._admitted) for session in one.door._door.sessions) == 2)
                over.set()
                await serving
            long, other = calls
            assert [tokens - min(sampled) for tokens in sampled] == [2, 0, 2, 0, 2], "by turns"
            with pytest.raises(InternalServerError, match="3 rounds ended before this answer did") as found:
                await long
            assert found.value.status_code == 503 and "Retry-After" in found.value.response.headers
            assert not other.done()
            other.cancel()

    asyncio.run(play())


def test_a_call_that_names_no_length_is_as_long_as_a_response_of_the_run(monkeypatch: pytest.MonkeyPatch):
    async def play() -> None:
        async with run(monkeypatch) as one:
            over = asyncio.Event()
            serving = asyncio.ensure_future(one.round(over))
            await one.ask()
            await one.ask(max_tokens=400)
            assert [sampling.max_tokens for _, _, sampling in one.engine.record] == [300, 400]
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


def test_a_stream_of_a_run_says_what_the_whole_answer_says_and_calls_are_counted_since_the_last_batch(
    monkeypatch: pytest.MonkeyPatch,
):
    async def play() -> None:
        async with run(monkeypatch) as one:
            over = asyncio.Event()
            serving = asyncio.ensure_future(one.round(over))
            whole = (await one.ask(seed=1, logprobs=True)).choices[0]
            assert one.door.new_counts() == {"calls": 1, "sampled_tokens": 4}
            with pytest.raises(BadRequestError):
                await one.ask(n=65)
            stream = one.client.chat.completions.stream(model=MODEL, messages=CHAT, seed=1, logprobs=True)
            async with stream as events:
                streamed = (await events.get_final_completion()).choices[0]
            assert (streamed.message.content, streamed.finish_reason) == (whole.message.content, "stop")
            assert streamed.logprobs.content == whole.logprobs.content
            assert one.door.new_counts() == {"calls": 1, "sampled_tokens": 4, "refused": 1}
            assert one.door.new_counts() == {}
            over.set()
            await serving
        assert one.door.new_counts() is None

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
