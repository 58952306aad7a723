"""The base of all data sets: read, check, render, tokenise and truncate rows once, then serve them from memory."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from hrl.data.chat import RENDERING_ERRORS, ChatTemplateError
from hrl.data.order import EpochOrder, fingerprint
from hrl.data.sources import BadRow, DataFiles, DataRow, Source, read_rows, sources_of
from hrl.errors import DatasetError
from hrl.models.tokenizer import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.config.data import DataConfig
    from hrl.config.offline import OfflineDataConfig

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1024
_BAD_ROWS_SHOWN = 5

R = TypeVar("R", bound=DataRow)
X = TypeVar("X")
T = TypeVar("T")
Item = TypeVar("Item")


@dataclass(frozen=True)
class DatasetCounts:
    """How many rows were read, left out, truncated and kept."""

    read: int
    bad: int
    too_long: int
    truncated: int
    kept: int

    def __str__(self) -> str:
        return (
            f"{self.read} rows read, {self.bad} bad, {self.too_long} too long, {self.truncated} truncated, "
            f"{self.kept} kept"
        )


class Intake:
    """Keeps account of bad, overlong and truncated rows while a data set is read.

    Args:
        sources: Sources of the rows, for messages.

    Attributes:
        bad: Rows that can't be used.
        too_long: File, row and number of tokens of each row that doesn't fit.
        truncated: Number of rows that were truncated.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        self.bad: list[BadRow] = []
        self.too_long: list[str] = []
        self.truncated = 0
        names = [source for source in sources if isinstance(source, str)]
        self._name = ", ".join(names) or "the list of rows"

    def blocks(self, rows: Iterable[Item | BadRow], max_samples: int) -> Iterator[list[Item]]:
        """Yield the usable rows in blocks, at most `max_samples` in total (-1: all), and put the others into `bad`."""
        usable = islice(self._sort_out(rows), max_samples if max_samples >= 0 else None)
        while block := list(islice(usable, _ROWS_AT_ONCE)):
            yield block

    def _sort_out(self, rows: Iterable[Item | BadRow]) -> Iterator[Item]:
        for row in rows:
            if isinstance(row, BadRow):
                self.bad.append(row)
            else:
                yield row

    def close(self, kept: int, *, skip_bad: bool, too_long: tuple[str, str] | None) -> DatasetCounts:
        """Return the counts, or refuse the rows.

        Args:
            kept: Number of rows that the data set has.
            skip_bad: Whether bad rows are left out (`data.bad_rows=skip`).
            too_long: For the error about overlong rows, how they are too long and what to do; None if they are left
                out.

        Raises:
            DatasetError: A row is bad or too long and must not be left out, or no row is left.
        """
        shown = "; ".join(f"{row.origin}: {row.reason}" for row in self.bad[:_BAD_ROWS_SHOWN])
        if self.bad and not skip_bad:
            raise DatasetError(f"{len(self.bad)} bad rows (data.bad_rows=skip leaves them out): {shown}")
        if self.too_long and too_long is not None:
            what, way_out = too_long
            raise DatasetError(f"{len(self.too_long)} {what}, the first {self.too_long[0]}: {way_out}")
        bad, over = len(self.bad), len(self.too_long)
        counts = DatasetCounts(kept + bad + over, bad, over, self.truncated, kept)
        if not kept:
            raise DatasetError(f"no row to use in {self._name}: {counts}" + (f" ({shown})" if bad else ""))
        if bad:
            logger.warning("%s: skipped %d bad rows: %s", self._name, bad, shown)
        logger.info("%s: %s", self._name, counts)
        return counts


class TokenisedDataset(ABC, Generic[R, X, T]):
    """Checked rows of type R, rendered as texts of type X, with their tokens, of type T.

    Args:
        data_files: One source or the names of several, see `hrl.data.sources.Source`.
        tokenizer: Tokenizer of the trained model; its chat template renders the rows.
        config: The `data` section.
        max_samples: Stop after this many usable rows; -1 reads all.

    Attributes:
        rows: The checked rows that are kept.
        tokens: The tokens of each row.
        pad_id: Id of the padding token.
        counts: Counts of rows read, left out, truncated and kept.
        order: The order of the rows, epoch by epoch.

    Raises:
        DatasetError: A row is bad or too long and the configuration doesn't allow to leave it out, or no row is left.
    """

    def __init__(
        self,
        data_files: DataFiles,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig | OfflineDataConfig,
        max_samples: int = -1,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.pad_id = token_ids(tokenizer).pad
        self.rows: list[R] = []
        self.tokens: list[T] = []
        sources = sources_of(data_files)
        intake = Intake(sources)
        for block in intake.blocks(read_rows(sources, self.check), max_samples):
            self._take(block, intake)
        self.counts = intake.close(len(self.rows), skip_bad=config.bad_rows == "skip", too_long=self.too_long())
        self.order = EpochOrder(len(self.rows), seed=config.seed, shuffle=config.shuffle)

    # ------------------------------------------------------------------ defined by each data set

    @abstractmethod
    def check(self, raw: Mapping[str, Any]) -> R | str:
        """Check a raw row; return the checked one, or a sentence about what is wrong with it."""

    @abstractmethod
    def render(self, row: R) -> X:
        """Return the texts of a row for `encode`.

        Raises:
            ChatTemplateError, jinja2.TemplateError, TypeError, ValueError: The chat template refuses the row.
        """

    @abstractmethod
    def encode(self, rendered: Sequence[X]) -> Iterable[T | None]:
        """Return the tokens of several rows; None for a row that lacks a prompt or an answer."""

    @abstractmethod
    def fit(self, tokens: T) -> T | None:
        """Return the tokens, truncated if the configuration says so; None if the row is too long."""

    @abstractmethod
    def length(self, tokens: T) -> int:
        """Return the number of tokens that counts against the length limit."""

    @abstractmethod
    def too_long(self) -> tuple[str, str] | None:
        """Return how overlong rows are too long and what to do, for the error; None if they are left out."""

    @abstractmethod
    def all_ids(self) -> Iterable[np.ndarray]:
        """Return the token ids of all rows, in their stored order."""

    # ------------------------------------------------------------------ common to all data sets

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Identity of the rows and of their order; see `hrl.data.order.fingerprint`."""
        return fingerprint(self.order, self.all_ids())

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every row that count against the length limit, int64 (N,)."""
        return np.array([self.length(tokens) for tokens in self.tokens], dtype=np.int64)

    def _take(self, block: list[R], intake: Intake) -> None:
        """Render and tokenise rows, and keep those that the chat template accepts and that fit."""
        rendered = []
        for row in block:
            try:
                rendered.append((row, self.render(row)))
            except ChatTemplateError as error:
                intake.bad.append(BadRow(row.origin, str(error)))
            except RENDERING_ERRORS as error:
                intake.bad.append(BadRow(row.origin, f"can't be rendered: {error}"))
        encoded = self.encode([texts for _, texts in rendered])
        for (row, _), tokens in zip(rendered, encoded, strict=True):
            if tokens is None:
                intake.bad.append(BadRow(row.origin, "has an answer without a token, or no prompt before it"))
                continue
            fitted = self.fit(tokens)
            if fitted is None:
                intake.too_long.append(f"{row.origin} ({self.length(tokens)} tokens)")
                continue
            intake.truncated += fitted is not tokens
            self.rows.append(row)
            self.tokens.append(fitted)
