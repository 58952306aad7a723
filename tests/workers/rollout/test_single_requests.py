"""A rank takes requests while others run, and hands over what is finished."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hrl.pictures import Picture
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import EngineDeadError, EngineUnusableError, RolloutError, SampleOutput
from hrl.workers.rollout.single_requests import EngineRequest, EngineWork, serve_requests

VOCAB = 10


def request(number: int, most: int = 4) -> EngineRequest:
    return EngineRequest(
        number, f"turn 0 of episode {number}", np.array([number], np.int32), SamplingParams(max_tokens=most)
    )


def serve(work: list[EngineWork], generate, *, then: asyncio.Event | None = None) -> tuple[int, list[list[int]]]:
    """Serves work item by item; returns the count and the numbers of each hand-over."""
    given: list[list[int]] = []
    left = iter(work)

    async def take() -> EngineWork | None:
        await asyncio.sleep(0.005)
        return next(left, None)

    async def answer(prompt: list[int], sampling: SamplingParams, request_id: str, pictures: tuple[Picture, ...]):
        assert pictures == ()
        return await generate(prompt, sampling, request_id)

    engine = SimpleNamespace(generate=answer, policy_version=3)

    async def play() -> int:
        return await serve_requests(engine, take, lambda answers: given.append([a.number for a in answers]), VOCAB)

    return asyncio.run(play()), given


async def echo(prompt: list[int], sampling: SamplingParams, request_id: str) -> SampleOutput:
    await asyncio.sleep(0)
    return SampleOutput([prompt[0] % VOCAB], [-0.5], "stop", 3)


def test_what_ends_together_goes_together() -> None:
    count, given = serve(
        [EngineWork([request(1), request(2)]), EngineWork(), EngineWork([request(3)]), EngineWork()], echo
    )
    assert count == 3 and given == [[1, 2], [3]]


def test_experts_go_along_from_the_token_on_that_was_asked_for_and_have_to_be_there() -> None:
    routed = np.arange(2, dtype=np.uint8).reshape(2, 1, 1)
    given: list[np.ndarray | None] = []

    async def answer(*_: object, **__: object) -> SampleOutput:
        return SampleOutput([1, 2], [-0.1, -0.1], "stop", 3, routed)

    def ask(experts_from: int | None) -> None:
        work = iter([EngineWork([replace(request(7), experts_from=experts_from)]), EngineWork(), EngineWork()])

        async def take() -> EngineWork | None:
            await asyncio.sleep(0.005)
            return next(work, None)

        engine = SimpleNamespace(generate=answer, policy_version=3)
        give = lambda answers: given.extend(each.output().routed for each in answers)  # noqa: E731
        asyncio.run(serve_requests(engine, take, give, VOCAB))

    for first in (0, 1, None):
        ask(first)
    assert [None if each is None else each.ravel().tolist() for each in given] == [[0, 1], [1], None]
    routed = routed[:1]  # as of a context of one token and an answer of one
    with pytest.raises(RolloutError, match=r"experts of shape \(1, 1, 1\), and 2 tokens have passed through it"):
        ask(1)


def test_a_withdrawn_request_is_cancelled_and_never_answered() -> None:
    cancelled = []

    async def slow(prompt: list[int], sampling: SamplingParams, request_id: str) -> SampleOutput:
        try:
            await asyncio.sleep(30.0)
        except asyncio.CancelledError:
            cancelled.append(request_id)
            raise
        raise AssertionError("it was withdrawn")

    count, given = serve([EngineWork([request(1)]), EngineWork(withdrawn=[1, 99])], slow)
    assert (count, given, cancelled) == (0, [], ["1 (turn 0 of episode 1)"])


@pytest.mark.parametrize(
    ("output", "wrong"),
    [
        (SampleOutput([1, 2], [-0.1], "stop", 3), "2 tokens with 1 log-probs"),
        (SampleOutput([1] * 5, [-0.1] * 5, "length", 3), "5 tokens, although at most 4 were asked for"),
        (SampleOutput([1], [-0.1], "stop", 2), "policy version 2, although version 3 is served"),
        (SampleOutput([VOCAB], [-0.1], "stop", 3), "a token outside the vocabulary of 10"),
        (SampleOutput([1], [float("nan")], "stop", 3), "a log-prob that is not a finite number below 0"),
        (SampleOutput([1], [0.5], "stop", 3), "a log-prob that is not a finite number below 0"),
    ],
)
def test_an_answer_that_cannot_be_is_refused_with_the_name_of_its_request(output: SampleOutput, wrong: str) -> None:
    async def answer(*_: object) -> SampleOutput:
        return output

    with pytest.raises(RolloutError, match=f"the engine answered turn 0 of episode 7 with {wrong}"):
        serve([EngineWork([request(7)]), EngineWork(), EngineWork()], answer)


@pytest.mark.parametrize("error", [RolloutError("no"), EngineDeadError("dead"), EngineUnusableError("sync")])
def test_a_request_from_outside_that_fails_ends_nothing_but_itself_unless_the_engine_is_gone(error: Exception) -> None:
    async def failing(prompt: list[int], sampling: SamplingParams, request_id: str) -> SampleOutput:
        if prompt[0] == 2:
            raise error
        return await echo(prompt, sampling, request_id)

    work = [EngineWork([request(1), replace(request(2), may_fail=True)]), EngineWork(), EngineWork()]
    if type(error) is not RolloutError:
        with pytest.raises(type(error)):
            serve(work, failing)
    else:
        count, given = serve(work, failing)
        assert count == 2 and sorted(number for numbers in given for number in numbers) == [1, 2]


def test_an_answer_that_cannot_be_ends_a_request_from_outside_alone() -> None:
    async def answer(prompt: list[int], sampling: SamplingParams, request_id: str) -> SampleOutput:
        return SampleOutput([VOCAB], [-0.1], "stop", 3) if prompt[0] == 2 else await echo(prompt, sampling, request_id)

    work = [EngineWork([request(1), replace(request(2), may_fail=True)]), EngineWork(), EngineWork()]
    count, given = serve(work, answer)
    assert count == 2 and sorted(number for numbers in given for number in numbers) == [1, 2]


def test_an_engine_that_dies_ends_it_with_its_own_error_while_others_wait() -> None:
    async def dying(prompt: list[int], sampling: SamplingParams, request_id: str) -> SampleOutput:
        if prompt[0] == 2:
            raise EngineDeadError("the engine died")
        await asyncio.sleep(30.0)
        raise AssertionError

    with pytest.raises(EngineDeadError, match="the engine died"):
        serve([EngineWork([request(1), request(2)]), *[EngineWork()] * 100], dying)
