"""From the engine's samples to a batch.

Responses as lists of token ids and log-probs, as engines return them, become the padded columns that training reads:
ids, masks, positions, log-probs. verl's agent loop pads every sample by itself through the tokenizer
(`_agent_loop_postprocess`), and joins the samples (`_postprocess`); its worker is made here without an engine, Ray or
a reward model, and its `AgentLoopOutput`s are made outside of what is timed. hrl checks every sample (`check_output`,
`check_values`) and fills the columns of the batch at once. Seconds are those of the whole batch, so a sample takes
them divided by the number of samples. All seven columns must be equal. Prompts have 64 to 512 tokens, responses 16 to
1,024.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from bench.harness import Case
from bench.peers import VERL
from hrl.protocol import DataProto
from hrl.workers.rollout.base import SampleOutput
from hrl.workers.rollout.host import check_output, check_values, response_columns

AXIS = "samples"
SECONDS = 19
THREADS = 1
_PROMPT, _RESPONSE, _VOCABULARY, _PAD = 512, 1024, 32000, 0


def cases() -> Iterator[Case]:
    """Yield growth in the number of samples."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<pad>": _PAD})), pad_token="<pad>")
    worker = object.__new__(AgentLoopWorker)
    worker.rollout_config = SimpleNamespace(prompt_length=_PROMPT, response_length=_RESPONSE)
    worker.tokenizer, worker.processor, worker.reward_loop_worker_handles = tokenizer, None, None
    worker.hf_model_type, worker.mm_processor_kwargs, worker.distillation_enabled = None, {}, False

    for rows in (64, 256, 1024):
        prompts, outputs = _sampled(rows)
        keys = [(str(row), 0) for row in range(rows)]
        prompt_ids = torch.full((rows, _PROMPT), _PAD)
        for row, prompt in enumerate(prompts):
            prompt_ids[row, -len(prompt) :] = torch.tensor(prompt)
        prompt_mask = (torch.arange(_PROMPT) >= _PROMPT - torch.tensor([[len(prompt)] for prompt in prompts])).long()

        def ours(
            prompt_ids: torch.Tensor = prompt_ids,
            prompt_mask: torch.Tensor = prompt_mask,
            outputs: list[SampleOutput] = outputs,
            keys: list[tuple[str, int]] = keys,
        ) -> DataProto:
            for row, output in enumerate(outputs):
                check_output(output, f"row {row}", max_tokens=_RESPONSE, version=0)
            reasons = np.array([output.finish_reason for output in outputs], dtype=object)
            columns = response_columns(prompt_ids, prompt_mask, outputs, _RESPONSE, _PAD)
            check_values(columns, keys, _VOCABULARY)
            return DataProto.from_dict(tensors=columns, non_tensors={"finish_reason": reasons})

        loop_outputs = [
            AgentLoopOutput(
                prompt_ids=prompt,
                response_ids=output.token_ids,
                response_mask=[1] * len(output.token_ids),
                response_logprobs=output.log_probs,
                num_turns=2,
                metrics=AgentLoopMetrics(),
            )
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

        async def padded(loop_outputs: list[AgentLoopOutput] = loop_outputs) -> list[AgentLoopOutput]:
            return await asyncio.gather(
                *(worker._agent_loop_postprocess(output, False, raw_prompt=[]) for output in loop_outputs)
            )

        def verl(padded=padded) -> object:
            return worker._postprocess(asyncio.run(padded()), {})

        floor = 30.0 if rows == 1024 else None
        yield Case(f"{rows} samples", VERL, ours, verl, _equal, floor, rows)


def _sampled(rows: int) -> tuple[list[list[int]], list[SampleOutput]]:
    """Return the token ids of prompts, and responses as hrl's engines return them."""
    random = np.random.default_rng(rows)
    prompts = [random.integers(1, _VOCABULARY, random.integers(64, _PROMPT + 1)).tolist() for _ in range(rows)]
    outputs = []
    for _ in range(rows):
        length = int(random.integers(16, _RESPONSE + 1))
        ids, log_probs = random.integers(1, _VOCABULARY, length), -random.exponential(1.0, length)
        outputs.append(SampleOutput(ids.tolist(), log_probs.tolist(), "stop", 0))
    return prompts, outputs


def _equal(ours: DataProto, theirs: DataProto) -> None:
    for name, column in ours.batch.items():
        assert torch.equal(column, theirs.batch[name]), name
