"""Prompts to train or validate on: read, checked, rendered and tokenised once, then served from memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from jinja2 import TemplateError

from hrl.data.chat_template import ChatTemplateError, encode_texts, render_prompt, with_tools
from hrl.data.collate import collate_fn
from hrl.data.files import DatasetError
from hrl.data.fingerprint import fingerprint
from hrl.data.intake import DataFiles, DatasetCounts, Intake, sources_of
from hrl.data.rows import BadRow, Row, RowKeys, read_rows
from hrl.data.sampler import EpochOrder
from hrl.models.tokenizer import token_ids
from hrl.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DatasetConfig", "DatasetCounts", "DatasetError", "RLHFDataset"]


class DatasetConfig(Protocol):
    """What a data set reads of the configuration's `data` section; each means what it means there."""

    @property
    def prompt_key(self) -> str: ...

    @property
    def reward_fn_key(self) -> str: ...

    @property
    def max_prompt_length(self) -> int: ...

    @property
    def filter_overlong_prompts(self) -> bool: ...

    @property
    def truncation(self) -> str: ...

    @property
    def apply_chat_template_kwargs(self) -> Mapping[str, Any]: ...

    @property
    def bad_rows(self) -> str: ...

    @property
    def shuffle(self) -> bool: ...

    @property
    def seed(self) -> int: ...


class RLHFDataset:
    """Prompts with what their reward function needs.

    Args:
        data_files: One source or several, see `hrl.data.rows.read_rows`; or a list of rows.
        tokenizer: Of the policy, its chat template renders the prompts.
        config: The `data` section.
        max_samples: Stop after this many usable rows; -1 reads all.

    Raises:
        DatasetError: A bad or overlong row where the configuration doesn't say what to do with it, or no row left.
    """

    def __init__(
        self,
        data_files: DataFiles,
        tokenizer: PreTrainedTokenizerBase,
        config: DatasetConfig,
        max_samples: int = -1,
    ) -> None:
        self.max_prompt_length = config.max_prompt_length
        self.pad_id = token_ids(tokenizer).pad
        self._rows: list[Row] = []
        self._prompt_ids: list[np.ndarray] = []
        self._truncation = config.truncation
        self._filter_overlong = config.filter_overlong_prompts
        intake = Intake(data_files)
        for block in intake.blocks(_read_all(data_files, config), max_samples):
            self._take(block, tokenizer, config.apply_chat_template_kwargs, intake)
        self.counts = intake.close(
            len(self._rows),
            skip_bad=config.bad_rows == "skip",
            too_long=None if self._filter_overlong else _too_long(config),
        )
        self.order = EpochOrder(len(self._rows), seed=config.seed, shuffle=config.shuffle)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One prompt: `input_ids`, `attention_mask`, `position_ids`, int64 (P,), left-padded; and what belongs to it.

        `raw_prompt` is the chat, `raw_prompt_ids` its tokens without padding, `tools` the functions it offers (or
        None), `index` the row's number in this data set.
        """
        row, ids = self._rows[index], self._prompt_ids[index]
        padded = self._left_padded([index])
        return {
            "input_ids": padded["prompts"][0],
            "attention_mask": padded["attention_mask"][0],
            "position_ids": padded["position_ids"][0],
            "raw_prompt_ids": ids.tolist(),
            "tools": row.tools,
            **_belongings(row, index % len(self._rows)),
        }

    def batch(self, indices: Iterable[int]) -> DataProto:
        """Return the prompts of a step.

        `prompts`, `attention_mask`, `position_ids`, int64 (B, P), and object columns (B,).
        """
        chosen = list(indices)
        columns = collate_fn([_belongings(self._rows[index], index) for index in chosen])
        return DataProto.from_single_dict({**self._left_padded(chosen), **columns})

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Which rows these are and in which order they come; see `hrl.data.fingerprint`."""
        return fingerprint(self.order, self._prompt_ids)

    @property
    def checked_rows(self) -> Sequence[Row]:
        """The rows that are used, in their order."""
        return self._rows

    @property
    def prompt_lengths(self) -> np.ndarray:
        """Tokens of every prompt, int64 (N,)."""
        return np.array([len(ids) for ids in self._prompt_ids], dtype=np.int64)

    @property
    def data_sources(self) -> tuple[str, ...]:
        """The data sources of the rows, sorted."""
        return tuple(sorted({row.data_source for row in self._rows}))

    def require_rows(self, needed: int, purpose: str) -> None:
        """Refuse a data set that is too small for its purpose.

        Args:
            needed: Rows.
            purpose: What needs them, with the configuration key, e.g. `"one batch (data.train_batch_size)"`.

        Raises:
            DatasetError: With the counts of what was read, left out, kept and needed.
        """
        if len(self) < needed:
            raise DatasetError(f"too few rows for {purpose}: {self.counts}, {needed} needed")

    def _take(
        self, block: list[Row], tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any], intake: Intake
    ) -> None:
        """Render and tokenises rows and keep those that the chat template accepts and that fit."""
        rendered = []
        for row in block:
            try:
                rendered.append((row, render_prompt(tokenizer, row.messages, with_tools(kwargs, row.tools))))
            except (TemplateError, ChatTemplateError) as error:
                intake.bad.append(BadRow(row.origin, f"can't be rendered: {error}"))
        encoded = encode_texts(tokenizer, [text for _, text in rendered])
        for (row, _), ids in zip(rendered, encoded, strict=True):
            fitted = self._fitted(ids)
            if fitted is None:
                intake.too_long.append(f"{row.origin} ({len(ids)} tokens)")
                continue
            intake.truncated += len(fitted) < len(ids)
            self._rows.append(row)
            self._prompt_ids.append(np.array(fitted, dtype=np.int32))

    def _fitted(self, ids: list[int]) -> list[int] | None:
        """Return the prompt, cut where the configuration says so; `None` if it is too long and not to be cut."""
        limit = self.max_prompt_length
        if len(ids) <= limit:
            return ids
        if self._filter_overlong or self._truncation == "error":
            return None
        return ids[-limit:] if self._truncation == "left" else ids[:limit]

    def _left_padded(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        shape = (len(indices), self.max_prompt_length)
        prompts = np.full(shape, self.pad_id, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.int64)
        for position, index in enumerate(indices):
            ids = self._prompt_ids[index]
            start = self.max_prompt_length - len(ids)
            prompts[position, start:] = ids
            mask[position, start:] = 1
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)
        columns = {"prompts": prompts, "attention_mask": mask, "position_ids": positions}
        return {name: torch.from_numpy(column) for name, column in columns.items()}


def _belongings(row: Row, index: int) -> dict[str, Any]:
    return {
        "raw_prompt": row.messages,
        "data_source": row.data_source,
        "reward_model": row.reward_model,
        "extra_info": row.extra_info,
        "index": index,
    }


def _read_all(data_files: DataFiles, config: DatasetConfig) -> Iterator[Row | BadRow]:
    keys = RowKeys(prompt=config.prompt_key, data_source=config.reward_fn_key)
    for source in sources_of(data_files):
        yield from read_rows(source, keys)


def _too_long(config: DatasetConfig) -> tuple[str, str]:
    """Return what a prompt is that does not fit, and what can be done."""
    return (
        f"prompts are longer than data.max_prompt_length={config.max_prompt_length}",
        "raise it, or set data.filter_overlong_prompts=True to drop them, or data.truncation=left or right to cut them",
    )
