"""The common base of data sets with given answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from hrl.data.base import TokenisedDataset
from hrl.data.offline.tokens import Answer, Passage, encode_passages
from hrl.data.rows import DataFiles, DataRow
from hrl.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.config.offline import OfflineDataConfig

R = TypeVar("R", bound=DataRow)


class Prompt(NamedTuple):
    """The context of an answer: a chat and the tools that it offers."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


class OfflineDataset(TokenisedDataset[R, list[list[Passage]], list[Answer]]):
    """Rows with their answers as tokens, one answer per row of a batch.

    Args:
        data_files, tokenizer, config, max_samples: See `TokenisedDataset`.
        stop_ids: Tokens that end an answer.
    """

    config: OfflineDataConfig

    def __init__(
        self,
        data_files: DataFiles,
        tokenizer: PreTrainedTokenizerBase,
        config: OfflineDataConfig,
        max_samples: int = -1,
        *,
        stop_ids: Sequence[int],
    ) -> None:
        self._stop_ids = stop_ids
        super().__init__(data_files, tokenizer, config, max_samples)

    @abstractmethod
    def render(self, row: R) -> list[list[Passage]]:
        """Return the texts of a row, one list of passages per row of a batch."""

    @abstractmethod
    def batch(self, indices: Iterable[int]) -> DataProto:
        """Return a batch of these rows."""

    @abstractmethod
    def first_prompt(self) -> Prompt | None:
        """Return a prompt to check the chat template with; None if all rows are plain text."""

    @property
    def sources(self) -> list[str]:
        """The data source of every row (N,)."""
        return [row.data_source for row in self.rows]

    def as_proto(self, tensors: dict[str, torch.Tensor], indices: Sequence[int]) -> DataProto:
        """Return a batch with the columns common to all rows and temperature 1 for log-probs."""
        columns = {
            "uid": [str(index) for index in indices],
            "data_source": [self.rows[index].data_source for index in indices],
            "index": list(indices),
        }
        objects = {name: np.array(values, dtype=object) for name, values in columns.items()}
        return DataProto.from_dict(tensors=tensors, non_tensors=objects, meta_info={"temperature": 1.0})

    def in_order(self, size: int) -> Iterator[DataProto]:
        """Yield the whole data set in batches of at most `size` rows."""
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))

    def encode(self, rendered: Sequence[list[list[Passage]]]) -> Iterator[list[Answer] | None]:
        encoded = iter(encode_passages(self.tokenizer, [one for texts in rendered for one in texts], self._stop_ids))
        for texts in rendered:
            found = [next(encoded) for _ in texts]
            answers = [answer for answer in found if answer is not None]
            yield answers if len(answers) == len(texts) else None

    def length(self, tokens: list[Answer]) -> int:
        return max(map(len, tokens))

    def fit(self, tokens: list[Answer]) -> list[Answer] | None:
        limit = self.config.max_length
        over = self.length(tokens) - limit
        if over <= 0:
            return tokens
        if self.config.truncation == "left":  # cut all answers by the same number, so that a pair keeps one prompt
            cut = [answer.without_beginning(over) for answer in tokens]
        elif self.config.truncation == "right":
            cut = [answer.cut_to(limit) for answer in tokens]
        else:
            return None
        fitted = [answer for answer in cut if answer is not None]
        return fitted if len(fitted) == len(tokens) else None

    def too_long(self) -> tuple[str, str] | None:
        if self.config.truncation == "drop":
            return None
        cut = {"left": ", even without their prompts", "right": ", prompts alone"}.get(self.config.truncation, "")
        return (
            f"rows are longer than data.max_length={self.config.max_length}{cut}",
            "raise it, or set data.truncation=drop to leave them out"
            + ("" if cut else ", left to cut prompts, or right to cut answers"),
        )

    def all_ids(self) -> Iterator[np.ndarray]:
        return (ids for row in self.tokens for answer in row for ids in (answer.prompt, answer.answer))
