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
from hrl.data.steps import StepMarks, step_ends, tokens_at, with_step_tokens
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
class StepRows:
    """Rows whose steps are scored.

    Attributes:
        rows: As of `RewardModelRows.of`; `response_mask` marks the tokens before which a score is read, one for a step.
        tokens: Of each row, the response token of the policy at which each step ends.
    """

    rows: DataProto
    tokens: Sequence[Sequence[int]]

    def place(self, scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the scores of steps on the policy's tokens.

        Args:
            scores: `(N, R)` at the marked tokens.
            width: Columns of the policy's responses.

        Returns:
            `(N, width)` float32, where steps that end at one token add up; and the mean over the steps of each row
            `(N,)`, 0 without a step.
        """
        placed, means = torch.zeros(len(self.tokens), width), torch.zeros(len(self.tokens))
        marked = self.rows.batch["response_mask"].bool()
        for row, tokens in enumerate(self.tokens):
            of_steps = scores[row, marked[row]].float()
            placed[row].index_add_(0, torch.tensor(tokens, dtype=torch.int64), of_steps)
            means[row] = of_steps.mean() if len(tokens) else 0.0
        return placed, means


@dataclass(frozen=True)
class RewardModelRows:
    """Makes these rows.

    Attributes:
        policy: The policy's tokenizer.
        reader: The reward model.
        steps: How a process reward model is shown the steps of an answer; None of a model with one score.
    """

    policy: PreTrainedTokenizerBase
    reader: OtherReader
    steps: StepMarks | None = None

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
        self._require_fit(rows, found, limits)
        return packed_rows(found, rows.non_tensor_batch["uid"]), places

    def of_steps(self, batch: DataProto, limits: MicroBatchLimits) -> StepRows:
        """Return the rows whose steps are to be scored, in the order of the batch.

        Args:
            batch: Sampled rows.
            limits: Of the reward model's micro-batches.

        Raises:
            RewardModelRowError: A row is too long, or its chat template takes away what marks steps.
            ChatTemplateError: A chat can't be rendered.
        """
        marks = self.steps
        assert marks is not None, "the reward model scores steps"
        chats, ends, tokens = [], [], []
        for prompt, ids in zip(batch.non_tensor_batch["raw_prompt"], self._responses(batch), strict=True):
            text = marks.hide(self._decode(ids))
            ends.append(step_ends(text, marks.separator))
            tokens.append(tokens_at(ends[-1], ids, self._decode))
            chats.append(with_answer(prompt, with_step_tokens(text, ends[-1], marks.token)))
        found, scored = self.reader.token_ids(chats), []
        for row, (ids, of_row) in enumerate(zip(found, ends, strict=True)):
            places = [place for place, token in enumerate(ids) if token == marks.token_id]
            if len(places) < len(of_row):
                uid, sample = sample_keys(batch)[row]
                raise RewardModelRowError(
                    f"uid {uid}, sample {sample}: the reward model's chat template leaves {len(places)} of the "
                    f"{len(of_row)} tokens {marks.token} that mark the answer's steps"
                )
            scored.append(places[len(places) - len(of_row) :])
            if scored[-1] and scored[-1][-1] == len(ids) - 1:
                ids.append(marks.token_id)  # a score is read before a token, whichever that is
        self._require_fit(batch, found, limits)
        return StepRows(packed_rows(found, batch.non_tensor_batch["uid"], scored), tokens)

    def _require_fit(self, rows: DataProto, found: Sequence[Sequence[int]], limits: MicroBatchLimits) -> None:
        longest = max(range(len(found)), key=lambda row: len(found[row]), default=0)
        why = self._too_long(len(found[longest]), limits) if found else None
        if why is not None:
            uid, sample = sample_keys(rows)[longest]
            raise RewardModelRowError(
                f"uid {uid}, sample {sample}: the chat has {len(found[longest])} tokens as the reward model reads it, "
                f"and {why}"
            )

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
        for prompt, ids in zip(columns["raw_prompt"], self._responses(rows), strict=True):
            yield with_answer(prompt, self._decode(ids))

    def _responses(self, rows: DataProto) -> Iterator[list[int]]:
        width = rows.batch["responses"].shape[1]
        is_there = rows.batch["attention_mask"][:, -width:].bool() if width else rows.batch["responses"].bool()
        for response, mask in zip(rows.batch["responses"], is_there, strict=True):
            yield response[mask].tolist()

    def _decode(self, ids: Sequence[int]) -> str:
        """Return an answer's text as reward functions get it."""
        return str(self.policy.decode(list(ids), skip_special_tokens=True))


def packed_rows(
    sequences: Sequence[Sequence[int]], uids: np.ndarray, scored: Sequence[Sequence[int]] | None = None
) -> DataProto:
    """Return token sequences as rows of a batch, what all of a `uid` begin with as their prompt.

    Args:
        sequences: N, none of them empty.
        uids: `(N,)`.
        scored: Tokens of each sequence behind which a score is read: `response_mask` marks the next token of each. None
            marks all.
    """
    shared: dict[Any, int] = {}
    first: dict[Any, Sequence[int]] = {}
    for uid, ids in zip(uids, sequences, strict=True):
        other = first.setdefault(uid, ids)
        most = min(shared.get(uid, len(ids)), len(ids) - 1)  # every row has a response, where it has two tokens
        shared[uid] = next((at for at in range(most) if ids[at] != other[at]), most)
    begins = [max(shared[uid], 1) for uid in uids]  # a row has a prompt
    if scored is not None:
        begins = [min([begin, *(place + 1 for place in places)]) for begin, places in zip(begins, scored, strict=True)]
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
    marked = mask[:, longest_prompt:].clone()
    for row, (places, begin) in enumerate(zip(scored or (), begins, strict=False)):
        marked[row] = 0
        marked[row, [place + 1 - begin for place in places]] = 1
    return DataProto.from_dict(
        tensors={
            "prompts": tokens[:, :longest_prompt],
            "responses": tokens[:, longest_prompt:],
            "attention_mask": mask,
            "response_mask": marked,
        },
        non_tensors={"uid": np.asarray(uids, dtype=object)},
    )
