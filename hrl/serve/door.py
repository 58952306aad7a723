"""The door: a request comes in, is sampled from an engine, and its answer is given and kept. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hrl.serve.answers import Choice
from hrl.serve.asked import ChatAsked, CompletionAsked
from hrl.serve.policy import Context, GrowingChoice, PolicyWords, Read, too_long
from hrl.serve.refusals import RequestRefusedError, bad_request, engine_failed, not_now, over_limit
from hrl.serve.rows import Branches, Call
from hrl.serve.sessions import Admission, FixedSampling, Generate, Session, Sessions
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import EngineUnusableError, RolloutError, SampleOutput

logger = logging.getLogger(__name__)

_SEEDS = 2**32
_COMPLETION_TOKENS = 16
"""Length of a text's continuation where none is asked for, as OpenAI has it."""


@dataclass(frozen=True)
class Served:
    """What the door leads to.

    Attributes:
        model: The name that clients have to call it.
        sampling: Where a client names no temperature, top-p or top-k.
        max_model_len: The longest context with its response, in tokens.
        longest_answer: Of a chat whose client names no limit, in tokens; None for what is left of the context.
    """

    model: str
    sampling: SamplingParams
    max_model_len: int
    longest_answer: int | None = None


Show = Callable[[int, Choice, int, int], None]
"""Is shown a choice of a request, by its number, as far as it has come, and which of its tokens are new: from, to."""
ShowOne = Callable[[Choice, int, int], None]
Count = Callable[[int], None]
"""Is told how many tokens were sampled."""


class _Shown:
    """Shows an answer as it grows: tokens become text on the thread for words, those together that came meanwhile.

    Attributes:
        growing: The answer.
        told: Tokens that were sampled.
        count: Tokens that were shown.
    """

    def __init__(self, growing: GrowingChoice, show: ShowOne, words: PolicyWords, sampled: Count) -> None:
        self.growing, self._show, self._words, self._sampled = growing, show, words, sampled
        self.told = self.count = 0
        self._new: tuple[list[int], list[float]] = ([], [])
        self._has_new = asyncio.Event()
        self._is_over = False

    def add(self, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Take what was sampled, which counts from now on: the client may go away with it."""
        self._sampled(len(ids))
        self.told += len(ids)
        self._new[0].extend(ids)
        self._new[1].extend(log_probs)
        self._has_new.set()

    def end(self) -> None:
        """There is no more to come."""
        self._is_over = True
        self._has_new.set()

    async def go_on(self) -> None:
        """Show what comes until the end."""
        while not self._is_over or self._has_new.is_set():
            await self._has_new.wait()
            self._has_new.clear()
            new, self._new = self._new, ([], [])
            count = await self._words.run(self.growing.add, *new)
            if count > self.count:
                self._show(self.growing.choice, self.count, count)
                self.count = count


class Door:
    """Answers requests.

    Args:
        served: What it leads to.
        words: The policy's tokenizer and parsers.
        generate: Samples.
        sessions: Whose calls belong together.
    """

    def __init__(self, served: Served, words: PolicyWords, generate: Generate, sessions: Sessions) -> None:
        self.served, self.words, self.sessions = served, words, sessions
        self._generate = generate
        self._closed_for: str | None = None

    def pause(self, reason: str) -> None:
        """Refuse new calls until `resume`, with a sentence that says why; clients ask again by themselves."""
        self._closed_for = reason

    def resume(self) -> None:
        """Take calls again."""
        self._closed_for = None

    async def begin(self, session: Session, asked: ChatAsked | CompletionAsked) -> list[Context]:
        """Return the context of each prompt of a request, which is refused if it does not make sense.

        Raises:
            RequestRefusedError: Says what is wrong, and the way out.
        """
        if asked.model != self.served.model:
            raise RequestRefusedError(
                404,
                f"there is no model {asked.model[:200]!r} here; the one that is served is {self.served.model!r}",
                code="model_not_found",
                param="model",
            )
        if self._closed_for is not None:
            raise not_now(self._closed_for)
        if isinstance(asked, ChatAsked):
            return [await self.words.chat(session, asked)]
        return [await self.words.completion(session, prompt) for prompt in asked.prompts]

    async def answer(
        self,
        session: Session,
        asked: ChatAsked | CompletionAsked,
        contexts: Sequence[Context],
        *,
        log_probs: bool,
        show: Show | None = None,
    ) -> list[Choice]:
        """Sample the choices of each context, one context after the other, and keep them.

        Args:
            session: Whose they are.
            asked: The request.
            contexts: From `begin`.
            log_probs: Whether the client is shown them.
            show: Is shown choices as they grow, where that can be.

        Raises:
            RequestRefusedError: The session has not that much left, or the engine failed.
        """
        wanted = [context for context in contexts for _ in range(asked.n)]
        with session.counting_refusals(), session.admitted(len(wanted)) as admission:
            samplings = [
                self._sampling(session, asked, context, turn, place, admission.longest)
                for place, (context, turn) in enumerate(zip(wanted, admission.turns, strict=True))
            ]
            if admission.longest is not None:
                admission.kept = sum(sampling.max_tokens for sampling in samplings)
            showing = [None if show is None else partial(show, place) for place in range(len(wanted))]
            reads = await self._all(session, asked, admission, wanted, samplings, showing, log_probs=log_probs)
        for context, turn, (read, output) in zip(wanted, admission.turns, reads, strict=True):
            choice, version = read.choice, output.policy_version
            text, routed = read.parsed.text, output.routed
            call = Call(turn, context.ids, choice.token_ids, choice.log_probs, version, text, routed)
            session.add(call, context.conversation)
            unread, calls = int(read.parsed.error is not None), read.parsed.tool_calls
            session.count("tool_calls", len(calls) + unread)
            session.count("tool_errors", sum(call.arguments is None for call in calls) + unread)
            session.count("unread_calls", unread)
            await self.words.remember(session, asked, context, read)
            if isinstance(asked, ChatAsked) and session.keeps_calls:
                context.conversation.said([*asked.messages, read.parsed.message], turn)
        return [read.choice for read, _ in reads]

    async def _all(
        self,
        session: Session,
        asked: ChatAsked | CompletionAsked,
        admission: Admission,
        contexts: Sequence[Context],
        samplings: Sequence[SamplingParams],
        showing: Sequence[ShowOne | None],
        *,
        log_probs: bool,
    ) -> list[tuple[Read, SampleOutput]]:
        """Sample and read all choices at the same time."""
        sampled = partial(session.sampled, admission)
        began = time.monotonic()
        try:
            async with asyncio.timeout(session.seconds_left()), asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._one(session, asked, sampled, *one, log_probs=log_probs))
                    for one in zip(contexts, admission.turns, samplings, showing, strict=True)
                ]
        except TimeoutError:
            session.ran_into("deadline")
            raise over_limit(f"session {session.name}: its {session.limits.seconds} seconds are over") from None
        except ExceptionGroup as failures:  # the others were cancelled because of the first
            raise failures.exceptions[0] from None
        finally:
            session.engine_s += time.monotonic() - began
        return [task.result() for task in tasks]

    async def _one(
        self,
        session: Session,
        asked: ChatAsked | CompletionAsked,
        sampled: Count,
        context: Context,
        turn: int,
        sampling: SamplingParams,
        show: ShowOne | None,
        *,
        log_probs: bool,
    ) -> tuple[Read, SampleOutput]:
        growing = None if show is None else self.words.growing(asked, context, log_probs=log_probs)
        shown = _Shown(growing, show, self.words, sampled) if growing is not None and show is not None else None
        name = f"{session.name}-{turn}-{secrets.token_hex(4)}"
        try:
            output = await self._sampled(session.generate or self._generate, context, sampling, name, shown)
        except EngineUnusableError as error:
            raise not_now(str(error)) from error
        except RolloutError as error:
            logger.error("request %s failed: %s", name, error)
            raise engine_failed(f"the engine failed at this request: {error}") from error
        sampled(len(output.token_ids) - (0 if shown is None else shown.told))
        if output.finish_reason == "abort" or len(output.token_ids) != len(output.log_probs):
            logger.error(
                "request %s: the engine ended it with %s, %d tokens and %d log-probs",
                *(name, output.finish_reason, len(output.token_ids), len(output.log_probs)),
            )
            raise engine_failed("the engine gave this request up")
        read = await self.words.read(output, turn, asked, context, log_probs=log_probs)
        if shown is not None:
            read = replace(read, choice=shown.growing.ended(read.choice, shown.count))
        return read, output

    async def _sampled(
        self, generate: Generate, context: Context, sampling: SamplingParams, name: str, shown: _Shown | None
    ) -> SampleOutput:
        if shown is None:
            return await generate(context.ids, sampling, name, None)
        showing = asyncio.ensure_future(shown.go_on())
        try:
            output = await generate(context.ids, sampling, name, shown.add)
            shown.end()
            await showing
        finally:
            showing.cancel()
        return output

    def _sampling(
        self,
        session: Session,
        asked: ChatAsked | CompletionAsked,
        context: Context,
        turn: int,
        place: int,
        most: int | None,
    ) -> SamplingParams:
        """Return how a choice is sampled, which may have so many tokens of what its session has left.

        Raises:
            RequestRefusedError: There is no room for it behind its context.
        """
        param = "messages" if isinstance(asked, ChatAsked) else "prompt"
        if not context.ids:
            raise bad_request(f"{param} has no tokens", param)
        room = self.served.max_model_len - len(context.ids)
        if session.fixed is not None:
            return self._fixed_sampling(session, session.fixed, asked, context, turn, min(room, most or room), param)
        unnamed = self.served.longest_answer or room if isinstance(asked, ChatAsked) else _COMPLETION_TOKENS
        longest = asked.longest or unnamed
        if room < 1 or (asked.longest or 0) > room:
            wanted = f"{param} has {len(context.ids)} tokens, {asked.longest or 1} more are asked for"
            raise too_long(wanted, self.served.max_model_len, param)
        served = self.served.sampling
        top_k = served.top_k if asked.top_k is None else asked.top_k
        return SamplingParams(
            temperature=served.temperature if asked.temperature is None else asked.temperature,
            top_p=served.top_p if asked.top_p is None else asked.top_p,
            top_k=top_k or -1,
            max_tokens=min(longest, room, most or room),
            seed=_seed(asked.seed, place),
        )

    def _fixed_sampling(
        self,
        session: Session,
        fixed: FixedSampling,
        asked: ChatAsked | CompletionAsked,
        context: Context,
        turn: int,
        room: int,
        param: str,
    ) -> SamplingParams:
        """Return how a turn of an episode is sampled, whatever the client asks for."""
        in_prompt = session.branches.prompt_length(context.ids)
        in_response = len(context.ids) - in_prompt
        if in_prompt > fixed.max_prompt_tokens:
            # What has become too long to fork from a row is taken for a prompt, and is none.
            is_forked = Branches().grow(session.calls).prompt_length(context.ids) <= fixed.max_prompt_tokens
            session.ran_into("max_tokens" if is_forked else "max_prompt")
            raise too_long(f"{param} has {len(context.ids)} tokens", fixed.max_prompt_tokens, param)
        room = min(room, fixed.max_response_tokens - in_response, fixed.max_turn_tokens or room)
        if room < 1:
            session.ran_into("max_tokens")
            raise too_long(f"{param} has {len(context.ids)} tokens", len(context.ids), param)
        given, wanted = fixed.sampling, (asked.temperature, asked.top_p, asked.top_k or None, asked.seed)
        have = (given.temperature, given.top_p, given.top_k, None)
        if any(one is not None and one != other for one, other in zip(wanted, have, strict=True)):
            session.count("overridden")
        return replace(given, seed=fixed.seed_of(turn), max_tokens=min(room, asked.longest or room))


def _seed(given: int | None, place: int) -> int:
    """Return the 32-bit seed of a choice; the first of a request with a seed below 2^32 has that one."""
    if given is None:
        return secrets.randbelow(_SEEDS)
    if place == 0:
        return given % _SEEDS
    return int.from_bytes(hashlib.blake2b(f"{given}/{place}".encode(), digest_size=4).digest(), "little")
