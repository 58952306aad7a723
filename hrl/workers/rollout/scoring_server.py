"""A model behind vLLM's own server that says how likely the tokens of a text are: a teacher that somebody else serves.

`/v1/completions` returns log-probs of the prompt's own tokens (`prompt_logprobs`), of the model's plain distribution
whatever temperature is asked for, and of its likeliest tokens beside them. No development mode and no extension are
needed, and nothing is changed on the server.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hrl.workers.rollout.server_http import (
    OF_TEACHER,
    Address,
    Reply,
    ServerGoneError,
    ServerRefusesError,
    key_of,
)

if TYPE_CHECKING:
    from hrl.config.distillation import TeacherModelConfig

_LOOK_TIMEOUT_S = 30.0
_FIRST_SCORES_S = 180.0
"""For the first text that a server scores, before which vLLM compiles on a CPU: half a minute, 90 s on a busy one."""
_BYTES_OF_REPLY, _BYTES_OF_ENTRY = 1 << 20, 512
"""Bounds of an answer: a token's entry has its id, its log-prob, its rank and its text, perhaps as escapes."""


class Scores(NamedTuple):
    """What a model says of consecutive tokens of a text.

    Attributes:
        log_probs: Of the tokens `(n,)` float32.
        top_log_probs: Of its likeliest tokens in their places `(n, K)` float32, in descending order.
        top_ids: Which they are `(n, K)` int32.
    """

    log_probs: np.ndarray
    top_log_probs: np.ndarray
    top_ids: np.ndarray


class ScoringServer:
    """One server.

    Args:
        url: Its address.
        api_key: Sent as a bearer token; None sends none.
        model: As `/v1/models` has it; None takes the first one there.
        vocabulary: Of the policy; the number of tokens that it has.
        timeout_s: Of a request.
        most_at_once: Requests that the server works on.

    Attributes:
        address: How it is asked.
        why_down: Why it is not asked any more; None while it is.
    """

    def __init__(
        self, url: str, api_key: str | None, model: str | None, vocabulary: int, timeout_s: float, most_at_once: int
    ) -> None:
        self.address = Address(url, api_key, most_at_once, section=OF_TEACHER)
        self.why_down: str | None = None
        self._named, self._model = model, ""
        self._vocabulary, self._timeout_s = vocabulary, timeout_s

    async def look(self, longest: int) -> str:
        """Find the model, and return what to tell of it.

        Args:
            longest: Tokens of the longest text that it will be asked about.

        Raises:
            ServerError: No model of that name, or one that reads less.
        """
        reply = await self.address.get("/v1/models", timeout_s=_LOOK_TIMEOUT_S)
        listed = reply.json().get("data")
        models = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        if not models:
            raise ServerRefusesError(f"{reply.url} names no model: is it vLLM's server?")
        wanted = [each for each in models if self._named in (None, each.get("id"), each.get("root"))]
        if not wanted:
            served = ", ".join(str(each.get("id")) for each in models)
            raise ServerRefusesError(
                f"{self.address.url} serves {served}, and not {self._named}: set "
                "distillation.teacher_models.teacher_model.model_path to the name that it has there, or to null"
            )
        self._model = str(wanted[0].get("id"))
        reach = wanted[0].get("max_model_len")
        if isinstance(reach, int) and reach <= longest:  # one more token is sampled, and thrown away
            raise ServerRefusesError(
                f"{self.address.url}: {self._model} reads {reach} tokens, and the run's longest row has {longest}: "
                f"start it with --max-model-len {longest + 1} or more"
            )
        return f"{self._model}, {reach} tokens" if isinstance(reach, int) else self._model

    async def tokens_of(self, text: str) -> list[int]:
        """Have the server tokenise a text, without what a tokenizer puts around one.

        Raises:
            ServerError: It can't.
        """
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        reply = await self.address.post("/tokenize", body, timeout_s=_LOOK_TIMEOUT_S)
        tokens = reply.json().get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ServerRefusesError(f"{reply.url} answered without tokens: is it vLLM's server?")
        return tokens

    async def score(self, tokens: Sequence[int], first: int, num_top: int, *, is_look: bool = False) -> Scores:
        """Return what the model says of `tokens[first:]`, each after those before it.

        Args:
            tokens: The text.
            first: At least 1.
            num_top: How many of the likeliest tokens are wanted beside them.
            is_look: Asked before the run, with a deadline of its own.

        Raises:
            ServerRefusesError: The server allows fewer, or answers with something else.
            ServerGoneError: It does not answer.
        """
        body = {
            "model": self._model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": num_top,
        }
        reply = await self.address.post_in_turn(
            "/v1/completions",
            body,
            timeout_s=_FIRST_SCORES_S if is_look else self._timeout_s,
            is_look=is_look,
            require_up=self._require_up,
            most_bytes=_BYTES_OF_REPLY + _BYTES_OF_ENTRY * len(tokens) * (num_top + 1),
        )
        return read_scores(reply, tokens, first, num_top, self._vocabulary)

    def _require_up(self) -> None:
        """Send nothing to a server that has not answered another text: each would wait for the whole deadline."""
        if self.why_down is not None:
            raise ServerGoneError(self.why_down)


def read_scores(reply: Reply, tokens: Sequence[int], first: int, num_top: int, vocabulary: int) -> Scores:
    """Return the scores in a reply of `/v1/completions`; see `ScoringServer.score`.

    Raises:
        ServerRefusesError: It has not these, or names a token that the policy has not.
    """
    choices = reply.json().get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    places = choice.get("prompt_logprobs") if isinstance(choice, dict) else None
    if not isinstance(places, list) or len(places) != len(tokens):
        raise ServerRefusesError(
            f"{reply.url} answered without log-probs of the prompt's {len(tokens)} tokens (prompt_logprobs): is it "
            "vLLM's server?"
        )
    count = len(tokens) - first
    found = Scores(
        np.empty(count, np.float32), np.empty((count, num_top), np.float32), np.empty((count, num_top), np.int32)
    )
    for index in range(count):
        of_place = _entries(reply, places[first + index])
        token = tokens[first + index]
        if token not in of_place:
            raise ServerRefusesError(f"{reply.url} answered without a log-prob of token {token}: of another prompt?")
        found.log_probs[index] = of_place[token]
        top = sorted(of_place.items(), key=lambda entry: -entry[1])[:num_top]
        if len(top) < num_top:
            raise ServerRefusesError(f"{reply.url} answered with {len(top)} of the {num_top} likeliest tokens")
        unknown = next((known for known, _ in top if not 0 <= known < vocabulary), None)
        if unknown is not None:
            raise ServerRefusesError(
                f"{reply.url} names token {unknown} among the likeliest, and the policy has {vocabulary}: the served "
                "model has another vocabulary, or rows that stand for no token and were not trained down"
            )
        for place, (known, log_prob) in enumerate(top):
            found.top_ids[index, place], found.top_log_probs[index, place] = known, log_prob
    return found


def _entries(reply: Reply, place: Any) -> dict[int, float]:
    """Return token → log-prob of one place of a reply."""
    try:
        entries = {int(token): float(entry["logprob"]) for token, entry in place.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ServerRefusesError(f"{reply.url} answered with log-probs of another form ({error})") from error
    if not all(math.isfinite(log_prob) for log_prob in entries.values()):
        raise ServerRefusesError(f"{reply.url} answered with a log-prob that is not finite: are its weights sound?")
    return entries


@asynccontextmanager
async def opened(
    settings: TeacherModelConfig, urls: Sequence[str], *, vocabulary: int, timeout_s: float, most_at_once: int
) -> AsyncIterator[list[ScoringServer]]:
    """Yield a teacher's servers; their connections end with the block.

    Args:
        settings: Their key, and the model's name there.
        urls: Their addresses.
        vocabulary: Number of tokens that the policy has.
        timeout_s: Of a request.
        most_at_once: Requests that each server works on.

    Raises:
        ServerRefusesError: The key's variable is not set.
    """
    key = key_of(settings.server.api_key, OF_TEACHER)
    servers = [ScoringServer(url, key, settings.model_path, vocabulary, timeout_s, most_at_once) for url in urls]
    try:
        yield servers
    finally:
        for server in servers:
            await server.address.close()


async def look_at_each(servers: Sequence[ScoringServer], longest: int) -> list[str | None]:
    """Look at servers side by side, and return what to tell of each; None of one that is gone.

    Raises:
        ServerRefusesError: One can't be used.
    """
    results = await asyncio.gather(*(server.look(longest) for server in servers), return_exceptions=True)
    found: list[str | None] = []
    for server, result in zip(servers, results, strict=True):
        if isinstance(result, ServerGoneError):
            server.why_down = str(result)
            found.append(None)
        elif isinstance(result, BaseException):
            raise result
        else:
            found.append(result)
    return found


async def score_each(
    servers: Sequence[ScoringServer], texts: Sequence[tuple[Sequence[int], int]], num_top: int
) -> list[Scores]:
    """Score texts on several servers at once; those of one that is gone go to the others.

    Args:
        servers: That serve the same model.
        texts: Of each its tokens, and the first that is scored; see `ScoringServer.score`.
        num_top: As there.

    Raises:
        ServerRefusesError: A server refuses what another one would refuse too.
        ServerGoneError: No server is left; names the reasons.
    """

    async def one(number: int) -> Scores:
        tokens, first = texts[number]
        for turn in range(len(servers)):
            server = servers[(number + turn) % len(servers)]
            if server.why_down is None:
                try:
                    return await server.score(tokens, first, num_top)
                except ServerGoneError as error:
                    server.why_down = str(error)
        reasons = "; ".join(f"{server.address.url}: {server.why_down}" for server in servers)
        raise ServerGoneError(
            f"no server of {OF_TEACHER}.urls is left that scores ({reasons}). Start them again, and the run with them: "
            "it goes on from its newest checkpoint"
        )

    tasks = [asyncio.ensure_future(one(number)) for number in range(len(texts))]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
