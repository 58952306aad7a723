"""A door with a small tokenizer and an engine that says what it is told to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

from hrl.serve.door import Door, Served
from hrl.serve.policy import PolicyWords, Reading
from hrl.serve.rows import Call
from hrl.serve.server import DoorServer, HttpLimits
from hrl.serve.sessions import Limits, Sessions
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import SampleOutput
from tests.data.conftest import make_tokenizer

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


@dataclass
class Engine:
    """Answers with what `say` returns for the text of the context, in tokens of its own: bytes, never merged.

    Attributes:
        record: Every answer: context, sampled ids, log-probs, how it was sampled.
    """

    tokenizer: Any
    say: Callable[[str], str]
    record: list[tuple[list[int], SampleOutput, SamplingParams]] = field(default_factory=list)
    delay_s: float = 0.0
    error: Exception | None = None
    version: int = 3

    async def generate(self, ids: list[int], sampling: SamplingParams, name: str) -> SampleOutput:
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        spoken = self.tokenizer(self.say(self.tokenizer.decode(ids)), add_special_tokens=False)["input_ids"]
        tokens = [*spoken, self.tokenizer.eos_token_id]
        reason = "stop" if len(tokens) <= sampling.max_tokens else "length"
        tokens = tokens[: sampling.max_tokens]
        log_probs = [-random.Random(f"{sampling.seed}/{place}").random() for place in range(len(tokens))]
        output = SampleOutput(tokens, log_probs, reason, self.version)
        self.record.append((list(ids), output, sampling))
        return output


def echo(context: str) -> str:
    """The last user's words in capitals."""
    return context.rpartition("user\n")[2].partition("<|end|>")[0].upper()


@dataclass
class Opened:
    door: Door
    server: DoorServer
    engine: Engine
    client: AsyncOpenAI

    def calls(self, session: str = "default") -> Sequence[Call]:
        """What a session has kept."""
        return next(one.calls for one in self.door.sessions if one.name == session)


@asynccontextmanager
async def opened(
    say: Callable[[str], str] = echo,
    *,
    limits: Limits = Limits(),
    http: HttpLimits = HttpLimits(),
    tokenizer: Any = None,
    max_model_len: int = 2000,
    reading: dict[str, Any] | None = None,
    **engine: Any,
) -> AsyncIterator[Opened]:
    """A door, its server, and an unmodified client."""
    tokenizer = tokenizer or make_tokenizer(CHATML)
    made = Engine(tokenizer, say, **engine)
    words = PolicyWords(tokenizer, Reading(stop_ids=(tokenizer.eos_token_id,), **(reading or {})), max_model_len)
    served = Served(MODEL, SamplingParams(temperature=1.0, top_p=1.0, top_k=-1), max_model_len)
    door = Door(served, words, made.generate, Sessions(KEY, limits))
    try:
        async with (
            DoorServer(door, limits=http) as server,
            AsyncOpenAI(base_url=server.base_url, api_key=KEY, max_retries=0) as client,
        ):
            yield Opened(door, server, made, client)
    finally:
        words.close()
