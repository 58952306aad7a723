"""The rows of a batch as a reward model reads them that has a tokenizer or a chat template of its own.

The policy's tokens are decoded, the chat is rendered again with the reward model's template and tokenised by its
tokenizer. Its one score belongs to the whole response, so that no token of one has to be found in the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hrl.data.other_reader import OtherReader, with_answer
from hrl.errors import HrlError
from hrl.protocol import DataProto
from hrl.trainer.ppo.episodes import heads_of
from hrl.workers.rollout.base import sample_keys

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.batching.planner import MicroBatchLimits
    from hrl.data.chat import Message


class RewardModelRowError(HrlError, ValueError):
    """A sample can't be shown to the reward model; the message names the sample, and what to change."""


@dataclass(frozen=True)
class RewardModelRows:
    """Makes these rows.

    Attributes:
        policy: The policy's tokenizer.
        reader: The reward model.
    """

    policy: PreTrainedTokenizerBase
    reader: OtherReader

    def of(self, batch: DataProto, limits: MicroBatchLimits) -> tuple[DataProto, torch.Tensor]:
        """Return the rows to score, and which row of the batch each stands for, `(N,)` int64.

        Args:
            batch: Sampled rows, or rows of episodes. Of an episode the row of its last turn is scored, with the whole
                conversation.
            limits: Of the reward model's micro-batches.

        Returns:
            `prompts (N, P)`, `responses, response_mask (N, R)`, `attention_mask (N, P + R)` and `uid`, where a prompt
            is what all rows of a `uid` begin with, so that it is computed once.

        Raises:
            RewardModelRowError: A row is longer than a micro-batch may be, or than the model has positions.
            ChatTemplateError: A chat can't be rendered.
        """
        is_episode = "messages" in batch.non_tensor_batch
        places = heads_of(batch) if is_episode else torch.arange(len(batch))
        rows = batch.select_idxs(places)
        found = self.reader.token_ids(list(self._chats(rows, is_episode=is_episode)))
        longest = max(range(len(found)), key=lambda row: len(found[row]), default=0)
        why = self._too_long(len(found[longest]), limits) if found else None
        if why is not None:
            uid, sample = sample_keys(rows)[longest]
            raise RewardModelRowError(
                f"uid {uid}, sample {sample}: the chat has {len(found[longest])} tokens as the reward model reads it, "
                f"and {why}"
            )
        return packed_rows(found, rows.non_tensor_batch["uid"]), places

    def _too_long(self, tokens: int, limits: MicroBatchLimits) -> str | None:
        positions = self.reader.max_position_embeddings
        if positions is not None and tokens > positions:
            return f"it has {positions} positions: lower data.max_prompt_length or data.max_response_length"
        if tokens > limits.token_cap:
            return f"its micro-batches hold {limits.token_cap}: set {limits.budget_key} to at least " + str(
                limits.least_budget(tokens)
            )
        return None

    def _chats(self, rows: DataProto, *, is_episode: bool) -> Iterator[Sequence[Message]]:
        columns = rows.non_tensor_batch
        if is_episode:
            for messages, prompt in zip(columns["messages"], columns["raw_prompt"], strict=True):
                yield list(messages) or list(prompt)  # an episode that failed may have none
            return
        width = rows.batch["responses"].shape[1]
        is_there = rows.batch["attention_mask"][:, -width:].bool() if width else rows.batch["responses"].bool()
        for prompt, response, mask in zip(columns["raw_prompt"], rows.batch["responses"], is_there, strict=True):
            # As reward functions get it.
            yield with_answer(prompt, self.policy.decode(response[mask].tolist(), skip_special_tokens=True))


def packed_rows(sequences: Sequence[Sequence[int]], uids: np.ndarray) -> DataProto:
    """Return token sequences as rows of a batch, what all of a `uid` begin with as their prompt.

    Args:
        sequences: N, none of them empty.
        uids: `(N,)`.
    """
    shared: dict[Any, int] = {}
    first: dict[Any, Sequence[int]] = {}
    for uid, ids in zip(uids, sequences, strict=True):
        other = first.setdefault(uid, ids)
        most = min(shared.get(uid, len(ids)), len(ids) - 1)  # every row has a response, where it has two tokens
        shared[uid] = next((at for at in range(most) if ids[at] != other[at]), most)
    begins = [max(shared[uid], 1) for uid in uids]  # a row has a prompt
    longest_prompt = max(begins, default=1)
    longest = max((len(ids) - begin for ids, begin in zip(sequences, begins, strict=True)), default=0)
    width = longest_prompt + max(longest, 1)
    tokens, mask = (
        torch.zeros(len(begins), width, dtype=torch.int64),
        torch.zeros(len(begins), width, dtype=torch.int64),
    )
    for row, (ids, begin) in enumerate(zip(sequences, begins, strict=True)):
        start = longest_prompt - begin
        tokens[row, start : start + len(ids)] = torch.tensor(ids)
        mask[row, start : start + len(ids)] = 1
    return DataProto.from_dict(
        tensors={
            "prompts": tokens[:, :longest_prompt],
            "responses": tokens[:, longest_prompt:],
            "attention_mask": mask,
            "response_mask": mask[:, longest_prompt:],
        },
        non_tensors={"uid": np.asarray(uids, dtype=object)},
    )
