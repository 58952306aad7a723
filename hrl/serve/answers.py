"""Answers in OpenAI's form, whole and as the events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

FinishReason = Literal["stop", "length", "tool_calls"]
DONE = b"data: [DONE]\n\n"
STILL_THERE = b": the engine is at work\n\n"
"""A comment, which clients skip: nothing that lies between ends a connection on which nothing is said."""
_TOKENS_AN_EVENT = 8


@dataclass(frozen=True)
class Choice:
    """One sampled answer.

    Attributes:
        text: What the client is shown of it, without special tokens.
        pieces: What each token adds to the text; those of a stop text add nothing.
        beginnings: Where in the text each piece begins.
        message: As a chat's answer in OpenAI's form; None for a continuation of a text.
        prompt_ids: Its context.
        token_ids: What was sampled.
        log_probs: Of each token.
        tokens: Each token as text and as bytes, where log-probs are shown; else empty.
        finish_reason: Why it ended.
        version: Of the policy that sampled it.
    """

    text: str
    pieces: Sequence[str]
    beginnings: Sequence[int]
    message: Mapping[str, Any] | None
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    tokens: Sequence[tuple[str, list[int] | None]]
    finish_reason: FinishReason
    version: int


@dataclass(frozen=True)
class Form:
    """What an answer looks like.

    Attributes:
        model: Name of the model.
        is_chat: Whether it answers a chat, or continues a text.
        log_probs: Those of the sampled tokens are shown.
        token_ids: Those of the prompt, what was sampled, and the policy's version are shown.
        usage: A stream ends with an event that counts the tokens, and all others say that they do not.
        calls: An answer may be nothing but calls of tools.
    """

    model: str
    is_chat: bool
    log_probs: bool = False
    token_ids: bool = False
    usage: bool = False
    calls: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer as one object."""
        shown = [self._choice(index, choice) for index, choice in enumerate(choices)]
        answer = {**self._head(streamed=False), "choices": shown, "usage": _usage(choices)}
        if self.token_ids and self.is_chat:
            answer["prompt_token_ids"] = list(choices[0].prompt_ids)
        return answer

    def opening(self, num_choices: int) -> Iterator[bytes]:
        """Return the events that a stream begins with, before anything is sampled."""
        if self.is_chat:
            for index in range(num_choices):
                yield self._event(self._delta(index, {"role": "assistant", "content": None if self.calls else ""}))

    def piece(self, index: int, choice: Choice, begin: int, end: int) -> bytes:
        """Return the event of a stream that shows some tokens of a choice, as text."""
        text = "".join(choice.pieces[begin:end])
        if self.is_chat:
            context = {"prompt_token_ids": list(choice.prompt_ids)} if self.token_ids and not begin else {}
            return self._event(self._delta(index, {"content": text}, choice, begin, end), context)
        return self._event(self._text_delta(index, choice, begin, end))

    def events(self, choices: Sequence[Choice], shown: Mapping[int, int]) -> Iterator[bytes]:
        """Return the events that end a stream.

        Args:
            choices: The answer.
            shown: Number of a choice → how many of its tokens were shown already.
        """
        for index, choice in enumerate(choices):
            events = self._chat_events if self.is_chat else self._text_events
            yield from events(index, choice, shown.get(index, 0))
        if self.usage:
            yield _encoded({**self._head(streamed=True), "choices": [], "usage": _usage(choices)})
        yield DONE

    # ---- one choice

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        shown: dict[str, Any] = {"index": index, **self._end(choice), "logprobs": None}
        if self.is_chat:
            shown["message"] = {"role": "assistant", "content": None, "refusal": None, **(choice.message or {})}
        else:
            shown["text"] = choice.text
        if self.log_probs:
            shown["logprobs"] = self._log_probs(choice, 0, len(choice.token_ids))
        if self.token_ids:
            shown["token_ids"] = list(choice.token_ids)
            if not self.is_chat:
                shown["prompt_token_ids"] = list(choice.prompt_ids)
        return shown

    def _chat_events(self, index: int, choice: Choice, shown: int) -> Iterator[bytes]:
        message = choice.message or {}
        content, count = message.get("content") or "", len(choice.token_ids)
        if message.get("reasoning_content"):
            yield self._event(self._delta(index, {"reasoning_content": message["reasoning_content"]}))
        if content and content == "".join(choice.pieces):
            for begin, end in _spans(shown, count):
                yield self.piece(index, choice, begin, end)
        elif content:  # beside calls or reasoning, and nothing was shown of it
            yield self.piece(index, replace(choice, pieces=[content, *[""] * (count - 1)]), 0, count)
        for place, call in enumerate(message.get("tool_calls") or ()):
            yield self._event(self._delta(index, {"tool_calls": [{"index": place, **call}]}))
        delta = {"content": ""} if self.calls and message.get("content") == "" else {}
        last = self._delta(index, delta) if content else self._delta(index, delta, choice, 0, count)
        context = {"prompt_token_ids": list(choice.prompt_ids)} if self.token_ids and not content else {}
        yield self._event({**last, **self._end(choice)}, context)

    def _text_events(self, index: int, choice: Choice, shown: int) -> Iterator[bytes]:
        count = len(choice.token_ids)
        *spans, (begin, end) = list(_spans(shown, count)) or [(count, count)]
        for span in spans:
            yield self.piece(index, choice, *span)
        yield self._event({**self._text_delta(index, choice, begin, end), **self._end(choice)})

    def _end(self, choice: Choice) -> dict[str, Any]:
        version = {"policy_version": choice.version} if self.token_ids else {}
        return {"finish_reason": choice.finish_reason, **version}

    def _text_delta(self, index: int, choice: Choice, begin: int, end: int) -> dict[str, Any]:
        text = "".join(choice.pieces[begin:end])
        shown: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if self.log_probs:
            shown["logprobs"] = self._log_probs(choice, begin, end)
        if self.token_ids:
            shown["token_ids"] = list(choice.token_ids[begin:end])
            if not begin:
                shown["prompt_token_ids"] = list(choice.prompt_ids)
        return shown

    def _delta(
        self, index: int, delta: Mapping[str, Any], choice: Choice | None = None, begin: int = 0, end: int = 0
    ) -> dict[str, Any]:
        shown: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if choice is not None and self.log_probs:
            shown["logprobs"] = self._log_probs(choice, begin, end)
        if choice is not None and self.token_ids:
            shown["token_ids"] = list(choice.token_ids[begin:end])
        return shown

    def _log_probs(self, choice: Choice, begin: int, end: int) -> dict[str, Any]:
        tokens, log_probs = choice.tokens[begin:end], choice.log_probs[begin:end]
        if self.is_chat:
            entries = [
                {"token": text, "logprob": log_prob, "bytes": raw, "top_logprobs": []}
                for (text, raw), log_prob in zip(tokens, log_probs, strict=True)
            ]
            return {"content": entries, "refusal": None}
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": list(log_probs),
            "top_logprobs": None,
            "text_offset": list(choice.beginnings[begin:end]),
        }

    # ---- around them

    def _head(self, *, streamed: bool) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        kind = "text_completion" if not self.is_chat else f"chat.completion{'.chunk' if streamed else ''}"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _event(self, choice: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> bytes:
        uncounted = {"usage": None} if self.usage else {}
        return _encoded({**self._head(streamed=True), **(beside or {}), "choices": [choice], **uncounted})


def error_event(body: Mapping[str, Any]) -> bytes:
    """Return the event that ends a stream whose answer failed."""
    return _encoded(body)


def _usage(choices: Sequence[Choice]) -> dict[str, int]:
    prompts = {
        id(choice.prompt_ids): len(choice.prompt_ids) for choice in choices
    }  # choices of a prompt share its list
    prompt, sampled = sum(prompts.values()), sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _spans(shown: int, count: int) -> Iterator[tuple[int, int]]:
    for begin in range(shown, count, _TOKENS_AN_EVENT):
        yield begin, min(begin + _TOKENS_AN_EVENT, count)


def _encoded(event: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
