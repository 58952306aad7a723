"""Prompts to train or validate on: what a row needs, the data set, and loading of a user's own class for it.

A row is a dict with a `prompt` (a chat, or a string) and whatever its reward function needs: an `answer`, or any other
columns. verl's keys mean what they mean there: `data_source` (str), `reward_model` (`{"style": …, "ground_truth": …}`)
and `extra_info` (a dict); `tools` (JSON schemas of functions) are for a chat template that shows them. Rows with
answers to learn from are described in `hrl.data.offline`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from hrl.columns import object_column
from hrl.data.chat import as_messages, chat_of_text, encode_texts, render_prompt, tools_of, with_tools, wrong_value
from hrl.data.order import digest_of
from hrl.data.picture_files import holds_pixels
from hrl.data.pictures import PictureTokens, take_pictures
from hrl.data.sources import GROUND_TRUTH, DataRow, show_value
from hrl.data.tokenised_dataset import TokenisedDataset
from hrl.errors import DatasetError
from hrl.processes.plain_data import to_plain
from hrl.protocol import DataProto
from hrl.user_file import UserFileError, load_user_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.config.data import CustomClassConfig, DataConfig


ANSWER = "answer"
"""Column of the ground truth in rows without `reward_model.ground_truth` and without a column `ground_truth`."""
IMAGES, VIDEOS = "images", "videos"
"""Columns of pictures and of videos, unless the configuration names others."""
MESSAGES = "messages"
"""Column of a whole chat, in rows without a prompt; a reply at its end is no part of the prompt, but the answer."""


@dataclass(frozen=True, kw_only=True)
class PromptRow(DataRow):
    """One prompt with what its reward function needs.

    Attributes:
        messages: The prompt as a chat; a string prompt is one message of the user. Each has a role, a content, and
            other fields for the chat template, such as `tool_calls`.
        reward_model: `ground_truth` and other values for the reward function; empty if the row has none.
        extra_info: Further values for the reward function.
        columns: Every other column of the row that can be handed to another process, as it was read; `reward_model`
            without its ground truth.
        left_out: For each column that can't be handed to another process its name and why.
        tools: Schemas of the functions that the prompt offers; None for none.
    """

    messages: list[dict[str, Any]]
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]
    columns: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[tuple[str, str], ...] = ()
    tools: list[dict[str, Any]] | None = None


def check_prompt(
    raw: Mapping[str, Any],
    prompt_key: str,
    answer_key: str | None = None,
    *,
    image_key: str | None = IMAGES,
    video_key: str | None = VIDEOS,
) -> PromptRow | str:
    """Check a raw row; return a prompt, or a sentence about what is wrong with the row.

    Args:
        raw: The row.
        prompt_key: Column of the prompt (`data.prompt_key`). Rows without it may have `messages`, a whole chat.
        answer_key: Column of the right answer (`data.answer_key`); None takes `reward_model.ground_truth`, or else the
            column `ground_truth` or `answer`.
        image_key: Column of its pictures (`data.image_key`); None shows none.
        video_key: Column of its videos (`data.video_key`); None shows none.
    """
    prompt, reply = _prompt_of(raw, prompt_key)
    messages = as_messages(prompt, prompt_key, pictures=True)
    if isinstance(messages, str):
        return messages
    placed = take_pictures(raw, messages, image_key, video_key)
    if isinstance(placed, str):
        return placed
    messages, images = placed
    tools = tools_of(raw)
    if isinstance(tools, str):
        return tools
    data_source = raw.get("data_source")
    wrong = wrong_value(data_source, "data_source")
    if wrong is not None:
        return wrong
    if data_source is not None and (not isinstance(data_source, str) or not data_source):
        return f"'data_source' is {show_value(data_source)}, expected a non-empty string (or no such column)"
    columns: dict[str, Any] = {}
    left_out = []
    for name, value in raw.items():
        if images and name in (image_key, video_key, prompt_key, MESSAGES) and holds_pixels(value):
            continue
        try:
            to_plain(value, name)
        except ValueError as error:
            if name in _OBJECTS:
                return wrong_value(value, name, is_text=False) or str(error)
            if name == answer_key:
                return f"{error} (data.answer_key)"
            if images and name in (image_key, video_key, prompt_key, MESSAGES):
                continue
            left_out.append((str(name), str(error).partition(";")[0]))  # such as the bytes of a picture
            continue
        columns[str(name)] = value
    objects: dict[str, dict[str, Any]] = {}
    for name in _OBJECTS:
        value = columns.pop(name, None)
        if value is not None and not isinstance(value, Mapping):
            return f"{name!r} is {show_value(value)}, expected an object (null, or no such column, for none)"
        objects[name] = dict(value or {})
    columns.pop("data_source", None)
    reward_model = objects["reward_model"]
    if reward_model:  # a function that names it gets it back with its ground truth, which goes only once
        columns["reward_model"] = {name: value for name, value in reward_model.items() if name != GROUND_TRUTH}
    if answer_key is not None:
        if columns.get(answer_key) is None:
            return f"{answer_key!r} is missing or null (data.answer_key)"
        reward_model[GROUND_TRUTH] = columns[answer_key]
        columns[ANSWER] = columns[answer_key]
    else:
        columns.setdefault(ANSWER, reply)
        if columns[ANSWER] is None:
            del columns[ANSWER]
        given = (reward_model.get(GROUND_TRUTH), columns.get(GROUND_TRUTH), columns.get(ANSWER))
        truth = next((value for value in given if value is not None), None)
        if truth is not None:
            reward_model[GROUND_TRUTH] = truth
    return PromptRow(
        data_source=data_source or "",
        messages=messages,
        reward_model=reward_model,
        extra_info=objects["extra_info"],
        columns=columns,
        left_out=tuple(left_out),
        tools=tools,
        images=images,
    )


_OBJECTS = ("reward_model", "extra_info")
"""Columns that hold objects, which the row has as attributes."""


def _prompt_of(raw: Mapping[str, Any], prompt_key: str) -> tuple[object, str | None]:
    """Return the prompt of a row, and the reply that follows it where the row is a whole chat."""
    chat = chat_of_text(raw.get(MESSAGES))
    has_prompt = prompt_key != MESSAGES and raw.get(prompt_key) is not None
    if has_prompt or not isinstance(chat, Sequence) or isinstance(chat, str) or not chat:
        return raw.get(prompt_key), None
    last = chat[-1]
    if len(chat) > 1 and isinstance(last, Mapping) and last.get("role") == "assistant":
        return chat[:-1], last["content"] if isinstance(last.get("content"), str) else None
    return chat, None


class RLHFDataset(TokenisedDataset[PromptRow, str, np.ndarray]):
    """Prompts with what their reward function needs; tokens of a prompt are int32 (P,), without padding."""

    config: DataConfig

    def check(self, raw: Mapping[str, Any]) -> PromptRow | str:
        data = self.config
        return check_prompt(raw, data.prompt_key, data.answer_key, image_key=data.image_key, video_key=data.video_key)

    def of_prompts(self, rows: Sequence[Mapping[str, Any]]) -> Self:
        """Return a data set of prompts that are only answered, which may lack answer and mapped columns.

        Raises:
            DatasetError: None can be used.
        """
        columns = {
            ours: theirs for ours, theirs in self.config.map.items() if any(theirs.split(".")[0] in row for row in rows)
        }
        config = self.config.model_copy(update={"answer_key": None, "map": columns})
        return type(self)(rows, self.tokenizer, config)

    def render(self, row: PromptRow) -> str:
        return render_with_pictures(self.tokenizer, self.config, row, self._pictures)

    def shape(self, row: PromptRow) -> str:
        is_text = len(row.messages) == 1 and row.messages[0]["role"] == "user"
        beside = [name for name, has in (("pictures", row.images), ("tools", row.tools)) if has]
        return ("single questions" if is_text else "chats") + (f" with {' and '.join(beside)}" if beside else "")

    def shown(self, row: PromptRow) -> str:
        return render_row(self.tokenizer, self.config, row)

    def encode(self, rendered: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, dtype=np.int32) for ids in encode_texts(self.tokenizer, rendered)]

    def length(self, tokens: np.ndarray) -> int:
        return len(tokens)

    def fit(self, tokens: np.ndarray) -> np.ndarray | None:
        fitted = fitting(self.config, tokens)
        if fitted is not None and fitted is not tokens and self.sees and self._pictures.shows(tokens):
            return None  # a picture is not cut
        return fitted

    def too_long(self) -> tuple[str, str] | None:
        if self.config.filter_overlong_prompts:
            return None
        return (
            f"prompts are longer than data.max_prompt_length={self.config.max_prompt_length}",
            "raise it, or set data.filter_overlong_prompts=True to drop them, or data.truncation=left or right to cut "
            "those without pictures",
        )

    def all_ids(self) -> Iterable[np.ndarray]:
        return (self.tokens[index] for index in self.known)

    def beside_ids(self) -> Iterator[dict[str, Any]]:
        for row in (self.rows[index] for index in self.known):
            given = {"data_source": row.data_source, "extra_info": row.extra_info, **row.columns}
            shown = {IMAGES: [picture.identity for picture in row.images]} if row.images else {}
            yield {name: to_plain(value) for name, value in given.items()} | shown

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
        columns = collate_fn([_belongings(self.rows[index], index) for index in chosen]) | self.shown_by(chosen)
        return DataProto.from_single_dict({**self._left_padded(chosen), **columns})

    def prompt_ids(self, index: int) -> np.ndarray:
        return self.tokens[index]

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Identity of the rows, of what they hand to their reward function, of their right answers and their order."""
        truths = (to_plain(self.rows[index].reward_model.get(GROUND_TRUTH)) for index in self.known)
        return {**super().fingerprint, "answers": digest_of(truths)}

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that rows have, as they can be handed to a reward function, sorted."""
        return columns_handed_on(self.rows[index] for index in self.known)

    @property
    def left_out(self) -> dict[str, str]:
        """The columns that can't be handed to a reward function, each with why."""
        return columns_left_out(self.rows[index] for index in self.known)

    @property
    def data_sources(self) -> tuple[str, ...]:
        """The data sources of the rows, sorted."""
        return tuple(sorted({self.rows[index].data_source for index in self.known}))

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


def render_row(tokenizer: PreTrainedTokenizerBase, config: DataConfig, row: PromptRow) -> str:
    """Return the text of a row's prompt, with its tools."""
    return render_prompt(tokenizer, row.messages, with_tools(config.apply_chat_template_kwargs, row.tools))


def render_with_pictures(
    tokenizer: PreTrainedTokenizerBase, config: DataConfig, row: PromptRow, pictures: PictureTokens
) -> str:
    """Return the text of a row's prompt with as many tokens as its pictures and videos take.

    Raises:
        ChatTemplateError: The template shows another number of them, or the prompt spells a token of theirs.
        DatasetError: The model does not see.
        ValueError: The model's processor takes none of such a shape.
    """
    text = render_row(tokenizer, config, row)
    if not row.images:
        return text
    pictures.require_unspelled(row.messages, row.tools)
    return pictures.spread(text, row.images)


def fitting(config: DataConfig, tokens: np.ndarray) -> np.ndarray | None:
    """Return the tokens of a prompt, cut if they are too many; None where such a prompt is dropped or refused."""
    limit = config.max_prompt_length
    if len(tokens) <= limit:
        return tokens
    if config.filter_overlong_prompts or config.truncation == "error":
        return None
    return tokens[-limit:] if config.truncation == "left" else tokens[:limit]


def columns_handed_on(rows: Iterable[PromptRow]) -> tuple[str, ...]:
    """Return the columns of rows that a reward function may take by name, sorted."""
    return tuple(sorted({name for row in rows for name in row.columns}))


def columns_left_out(rows: Iterable[PromptRow]) -> dict[str, str]:
    """Return the columns of rows that can't be handed to another process, each with why."""
    return {name: why for row in rows for name, why in row.left_out}


def columns_of_rows(datasets: Iterable[RLHFDataset]) -> tuple[str, ...]:
    """Return the columns that rows of any of these data sets have, sorted."""
    return tuple(sorted({name for rows in datasets for name in rows.columns}))


def _belongings(row: PromptRow, index: int) -> dict[str, Any]:
    return {
        "raw_prompt": row.messages,
        "data_source": row.data_source,
        "reward_model": row.reward_model,
        "extra_info": row.extra_info,
        "columns": row.columns,
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
    columns = {key: [item[key] for item in items] for key in keys}
    return {
        key: torch.stack(values) if isinstance(values[0], torch.Tensor) else object_column(values)
        for key, values in columns.items()
    }


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
