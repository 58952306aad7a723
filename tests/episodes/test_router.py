"""Requests of episodes find an engine, and their answers find the episodes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hrl.episodes.router import RoundOverError, Router
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.single_requests import EngineAnswer, EngineRequest


def answer_to(request: EngineRequest, ids: list[int] | None = None) -> EngineAnswer:
    ids = [1] if ids is None else ids
    return EngineAnswer(request.number, np.array(ids, np.int32), np.zeros(len(ids), np.float32), "stop", 0)


def ask(router: Router, episode: str, tokens: int = 3, most: int = 5) -> asyncio.Task:
    return asyncio.ensure_future(router.generate([7] * tokens, SamplingParams(max_tokens=most), episode, episode))


async def begun(router: Router, place: int) -> list[EngineRequest]:
    work = await router.next_work(place)
    assert work is not None
    return list(work.requests)


def test_a_new_episode_goes_where_the_fewest_tokens_are_outstanding_and_stays_there() -> None:
    async def play() -> None:
        router = Router()
        router.open(2)
        long, short = ask(router, "long", tokens=100), ask(router, "short")
        await asyncio.sleep(0)
        assert router.outstanding_tokens == [105, 8]
        another = ask(router, "another")
        await asyncio.sleep(0)
        assert router.outstanding_tokens == [105, 16]
        (of_long,), of_others = await begun(router, 0), await begun(router, 1)
        router.answered([answer_to(of_long), *map(answer_to, of_others)])
        assert [output.token_ids for output in await asyncio.gather(long, short, another)] == [[1]] * 3
        assert router.outstanding_tokens == [0, 0]
        busy, again = ask(router, "long", tokens=50), ask(router, "long")
        await asyncio.sleep(0)
        assert router.outstanding_tokens == [63, 0], "an episode stays, however busy its engine is"
        router.close()
        assert await asyncio.gather(busy, again, return_exceptions=True)

    asyncio.run(play())


def test_what_a_round_leaves_open_is_told_so_and_nothing_is_asked_between_rounds() -> None:
    async def play() -> None:
        router = Router()
        with pytest.raises(RoundOverError):
            await ask(router, "early")
        router.open(1)
        waiting, taken = ask(router, "waiting"), ask(router, "taken")
        await asyncio.sleep(0)
        await begun(router, 0)
        router.close()
        for one in (waiting, taken):
            with pytest.raises(RoundOverError):
                await one
        with pytest.raises(RoundOverError):
            await ask(router, "late")

    asyncio.run(play())


def test_whoever_is_cancelled_withdraws_the_request_before_and_after_an_engine_took_it() -> None:
    async def play() -> None:
        router = Router()
        router.open(1)
        waiting, taken = ask(router, "waiting"), ask(router, "taken")
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        work = await router.next_work(0)
        assert [request.name for request in work.requests] == ["taken"] and router.outstanding_tokens == [8]
        taken.cancel()
        await asyncio.wait({taken})
        (request,) = work.requests
        assert (await router.next_work(0)).withdrawn == [request.number]
        router.answered([answer_to(request)])  # too late
        assert router.outstanding_tokens == [0]

    asyncio.run(play())


def test_engines_hear_that_a_batch_is_over_and_nobody_waits_for_an_answer_any_more() -> None:
    async def play() -> None:
        router = Router()
        router.open(2)
        polls = [asyncio.ensure_future(router.next_work(place)) for place in range(2)]
        asked = ask(router, "asked")
        await asyncio.sleep(0)
        assert len((await polls[0]).requests) == 1
        router.close()
        assert await polls[1] is None and await router.next_work(0) is None
        with pytest.raises(RoundOverError):
            await asked

    asyncio.run(play())


def test_an_engine_that_asks_in_vain_gets_an_answer_now_and_then(monkeypatch) -> None:
    monkeypatch.setattr("hrl.episodes.router._LONGEST_SILENCE_S", 0.01)

    async def play() -> None:
        router = Router()
        router.open(1)
        work = await router.next_work(0)
        assert work is not None and not work.requests and not work.withdrawn

    asyncio.run(play())
