"""What every data set of answers does: read, check, tokenise and fit its rows once, and serve them from memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from jinja2 import TemplateError

from hrl.data.chat_template import ChatTemplateError
from hrl.data.files import DatasetError
from hrl.data.fingerprint import fingerprint
from hrl.data.intake import DataFiles, Intake, sources_of
from hrl.data.offline.tokens import Answer, Passage, encode_passages
from hrl.data.rows import BadRow, raw_rows, source_name
from hrl.data.sampler import EpochOrder
from hrl.models.tokenizer import token_ids
from hrl.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

R = TypeVar("R")


class OfflineDatasetConfig(Protocol):
    """What a data set reads of the configuration's `data` section; each means what it means there."""

    @property
    def data_source_key(self) -> str: ...

    @property
    def max_length(self) -> int: ...

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


class Prompt(NamedTuple):
    """What comes before an answer: a chat, and the functions that it offers."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


class OfflineDataset(ABC, Generic[R]):
    """Rows with their tokens.

    Args:
        data_files: One source or several, see `hrl.data.rows.read_rows`; or a list of rows.
        tokenizer: Of the model that is trained, its chat template renders the rows.
        config: The `data` section.
        max_samples: Stop after this many usable rows; -1 reads all.
        stop_ids: Tokens that end an answer.

    Attributes:
        rows: The checked rows that are kept.
        answers: Per row its tokens, one entry per row of a batch.
        counts: What became of the rows that were read.
        order: The order of the rows, epoch by epoch.

    Raises:
        DatasetError: A bad or overlong row where the configuration doesn't say what to do with it, or no row left.
    """

    def __init__(
        self,
        data_files: DataFiles,
        tokenizer: PreTrainedTokenizerBase,
        config: Any,
        max_samples: int = -1,
        *,
        stop_ids: Sequence[int],
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.pad_id = token_ids(tokenizer).pad
        self.rows: list[R] = []
        self.answers: list[list[Answer]] = []
        self._sources: list[str] = []
        self._stop_ids = stop_ids
        intake = Intake(data_files)
        for block in intake.blocks(self._checked(data_files), max_samples):
            self._take(block, intake)
        self.counts = intake.close(len(self.rows), skip_bad=config.bad_rows == "skip", too_long=_too_long(config))
        self.order = EpochOrder(len(self.rows), seed=config.seed, shuffle=config.shuffle)

    # ------------------------------------------------------------------ what a data set is

    @abstractmethod
    def check(self, raw: Mapping[str, Any]) -> R | str:
        """Return a raw row as a checked one, or a sentence about what is wrong with it."""

    @abstractmethod
    def passages(self, row: R) -> list[list[Passage]]:
        """Return the texts of a row, one list of passages per row of a batch."""

    @abstractmethod
    def batch(self, indices: Iterable[int]) -> DataProto:
        """Return the rows of a step."""

    @abstractmethod
    def first_prompt(self) -> Prompt | None:
        """Return a prompt that the template can be checked on; None where there is only plain text."""

    # ------------------------------------------------------------------ what all of them do

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Which rows these are and in which order they come; see `hrl.data.fingerprint`."""
        answers = (answer for row in self.answers for answer in row)
        return fingerprint(self.order, (ids for answer in answers for ids in (answer.prompt, answer.answer)))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every row's longest answer with its prompt, int64 (N,)."""
        return np.array([max(map(len, answers)) for answers in self.answers], dtype=np.int64)

    @property
    def sources(self) -> list[str]:
        """The data source of every row (N,)."""
        return list(self._sources)

    def as_proto(self, tensors: dict[str, torch.Tensor], indices: Sequence[int]) -> DataProto:
        """Return a batch with the columns that every row has; log-probs are those of the plain distribution."""
        columns = {
            "uid": [str(index) for index in indices],
            "data_source": [self._sources[index] for index in indices],
            "index": list(indices),
        }
        objects = {name: np.array(values, dtype=object) for name, values in columns.items()}
        return DataProto.from_dict(tensors=tensors, non_tensors=objects, meta_info={"temperature": 1.0})

    def in_order(self, size: int) -> Iterator[DataProto]:
        """Yield the whole data set, in batches of at most `size` rows."""
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))

    def require_rows(self, needed: int, purpose: str) -> None:
        """Refuse a data set that is too small for its purpose; see `RLHFDataset.require_rows`."""
        if len(self) < needed:
            raise DatasetError(f"too few rows for {purpose}: {self.counts}, {needed} needed")

    # ------------------------------------------------------------------ reading

    def _checked(self, data_files: DataFiles) -> Iterator[tuple[R, str, str] | BadRow]:
        """Checked rows with their source and origin, and bad ones."""
        for source in sources_of(data_files):
            for origin, raw in raw_rows(source):
                if isinstance(raw, BadRow):
                    yield raw
                elif not isinstance(raw, Mapping):
                    yield BadRow(origin, f"is a {type(raw).__name__}, expected an object")
                else:
                    row = self.check(raw)
                    name = str(raw.get(self.config.data_source_key) or source_name(source))
                    yield BadRow(origin, row) if isinstance(row, str) else (row, name, origin)

    def _take(self, block: list[tuple[R, str, str]], intake: Intake) -> None:
        rendered = []
        for row, source, origin in block:
            try:
                rendered.append((row, source, origin, self.passages(row)))
            except (TemplateError, ChatTemplateError) as error:
                intake.bad.append(BadRow(origin, str(error)))
        flat = [passages for *_, texts in rendered for passages in texts]
        encoded = iter(encode_passages(self.tokenizer, flat, self._stop_ids))
        for row, source, origin, texts in rendered:
            found = [next(encoded) for _ in texts]
            answers = [answer for answer in found if answer is not None]
            if len(answers) < len(texts):
                intake.bad.append(BadRow(origin, "has an answer without a token, or no prompt before it"))
                continue
            fitted = self._fit(answers)
            if fitted is None:
                intake.too_long.append(f"{origin} ({max(map(len, answers))} tokens)")
                continue
            intake.truncated += sum(map(len, fitted)) < sum(map(len, answers))
            self.rows.append(row)
            self.answers.append(fitted)
            self._sources.append(source)

    def _fit(self, answers: list[Answer]) -> list[Answer] | None:
        """Return what of a row goes into `max_length` tokens as `truncation` says; None if it doesn't.

        Of the answers of a pair the same number of the prompt's tokens is cut, so that they keep one prompt.
        """
        limit = self.config.max_length
        over = max(map(len, answers)) - limit
        if over <= 0:
            return answers
        if self.config.truncation == "left":
            cut = [answer.without_beginning(over) for answer in answers]
        elif self.config.truncation == "right":
            cut = [answer.cut_to(limit) for answer in answers]
        else:
            return None
        fitted = [answer for answer in cut if answer is not None]
        return fitted if len(fitted) == len(answers) else None


def _too_long(config: OfflineDatasetConfig) -> tuple[str, str] | None:
    """Return what a row is that does not fit, and what can be done; None where it is left out."""
    if config.truncation == "drop":
        return None
    cut = {"left": ", even without their prompts", "right": ", prompts alone"}.get(config.truncation, "")
    return (
        f"rows are longer than data.max_length={config.max_length}{cut}",
        "raise it, or set data.truncation=drop to leave them out"
        + ("" if cut else ", left to cut prompts, or right to cut answers"),
    )
