"""Single answers, each labelled good or bad.

A row has `prompt` and `completion`, each a chat or a string, and `label`: true for a good answer, false for a bad one
(1 and 0 are taken too). A string prompt is one message of the user, a string answer one of the assistant; the answer
may also be a whole chat that begins with the prompt. `tools` are schemas of functions, for a template that shows them.

KTO also reads each prompt with the answer to another one, by which it knows how far the policy has moved. Which answer
that is stays the same over the run, because the reference's log-probs of both are computed once: within the batches of
the first epoch, answers move on by one place, as in TRL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hrl.config.offline import PreferenceDataConfig
from hrl.data.chat import as_messages, tools_of, with_tools
from hrl.data.offline.answers import Answer, ChatPrompt, OfflineDataset, Passage, beside, pad_answers, passages_of_chat
from hrl.data.offline.pairs import known_reference, require_finite_reference, without_prompt
from hrl.data.pictures import take_pictures
from hrl.data.sources import DataRow, show_value, source_of
from hrl.protocol import DataProto

_LABELS: dict[Any, bool] = {True: True, False: False}
_WORDS = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True)
class LabelledRow(DataRow):
    """One checked answer.

    Attributes:
        prompt: A chat.
        answer: Without the prompt.
        is_desirable: Its label.
        tools: Schemas of the functions that the prompt offers; None for none.
    """

    prompt: list[dict[str, Any]]
    answer: list[dict[str, Any]]
    is_desirable: bool
    tools: list[dict[str, Any]] | None = None


def check_labelled(raw: Mapping[str, Any], config: PreferenceDataConfig) -> LabelledRow | str:
    """Check a raw row; return a labelled answer, or a sentence about what is wrong with the row."""
    source = source_of(raw, config.data_source_key)
    tools = tools_of(raw)
    if isinstance(tools, str):
        return tools
    label = raw.get(config.label_key)
    label = _WORDS.get(label.strip().lower(), label) if isinstance(label, str) else label  # CSV has text alone
    if not isinstance(label, bool | int | float | np.bool_) or label not in _LABELS:
        return f"{config.label_key!r} is {show_value(label)}, expected true for a good answer or false for a bad one"
    prompt = as_messages(raw.get(config.prompt_key), config.prompt_key, pictures=True)
    answer = as_messages(raw.get(config.completion_key), config.completion_key, "assistant")
    if isinstance(prompt, str) or isinstance(answer, str):
        return prompt if isinstance(prompt, str) else str(answer)
    answer = without_prompt(prompt, answer)
    if not answer or answer[0]["role"] != "assistant":
        found = f"a message of role {answer[0]['role']!r}" if answer else "nothing"
        return f"{config.completion_key!r} has {found} after the prompt, expected the assistant's"
    placed = take_pictures(raw, prompt, config.image_key, config.video_key)
    if isinstance(placed, str):
        return placed
    return LabelledRow(placed[0], answer, _LABELS[label], tools, data_source=source, images=placed[1])


class LabelledDataset(OfflineDataset[LabelledRow]):
    """Labelled answers as tokens, one row each."""

    config: PreferenceDataConfig
    _reference: torch.Tensor | None = None
    _others: np.ndarray | None = None

    def check(self, raw: Mapping[str, Any]) -> LabelledRow | str:
        return check_labelled(raw, self.config)

    def shape(self, row: LabelledRow) -> str:
        return "labelled answers" + beside(row)

    def render(self, row: LabelledRow) -> list[list[Passage]]:
        kwargs = with_tools(self.config.apply_chat_template_kwargs, row.tools)
        passages = passages_of_chat(self.tokenizer, [*row.prompt, *row.answer], len(row.prompt), kwargs)
        return [self.with_pictures(passages, row, ChatPrompt(row.prompt, row.tools))]

    def beside_ids(self) -> Iterator[dict[str, Any]]:
        for index, others in zip(self.known, super().beside_ids(), strict=True):
            yield others | {"label": self.rows[index].is_desirable}

    def batch(self, indices: Iterable[int]) -> DataProto:
        """Return one row for each answer.

        Columns: those of `pad_answers`, `is_desirable (B,)` bool, `ref_sequence_log_prob (B,)` once the reference is
        known; non-tensor `uid`, `data_source` and `index`.
        """
        chosen = list(indices)
        tensors = pad_answers([self.tokens[index][0] for index in chosen], self.pad_id)
        tensors["is_desirable"] = torch.tensor([self.rows[index].is_desirable for index in chosen])
        return self._with_reference(tensors, chosen, 0)

    def mismatched(self, indices: Iterable[int]) -> DataProto:
        """Return these rows' prompts, each with the answer that `mismatch` gave it; columns as `batch`, no labels.

        A row that is too long so loses the end of the answer.
        """
        assert self._others is not None, "`mismatch` comes first"
        chosen = list(indices)
        rows = []
        for index in chosen:
            own, other = self.tokens[index][0], self.tokens[self._others[index]][0]
            cut = Answer(own.prompt, other.answer, other.trained).cut_to(self.config.max_length)
            assert cut is not None, "a prompt leaves room for a token of an answer, and its first one is trained on"
            rows.append(cut)
        return self._with_reference(pad_answers(rows, self.pad_id), chosen, 1)

    def _with_reference(self, tensors: dict[str, torch.Tensor], indices: list[int], column: int) -> DataProto:
        if self._reference is not None:
            tensors["ref_sequence_log_prob"] = known_reference(self._reference[indices], indices)[:, column]
        return self.as_proto(tensors, indices)

    @property
    def is_mismatched(self) -> bool:
        """Whether every prompt has the answer to another one."""
        return self._others is not None

    def mismatch(self, blocks: Sequence[Sequence[int]]) -> None:
        """Give every row the answer of the row before it in its block, the first one that of the last.

        A block of one row takes the answer of the block before it.
        """
        self._others = np.arange(len(self))
        before: Sequence[int] = ()
        for block in blocks:
            rows = np.asarray(block)
            self._others[rows] = before[-1] if len(rows) == 1 and len(before) else np.roll(rows, 1)
            before = block

    def set_reference(self, indices: Sequence[int], sums: torch.Tensor, others: torch.Tensor) -> None:
        """Store the reference's log-probs of some rows with their own and with another answer, (B,) each.

        Raises:
            NonFiniteError: A sum is not finite; names the row.
        """
        both = torch.stack([sums, others], 1)
        require_finite_reference(both, indices)
        if self._reference is None:
            self._reference = sums.new_full((len(self), 2), torch.nan)
        self._reference[list(indices)] = both

    def first_prompt(self) -> ChatPrompt | None:
        """Return the first row's prompt."""
        row = next((self.rows[index] for index in self.known), None)
        return None if row is None else ChatPrompt(row.prompt, row.tools)
