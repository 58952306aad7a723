"""Who plays in the trial of an environment: a script that needs no model, or a real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from hrl.data.chat import RENDERING_ERRORS
from hrl.episodes.trial import Policy, Record
from hrl.episodes.trial_arguments import example
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import EngineSetup, RolloutError, SampleOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_USER = {"role": "user", "content": "?"}
_LOG_PROB = -1.0


class Script:
    """A policy that says what it is told to.

    Without words it calls every tool once, with arguments that fit its schema, and then answers; where there are no
    tools it says 1, 2, 3, ….

    Args:
        tokenizer: Of the model whose place it takes.
        stop_ids: Tokens that end a turn; it ends with the first.
        words: What it says, turn by turn; the last is said again and again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], words: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop_ids, self._words = tokenizer, stop_ids, words

    async def __call__(self, record: Record, context: list[int], sampling: SamplingParams) -> SampleOutput:
        """Sample a turn; a `Policy`."""
        text = self._text(len(record.sampled), (record.first.tools if record.first else None) or ())
        ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], *self._stop_ids[:1]]
        kept = ids[: sampling.max_tokens]
        reason = "stop" if len(kept) == len(ids) and self._stop_ids else "length"
        return SampleOutput(kept, [_LOG_PROB] * len(kept), reason, 0)  # type: ignore[arg-type]

    def _text(self, turn: int, tools: Sequence[Mapping[str, Any]]) -> str:
        if self._words:
            return self._words[min(turn, len(self._words) - 1)]
        if not tools:
            return str(turn + 1)
        return self._call(tools[turn]["function"]) if turn < len(tools) else "That is all."

    def _call(self, function: Mapping[str, Any]) -> str:
        """Return a call as the chat template writes one; as Qwen's does, where it writes none."""
        call = {"name": function["name"], "arguments": example(function.get("parameters") or {})}
        message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": "c00000000", "function": call}],
        }
        try:
            before = self._tokenizer.apply_chat_template([_USER], tokenize=False, add_generation_prompt=True)
            after = self._tokenizer.apply_chat_template([_USER, message], tokenize=False)
        except RENDERING_ERRORS:
            before, after = "", ""
        said = str(after).removeprefix(str(before))
        if after and said != after and function["name"] in said:
            end = self._tokenizer.decode(self._stop_ids[:1])
            return said.rstrip("\n").removesuffix(end)
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@asynccontextmanager
async def engine_of(setup: EngineSetup) -> AsyncIterator[Policy]:
    """Start an engine, and end it with the context.

    Args:
        setup: What it is opened with.

    Raises:
        RolloutError: It does not start.
    """
    from hrl.workers.rollout.host import GENERATE_TIMEOUT_S, RolloutHost

    host = RolloutHost(setup, name="trial")
    await asyncio.to_thread(host.start)  # it has a thread of its own, and a deadline
    try:

        async def sample(record: Record, context: list[int], sampling: SamplingParams) -> SampleOutput:
            name = f"turn {len(record.sampled)} of {record.task.name}"
            try:
                async with asyncio.timeout(GENERATE_TIMEOUT_S):
                    return await asyncio.wrap_future(host.generate(context, sampling, name, pictures=record.pictures))
            except TimeoutError:
                raise RolloutError(f"the engine did not answer {name} within {GENERATE_TIMEOUT_S:g} s") from None

        yield sample
    finally:
        await asyncio.to_thread(host.shutdown)
