"""The data set of prompts to train or validate on, and loading of a user's own class for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hrl.data.base import DatasetCounts, TokenisedDataset
from hrl.data.chat_template import encode_texts, render_prompt, with_tools
from hrl.data.files import DatasetError
from hrl.data.rows import PromptRow, check_prompt
from hrl.data.user_file import UserFileError, load_user_file
from hrl.protocol import DataProto

if TYPE_CHECKING:
    from hrl.config.data import CustomClassConfig, DataConfig

__all__ = ["DatasetCounts", "DatasetError", "RLHFDataset", "collate_fn", "dataset_class"]


class RLHFDataset(TokenisedDataset[PromptRow, str, np.ndarray]):
    """Prompts with what their reward function needs; tokens of a prompt are int32 (P,), without padding."""

    config: DataConfig

    def check(self, raw: Mapping[str, Any]) -> PromptRow | str:
        return check_prompt(raw, self.config.prompt_key, self.config.reward_fn_key)

    def render(self, row: PromptRow) -> str:
        kwargs = with_tools(self.config.apply_chat_template_kwargs, row.tools)
        return render_prompt(self.tokenizer, row.messages, kwargs)

    def encode(self, rendered: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, dtype=np.int32) for ids in encode_texts(self.tokenizer, rendered)]

    def length(self, tokens: np.ndarray) -> int:
        return len(tokens)

    def fit(self, tokens: np.ndarray) -> np.ndarray | None:
        limit = self.config.max_prompt_length
        if len(tokens) <= limit:
            return tokens
        if self.config.filter_overlong_prompts or self.config.truncation == "error":
            return None
        return tokens[-limit:] if self.config.truncation == "left" else tokens[:limit]

    def too_long(self) -> tuple[str, str] | None:
        if self.config.filter_overlong_prompts:
            return None
        return (
            f"prompts are longer than data.max_prompt_length={self.config.max_prompt_length}",
            "raise it, or set data.filter_overlong_prompts=True to drop them, or data.truncation=left or right to cut "
            "them",
        )

    def all_ids(self) -> Iterable[np.ndarray]:
        return self.tokens

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one prompt: `input_ids`, `attention_mask`, `position_ids`, int64 (P,), left-padded; and its row.

        `raw_prompt` is the chat, `raw_prompt_ids` its tokens without padding, `tools` the functions it offers (or
        None), `index` the row's number in this data set.
        """
        row, ids = self.rows[index], self.tokens[index]
        padded = self._left_padded([index])
        return {
            "input_ids": padded["prompts"][0],
            "attention_mask": padded["attention_mask"][0],
            "position_ids": padded["position_ids"][0],
            "raw_prompt_ids": ids.tolist(),
            "tools": row.tools,
            **_belongings(row, index % len(self.rows)),
        }

    def batch(self, indices: Iterable[int]) -> DataProto:
        """Return a batch of prompts: `prompts`, `attention_mask`, `position_ids`, int64 (B, P); object columns (B,)."""
        chosen = list(indices)
        columns = collate_fn([_belongings(self.rows[index], index) for index in chosen])
        return DataProto.from_single_dict({**self._left_padded(chosen), **columns})

    @property
    def data_sources(self) -> tuple[str, ...]:
        """The data sources of the rows, sorted."""
        return tuple(sorted({row.data_source for row in self.rows}))

    def _left_padded(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        shape = (len(indices), self.config.max_prompt_length)
        prompts = np.full(shape, self.pad_id, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.int64)
        for position, index in enumerate(indices):
            ids = self.tokens[index]
            start = self.config.max_prompt_length - len(ids)
            prompts[position, start:] = ids
            mask[position, start:] = 1
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)
        columns = {"prompts": prompts, "attention_mask": mask, "position_ids": positions}
        return {name: torch.from_numpy(column) for name, column in columns.items()}


def _belongings(row: PromptRow, index: int) -> dict[str, Any]:
    return {
        "raw_prompt": row.messages,
        "data_source": row.data_source,
        "reward_model": row.reward_model,
        "extra_info": row.extra_info,
        "index": index,
    }


def collate_fn(items: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor | np.ndarray]:
    """Stack tensors along a new first axis; everything else becomes an object array `(B,)`.

    Raises:
        ValueError: No items, or items with different keys.
    """
    if not items:
        raise ValueError("nothing to collate")
    keys = items[0].keys()
    for position, item in enumerate(items):
        if item.keys() != keys:
            raise ValueError(f"item {position} has other keys than item 0: {sorted(item.keys() ^ keys)}")
    return {key: _column([item[key] for item in items]) for key in keys}


def _column(values: list[Any]) -> torch.Tensor | np.ndarray:
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    column = np.empty(len(values), dtype=object)  # filled, not converted: numpy would make lists into a second axis
    for position, value in enumerate(values):
        column[position] = value
    return column


def dataset_class(custom_cls: CustomClassConfig) -> type[RLHFDataset]:
    """Return `RLHFDataset`, or the subclass that `data.custom_cls.{path,name}` names.

    Args:
        custom_cls: The section with the file's path, which may be null, and the class's name.

    Raises:
        DatasetError: There is no such file or class, or the class isn't a subclass of `RLHFDataset`.
    """
    if custom_cls.path is None:
        return RLHFDataset
    try:
        module = load_user_file(custom_cls.path)
    except UserFileError as error:
        raise DatasetError(f"data.custom_cls.path: {error}") from error
    except Exception as error:  # the user's own code, which may raise anything
        raise DatasetError(f"data.custom_cls.path: {custom_cls.path} raises {type(error).__name__}: {error}") from error
    found = getattr(module, custom_cls.name or "", None)
    if not (isinstance(found, type) and issubclass(found, RLHFDataset)):
        raise DatasetError(
            f"{module.__file__} defines no subclass of hrl.data.dataset.RLHFDataset named {custom_cls.name!r}"
        )
    return found
