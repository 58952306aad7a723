"""Requests that come one by one while others run: what a rank takes from a router, and what it gives back.

The rank pulls. It asks for work, runs it on its engine's loop, and hands over what is finished, until there is no more
to come. So it needs no methods that run beside each other, and whoever waits for the rank waits as for any other call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hrl.pictures import Picture
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import (
    EngineDeadError,
    EngineUnusableError,
    FinishReason,
    RolloutError,
    SampleOutput,
    check_routed,
)

if TYPE_CHECKING:
    from hrl.workers.rollout.base import RolloutEngine

logger = logging.getLogger(__name__)

LOG_PROB_TOLERANCE = 1e-3
"""How far above 0 rounding may lift a log-prob."""


@dataclass(frozen=True)
class EngineRequest:
    """A response that an engine is asked for.

    Attributes:
        number: Of this request alone.
        name: What errors call it.
        token_ids: `(N,)` int32, the context.
        sampling: How it is sampled, with its own seed.
        may_fail: If the engine can't answer it, it is given up with an empty answer, and all others go on.
        experts_from: The answer has the experts of the tokens from this one of the context on; None asks for none.
        pictures: That the context shows.
    """

    number: int
    name: str
    token_ids: np.ndarray
    sampling: SamplingParams
    may_fail: bool = False
    experts_from: int | None = None
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class EngineAnswer:
    """What an engine answered.

    Attributes:
        number: Of the request.
        token_ids: `(N,)` int32.
        log_probs: `(N,)` float32.
        finish_reason, policy_version: As in `SampleOutput`.
        routed: `(tokens, L, K)`, the experts that were asked for; None where none were.
    """

    number: int
    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: FinishReason
    policy_version: int
    routed: np.ndarray | None = None

    def output(self) -> SampleOutput:
        """Return it as engines give it, with the experts that were asked for."""
        return SampleOutput(
            self.token_ids.tolist(), self.log_probs.tolist(), self.finish_reason, self.policy_version, self.routed
        )


@dataclass(frozen=True)
class EngineWork:
    """What a rank is given when it asks.

    Attributes:
        requests: To begin.
        withdrawn: Numbers of requests that nobody waits for any longer.
    """

    requests: Sequence[EngineRequest] = ()
    withdrawn: Sequence[int] = ()


class Inbox(Protocol):
    """Where a rank's requests come from, as it is handed to the rank."""

    async def take(self, engine: int) -> EngineWork | None:
        """Wait for work of an engine; None when there is no more to come."""

    def give(self, answers: list[EngineAnswer]) -> None:
        """Hand over what is finished, without waiting."""


async def serve_requests(
    engine: RolloutEngine,
    take: Callable[[], Awaitable[EngineWork | None]],
    give: Callable[[list[EngineAnswer]], None],
    vocab_size: int,
) -> int:
    """Run requests until `take` returns None; return how many were answered.

    Args:
        engine: Runs on this loop.
        take: Waits for work, and returns it.
        give: Hands over what is finished, without waiting.
        vocab_size: All ids are below it.

    Raises:
        RolloutError: The engine failed, or answered with what can't be; names the request.
    """
    running: dict[int, asyncio.Task[None]] = {}
    finished: list[EngineAnswer] = []
    num_answered = 0
    loop = asyncio.get_running_loop()

    def flush() -> None:
        nonlocal finished
        answers, finished = finished, []
        if answers:
            give(answers)

    async def one(request: EngineRequest) -> None:
        nonlocal num_answered
        title = f"{request.number} ({request.name})"  # an engine's errors name it, and no two have the same
        try:
            context = request.token_ids.tolist()
            output = await engine.generate(context, request.sampling, title, pictures=request.pictures)
            answer = _checked(request, output, engine.policy_version, vocab_size)
        except RolloutError as error:
            if not request.may_fail or isinstance(error, EngineDeadError | EngineUnusableError):
                raise
            logger.warning("%s was given up: %s", request.name, error)
            given_up = SampleOutput([], [], "abort", engine.policy_version)
            answer = _checked(request, given_up, engine.policy_version, vocab_size)
        finally:
            running.pop(request.number, None)
        num_answered += 1
        finished.append(answer)
        if len(finished) == 1:  # what ends in the same iteration of the engine goes together
            loop.call_soon(flush)

    try:
        async with asyncio.TaskGroup() as group:
            while (work := await take()) is not None:
                for number in work.withdrawn:
                    if (task := running.pop(number, None)) is not None:
                        task.cancel()
                for request in work.requests:
                    running[request.number] = group.create_task(one(request))
            for task in list(running.values()):
                task.cancel()
    except ExceptionGroup as failures:  # the first is the cause; the others were cancelled or failed because of it
        raise failures.exceptions[0] from None
    flush()
    return num_answered


def _checked(request: EngineRequest, output: SampleOutput, version: int, vocab_size: int) -> EngineAnswer:
    ids, log_probs = np.array(output.token_ids, np.int64), np.array(output.log_probs, np.float32)
    wrong = None
    if len(ids) != len(log_probs):
        wrong = f"{len(ids)} tokens with {len(log_probs)} log-probs"
    elif len(ids) > request.sampling.max_tokens:
        wrong = f"{len(ids)} tokens, although at most {request.sampling.max_tokens} were asked for"
    elif output.policy_version != version:
        wrong = f"policy version {output.policy_version}, although version {version} is served"
    elif len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        wrong = f"a token outside the vocabulary of {vocab_size}"
    elif len(ids) and not (np.isfinite(log_probs).all() and log_probs.max() <= LOG_PROB_TOLERANCE):
        wrong = "a log-prob that is not a finite number below 0"
    if wrong is not None:
        raise RolloutError(f"the engine answered {request.name} with {wrong}")
    routed = None
    if request.experts_from is not None and output.finish_reason != "abort":
        check_routed(output, request.name, len(request.token_ids))
        assert output.routed is not None, "since the line above"
        routed = output.routed[request.experts_from :]
    return EngineAnswer(
        request.number, ids.astype(np.int32), log_probs, output.finish_reason, output.policy_version, routed
    )
