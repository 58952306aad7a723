"""Preference pairs: a preferred and a rejected answer to the same prompt.

A row has `prompt`, `chosen` and `rejected`, each a chat or a string. A string prompt is one message of the user,
a string answer one of the assistant; either answer may also be a whole chat that begins with the prompt. In two whole
chats without a prompt, the common beginning is the prompt (TRL's implicit prompt); two whole texts are split at the
last space of their common beginning, and no chat template is applied. `tools` are schemas of functions, for a template
that shows them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from hrl.config.offline import PairDataConfig, ScoredPairDataConfig
from hrl.data.chat import as_messages, chat_of_text, tools_of, with_tools, wrong_value
from hrl.data.offline.answers import (
    ChatPrompt,
    OfflineDataset,
    Passage,
    beside,
    pad_answers,
    passages_of_chat,
    passages_of_text,
)
from hrl.data.pictures import take_pictures
from hrl.data.sources import DataRow, show_value, source_of
from hrl.errors import NonFiniteError
from hrl.protocol import DataProto

_SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class PairRow(DataRow):
    """One checked pair.

    Attributes:
        prompt: A chat; plain text if `chosen` and `rejected` are plain text.
        chosen: The preferred answer, without the prompt.
        rejected: The other answer, without the prompt.
        margin: The margin by which the chosen answer should score higher; None if the row has none.
        tools: Schemas of the functions that the prompt offers; None for none.
    """

    prompt: list[dict[str, Any]] | str
    chosen: list[dict[str, Any]] | str
    rejected: list[dict[str, Any]] | str
    margin: float | None
    tools: list[dict[str, Any]] | None = None


def check_pair(raw: Mapping[str, Any], config: PairDataConfig) -> PairRow | str:
    """Check a raw row; return a pair, or a sentence about what is wrong with the row."""
    margin_key = config.margin_key if isinstance(config, ScoredPairDataConfig) else None
    margin = None if margin_key is None else raw.get(margin_key)
    if margin is not None and not (isinstance(margin, int | float) and math.isfinite(margin)):
        return f"{margin_key!r} is {show_value(margin)}, expected a finite number"
    source = source_of(raw, config.data_source_key)
    tools = tools_of(raw)
    if isinstance(tools, str):
        return tools
    found = pair_of(raw, config.prompt_key, config.chosen_key, config.rejected_key)
    if isinstance(found, str):
        return found
    prompt, chosen, rejected = found
    placed = take_pictures(raw, [] if isinstance(prompt, str) else prompt, config.image_key, config.video_key)
    if isinstance(placed, str):
        return placed
    if not isinstance(prompt, str):
        prompt = placed[0]
    return PairRow(prompt, chosen, rejected, margin, tools, data_source=source, images=placed[1])


Side = list[dict[str, Any]] | str


def pair_of(
    raw: Mapping[str, Any], prompt_key: str, chosen_key: str, rejected_key: str
) -> tuple[Side, Side, Side] | str:
    """Return prompt, preferred answer and other answer of a row, or a sentence about what is wrong with it."""
    prompt, chosen, rejected = (chat_of_text(raw.get(key)) for key in (prompt_key, chosen_key, rejected_key))
    if prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        wrong = wrong_value(chosen, chosen_key) or wrong_value(rejected, rejected_key)
        return wrong or _split_texts(chosen, rejected)
    given = as_messages(chosen, chosen_key, "assistant")
    other = as_messages(rejected, rejected_key, "assistant")
    if isinstance(given, str):
        return given
    if isinstance(other, str):
        return other
    before = as_messages(prompt, prompt_key, pictures=True) if prompt is not None else _shared(given, other)
    if isinstance(before, str):
        return before
    if not before:
        return f"has no {prompt_key!r}, and its two chats share no first message"
    answers = without_prompt(before, given), without_prompt(before, other)
    for key, answer in zip((chosen_key, rejected_key), answers, strict=True):
        if not answer or answer[0]["role"] != "assistant":
            found = f"a message of role {answer[0]['role']!r}" if answer else "nothing"
            return f"{key!r} has {found} after the prompt, expected the assistant's: both answers share the prompt"
    if answers[0] == answers[1]:
        return f"{chosen_key!r} and {rejected_key!r} are the same answer"
    return before, *answers


def without_prompt(prompt: list[dict[str, Any]], answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove the prompt from an answer that is a whole chat; return any other answer unchanged."""
    return answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer


def _shared(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return the common beginning of two sequences."""
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str] | str:
    """Split two texts into their common prompt and the two rests, before the last space in their common beginning."""
    if chosen == rejected:
        return "holds the same text twice"
    cut = chosen.rfind(" ", 0, len(_shared(chosen, rejected)))
    if cut < 1:
        return "has no prompt, and its two texts share no beginning"
    return chosen[:cut], chosen[cut:], rejected[cut:]


class PairDataset(OfflineDataset[PairRow]):
    """Pairs as tokens, served in batches of two rows per pair."""

    config: PairDataConfig
    _reference: torch.Tensor | None = None

    def check(self, raw: Mapping[str, Any]) -> PairRow | str:
        return check_pair(raw, self.config)

    def shape(self, row: PairRow) -> str:
        if isinstance(row.prompt, str):
            return "pairs of texts"
        return "pairs of answers" + beside(row)

    def render(self, row: PairRow) -> list[list[Passage]]:
        """Return the passages of prompt and chosen answer, and those of prompt and rejected answer."""
        found = []
        for side in _SIDES:
            answer = getattr(row, side)
            if isinstance(row.prompt, str):
                found.append(passages_of_text(self.tokenizer, row.prompt, answer))
            else:
                kwargs = with_tools(self.config.apply_chat_template_kwargs, row.tools)
                passages = passages_of_chat(self.tokenizer, [*row.prompt, *answer], len(row.prompt), kwargs)
                found.append(self.with_pictures(passages, row, ChatPrompt(row.prompt, row.tools)))
        return found

    def beside_ids(self) -> Iterator[dict[str, Any]]:
        for index, others in zip(self.known, super().beside_ids(), strict=True):
            yield others | {"margin": self.rows[index].margin}  # None where the run has no use for margins

    def batch(self, indices: Iterable[int]) -> DataProto:
        """Return two rows per pair, chosen then rejected, with the same `uid`.

        Columns: those of `pad_answers`, `is_chosen (B,)` bool, `ref_sequence_log_prob (B,)` once the reference is
        known, `margin (B,)` for a reward model, 0 in rows without one; non-tensor `uid`, `data_source` and `index`.
        """
        chosen = list(indices)
        rows = [answer for index in chosen for answer in self.tokens[index]]
        tensors = pad_answers(rows, self.pad_id)
        tensors["is_chosen"] = torch.arange(len(rows)) % 2 == 0
        if self._reference is not None:
            tensors["ref_sequence_log_prob"] = known_reference(self._reference[chosen], chosen).reshape(-1)
        if isinstance(self.config, ScoredPairDataConfig):
            margins = [self.rows[index].margin or 0.0 for index in chosen]
            tensors["margin"] = torch.tensor(margins).repeat_interleave(2)
        return self.as_proto(tensors, [index for index in chosen for _ in range(2)])

    def set_reference(self, indices: Sequence[int], sums: torch.Tensor) -> None:
        """Store the reference's log-probs of some pairs, summed over trained tokens: (B,), in the order of `batch`.

        Raises:
            NonFiniteError: A sum is not finite; names the row.
        """
        require_finite_reference(sums.reshape(-1, 2), indices)
        if self._reference is None:
            self._reference = sums.new_full((len(self), 2), math.nan)
        self._reference[list(indices)] = sums.reshape(-1, 2)

    def first_prompt(self) -> ChatPrompt | None:
        """Return the first row's prompt; None if it is plain text."""
        rows = (self.rows[index] for index in self.known)
        return next((ChatPrompt(row.prompt, row.tools) for row in rows if not isinstance(row.prompt, str)), None)


def require_finite_reference(sums: torch.Tensor, indices: Sequence[int]) -> None:
    """Refuse log-probs of the reference (N, 2) that are not finite.

    Raises:
        NonFiniteError: Names the row.
    """
    lost = (~torch.isfinite(sums)).nonzero().tolist()
    if lost:
        row, value = indices[lost[0][0]], float(sums[tuple(lost[0])])
        raise NonFiniteError(
            f"the reference gives an answer of row {row} the log-prob {value}: look at this row, and compute the "
            "reference in a wider dtype (model.fsdp_config.dtype)"
        )


def known_reference(reference: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Return the reference's log-probs of these rows (N, 2), or refuse if any is missing."""
    unknown = reference[:, 0].isnan().nonzero().flatten().tolist()
    if unknown:
        raise ValueError(
            f"the reference's log-probs of row {indices[unknown[0]]} were not computed, only those of the rows that "
            "the order visits up to the last step; a trainer that draws other rows must compute them before it starts"
        )
    return reference
