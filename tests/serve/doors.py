"""A door with a small tokenizer and an engine that says what it is told to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hrl.serve.door import Door, Served
from hrl.serve.policy import PolicyWords, Reading
from hrl.serve.rows import Call
from hrl.serve.server import DoorServer, HttpLimits
from hrl.serve.sessions import Limits, Session, Sessions
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import FinishReason, OnTokens, SampleOutput

KEY = "hrl-key"
MODEL = "tiny"
CHATML = (
    "{% if tools %}<|start|>system\n"
    "Call a tool with <tool_call>{{ tools[0] | tojson }}</tool_call><|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>\n"
    "{{ {'name': c['function']['name'], 'arguments': c['function']['arguments']} | tojson }}\n</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""ChatML with tools as Hermes writes them."""
MERGES = [("A", "B"), ("AB", "C"), ("H", "E"), ("L", "L")]


def tokenizer_with_merges(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A token per byte, and some for several: the same text may be several lists of tokens."""
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|start|>", "<|end|>", "<pad>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, eos_token="<|end|>", pad_token="<pad>"
    )


@dataclass
class Engine:
    """Answers with what `say` returns for the text of the context, a token per byte: never as a tokenizer would.

    Attributes:
        record: Every answer: context, what was sampled, how it was sampled.
        seats: Lets two more tokens of a stream come; None lets all.
        held: Answers wait for it; None lets them come.
        begun: How many answers were begun.
        error_when_cancelled: Raised by an answer that is given up.
    """

    tokenizer: Any
    say: Callable[[str], str]
    record: list[tuple[list[int], SampleOutput, SamplingParams]] = field(default_factory=list)
    delay_s: float = 0.0
    error: Exception | None = None
    ends_with: FinishReason | None = None
    version: int = 3
    cancelled: int = 0
    seats: asyncio.Semaphore | None = None
    held: asyncio.Event | None = None
    error_when_cancelled: Exception | None = None
    begun: int = 0

    async def generate(
        self, ids: list[int], sampling: SamplingParams, name: str, on_tokens: OnTokens | None = None
    ) -> SampleOutput:
        self.begun += 1
        try:
            await asyncio.sleep(self.delay_s)
            if self.held is not None:
                await self.held.wait()
            return await self._sampled(ids, sampling, on_tokens)
        except asyncio.CancelledError:
            self.cancelled += 1
            if self.error_when_cancelled is not None:
                raise self.error_when_cancelled from None
            raise

    async def _sampled(self, ids: list[int], sampling: SamplingParams, on_tokens: OnTokens | None) -> SampleOutput:
        if self.error is not None:
            raise self.error
        tokens = [*self.one_by_one(self.say(self.tokenizer.decode(ids))), self.tokenizer.eos_token_id]
        reason: FinishReason = "stop" if len(tokens) <= sampling.max_tokens else "length"
        tokens = tokens[: sampling.max_tokens]
        log_probs = [-random.Random(f"{sampling.seed}/{place}").random() for place in range(len(tokens))]
        output = SampleOutput(tokens, log_probs, self.ends_with or reason, self.version)
        for place in range(0, len(tokens) if on_tokens is not None else 0, 2):
            if self.seats is not None:
                await self.seats.acquire()
            on_tokens(tokens[place : place + 2], log_probs[place : place + 2])
        self.record.append((list(ids), output, sampling))
        return output

    def one_by_one(self, text: str) -> list[int]:
        """The tokens of a text, a byte each."""
        return [self.tokenizer.convert_tokens_to_ids(sign) for sign in _byte_signs(text)]


def _byte_signs(text: str) -> list[str]:
    ((signs, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text) or [
        ("", 0)
    ]
    return list(signs)


def echo(context: str) -> str:
    """The last user's words in capitals."""
    return context.rpartition("user\n")[2].partition("<|end|>")[0].upper()


@dataclass
class Opened:
    door: Door
    server: DoorServer
    engine: Engine
    client: AsyncOpenAI

    def session(self, name: str = "default") -> Session:
        """A session."""
        return next(one for one in self.door.sessions if one.name == name)

    def calls(self, name: str = "default") -> Sequence[Call]:
        """What a session has kept."""
        return self.session(name).calls

    async def idle(self) -> None:
        """Return when no call is being answered: one whose client went away ends after that."""
        await until(lambda: all(session.is_idle for session in self.door.sessions))

    async def busy(self) -> None:
        """Return when a call is being answered."""
        await until(lambda: any(not session.is_idle for session in self.door.sessions))


async def until(holds: Callable[[], bool], within_s: float = 20.0) -> None:
    """Return when something holds that other tasks bring about; a test that waits in vain fails."""
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def opened(
    say: Callable[[str], str] = echo,
    *,
    limits: Limits | None = None,
    http: HttpLimits | None = None,
    tokenizer: Any = None,
    max_model_len: int = 2000,
    model: str = MODEL,
    reading: dict[str, Any] | None = None,
    **engine: Any,
) -> AsyncIterator[Opened]:
    """A door, its server, and an unmodified client."""
    tokenizer = tokenizer or tokenizer_with_merges()
    made = Engine(tokenizer, say, **engine)
    words = PolicyWords(tokenizer, Reading(stop_ids=(tokenizer.eos_token_id,), **(reading or {})), max_model_len)
    served = Served(model, SamplingParams(temperature=1.0, top_p=1.0, top_k=-1), max_model_len)
    door = Door(served, words, made.generate, Sessions(KEY, limits or Limits()))
    try:
        async with (
            DoorServer(door, limits=http or HttpLimits()) as server,
            AsyncOpenAI(base_url=server.base_url, api_key=KEY, max_retries=0) as client,
        ):
            yield Opened(door, server, made, client)
    finally:
        words.close()
