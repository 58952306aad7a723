"""Between batches and requests: prompts out of padded columns, responses back into them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from hrl.protocol import DataProto
from hrl.workers.rollout.base import RolloutError, SampleOutput

LOG_PROB_TOLERANCE = 1e-3
"""How far above 0 rounding may lift a log-prob."""


@dataclass(frozen=True)
class SampleName:
    """Which sample an error is about."""

    row: int
    uid: str
    sample_index: int

    def __str__(self) -> str:
        return f"row {self.row} (uid {self.uid}, sample {self.sample_index})"


def sample_keys(rows: DataProto) -> list[tuple[str, int]]:
    """Return what names each row within its batch, the same for whoever announces, samples or rewards it.

    (group, number).
    """
    columns = rows.non_tensor_batch
    return [(str(uid), int(index)) for uid, index in zip(columns["uid"], columns["sample_index"], strict=True)]


def prompt_tokens(prompts: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """Return the prompts of left-padded columns `(B, P)`, without padding.

    Raises:
        RolloutError: A prompt without tokens.
    """
    ids = prompts.cpu().numpy()
    mask = attention_mask.cpu().numpy().astype(bool)
    rows = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
    empty = next((index for index, row in enumerate(rows) if not row), None)
    if empty is not None:
        raise RolloutError(f"row {empty} has an empty prompt")
    return rows


def check_output(output: SampleOutput, name: SampleName, *, max_tokens: int, vocab_size: int, version: int) -> None:
    """Refuse an answer that can't be what was asked for.

    Raises:
        RolloutError: Names the sample and what is wrong with it.
    """
    tokens, log_probs = output.token_ids, output.log_probs
    wrong = None
    if len(tokens) != len(log_probs):
        wrong = f"{len(tokens)} tokens with {len(log_probs)} log-probs"
    elif len(tokens) > max_tokens:
        wrong = f"{len(tokens)} tokens, although at most {max_tokens} were asked for"
    elif any(not 0 <= token < vocab_size for token in tokens):
        wrong = f"a token outside the vocabulary of {vocab_size}"
    elif not all(math.isfinite(value) and value <= LOG_PROB_TOLERANCE for value in log_probs):
        wrong = "a log-prob that is not a finite number below 0"
    elif output.policy_version != version:
        wrong = f"policy version {output.policy_version}, although version {version} is served"
    if wrong is not None:
        raise RolloutError(f"the engine answered {name} with {wrong}")


def response_columns(
    prompts: Tensor, prompt_mask: Tensor, outputs: Sequence[SampleOutput], max_response_tokens: int, pad_token_id: int
) -> dict[str, Tensor]:
    """Return the batch columns of sampled responses.

    Args:
        prompts: `(B, P)` left-padded.
        prompt_mask: `(B, P)`.
        outputs: One a row.
        max_response_tokens: R.
        pad_token_id: Fills responses up; never read back, since lengths come from the mask.

    Returns:
        `prompts (B, P)`, `responses, response_mask (B, R)` and `input_ids, attention_mask, position_ids (B, P+R)`
        int64; `rollout_log_probs (B, R)` float32.
    """
    rows = len(outputs)
    lengths = np.fromiter((len(output.token_ids) for output in outputs), np.int64, rows)
    total = int(lengths.sum())
    mask = np.arange(max_response_tokens) < lengths[:, None]
    responses = np.full((rows, max_response_tokens), pad_token_id, np.int64)
    responses[mask] = np.fromiter(chain.from_iterable(output.token_ids for output in outputs), np.int64, total)
    log_probs = np.zeros((rows, max_response_tokens), np.float32)
    log_probs[mask] = np.fromiter(chain.from_iterable(output.log_probs for output in outputs), np.float32, total)

    response_mask = torch.from_numpy(mask.astype(np.int64))
    prompts, prompt_mask = prompts.to("cpu", torch.int64), prompt_mask.to("cpu", torch.int64)
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
    return {
        "prompts": prompts,
        "responses": torch.from_numpy(responses),
        "input_ids": torch.cat([prompts, torch.from_numpy(responses)], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp_(min=0),
        "response_mask": response_mask,
        "rollout_log_probs": torch.from_numpy(log_probs),
    }
