"""The base of all data sets: rows are read, checked, rendered, tokenised and truncated.

That happens once, and the rows are served from memory; or, with a source that is streamed, when a row is drawn
(`hrl.data.streamed`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np

from hrl.columns import object_column
from hrl.data.chat import RENDERING_ERRORS, ChatTemplateError
from hrl.data.files import BadRow
from hrl.data.order import EpochOrder, MixedOrder, Position, fingerprint, whole_shares
from hrl.data.pictures import PictureTokens, passed_over
from hrl.data.sources import DataFiles, DataRow, checked_row, open_table, read_rows, sources_of
from hrl.data.streamed import Column, StreamedRows
from hrl.errors import DatasetError
from hrl.models.tokenizer import token_ids
from hrl.pictures import MULTI_MODAL_DATA, Picture, Shown, VideoSource

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
        titles: Names of the rows' sources, for messages.

    Attributes:
        bad: The first rows that can't be used; `num_bad` counts all.
        too_long: File, row and number of tokens of the first rows that don't fit; `num_too_long` counts all.
        truncated: Number of rows that were truncated.
    """

    def __init__(self, titles: Iterable[str]) -> None:
        self.bad: list[BadRow] = []
        self.too_long: list[str] = []
        self.num_bad = self.num_too_long = self.truncated = 0
        self._name = ", ".join(titles)

    def blocks(self, rows: Iterable[Item | BadRow], max_samples: int) -> Iterator[list[Item]]:
        """Yield the usable rows in blocks, at most `max_samples` in total (-1: all), and take note of the others."""
        usable = islice(self._sort_out(rows), max_samples if max_samples >= 0 else None)
        while block := list(islice(usable, _ROWS_AT_ONCE)):
            yield block

    def leave_out(self, row: BadRow) -> None:
        """Take note of a row that can't be used."""
        self.num_bad += 1
        if len(self.bad) < _BAD_ROWS_SHOWN:
            self.bad.append(row)

    def leave_out_overlong(self, row: str) -> None:
        """Take note of a row that doesn't fit, by file, row and number of tokens."""
        self.num_too_long += 1
        if not self.too_long:
            self.too_long.append(row)

    def _sort_out(self, rows: Iterable[Item | BadRow]) -> Iterator[Item]:
        for row in rows:
            if isinstance(row, BadRow):
                self.leave_out(row)
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
        self.refuse(skip_bad=skip_bad, too_long=too_long)
        shown, counts = self._shown_bad(), self.counts(kept)
        bad = counts.bad
        if not kept:
            raise DatasetError(f"no row to use in {self._name}: {counts}" + (f" ({shown})" if bad else ""))
        if bad:
            logger.warning("%s: skipped %d bad rows: %s", self._name, bad, shown)
        logger.info("%s: %s", self._name, counts)
        return counts

    def counts(self, kept: int) -> DatasetCounts:
        """Return the counts, with this many rows kept."""
        bad, over = self.num_bad, self.num_too_long
        return DatasetCounts(kept + bad + over, bad, over, self.truncated, kept)

    def refuse(self, *, skip_bad: bool, too_long: tuple[str, str] | None) -> None:
        """Refuse rows that must not be left out; arguments and error are those of `close`."""
        if self.bad and not skip_bad:
            count = f"{self.num_bad} bad rows"
            raise DatasetError(f"{count} (data.bad_rows=skip leaves them out): {self._shown_bad()}")
        if self.too_long and too_long is not None:
            what, way_out = too_long
            raise DatasetError(f"{self.num_too_long} {what}, the first {self.too_long[0]}: {way_out}")

    def refuse_any(self) -> None:
        """Refuse rows of which any was left out.

        Raises:
            DatasetError: One was; names the first.
        """
        if self.num_bad or self.num_too_long:
            first = f"{self.bad[0].origin}: {self.bad[0].reason}" if self.bad else f"{self.too_long[0]} is too long"
            raise DatasetError(
                f"{self.num_bad} of the rows are bad and {self.num_too_long} too long, and here none may be left out: "
                f"{first}. Mend it, or leave it out yourself"
            )

    def _shown_bad(self) -> str:
        """Return the first bad rows by their reason, which all may share."""
        of_reason: dict[str, list[str]] = {}
        for row in self.bad:
            of_reason.setdefault(row.reason, []).append(row.origin)
        return "; ".join(f"{', '.join(origins)}: {reason}" for reason, origins in of_reason.items())


class TokenisedDataset(ABC, Generic[R, X, T]):
    """Checked rows of type R, rendered as texts of type X, with their tokens, of type T.

    Args:
        data_files: What `hrl.data.sources.sources_of` takes.
        tokenizer: Tokenizer of the trained model; its chat template renders the rows.
        config: The `data` section.
        max_samples: Stop after this many usable rows; -1 reads all.

    Attributes:
        rows: The checked rows that are kept.
        tokens: The tokens of each row.
        pad_id: Id of the padding token.
        data_files: The sources of the rows.
        sizes: How many rows each source has.
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
        self.data_files = [source.with_keys_of(config) for source in sources_of(data_files)]
        self._intake = Intake(source.title for source in self.data_files)
        self._streamed: StreamedRows[R, T] | None = None
        if any(source.options.streaming for source in self.data_files):
            self._stream(max_samples)
        else:
            self._read(max_samples)
        weights = self._weights()
        if weights is not None:
            self._require_rows_of_each()
            self.order: EpochOrder = MixedOrder(
                len(self.rows), seed=config.seed, shuffle=config.shuffle, sizes=tuple(self.sizes), weights=weights
            )
        else:
            self.order = EpochOrder(len(self.rows), seed=config.seed, shuffle=config.shuffle)

    def of_other_rows(self, data_files: DataFiles) -> Self:
        """Return a data set of other rows, read as these were."""
        return type(self)(data_files, self.tokenizer, self.config)

    def require_all(self) -> None:
        """Refuse the data set if it lacks any of its rows, so that its rows match the caller's one by one.

        Raises:
            DatasetError: A row was left out as bad or too long.
        """
        self._intake.refuse_any()

    def _read(self, max_samples: int) -> None:
        """Read every row."""
        self.rows: Sequence[R] = []
        self.tokens: Sequence[T] = []
        self.sizes: list[int] = []
        limits = self._limits(max_samples)
        left = max_samples
        for number, source in enumerate(self.data_files):
            before, usable = len(self.rows), 0
            most = left if limits is None else limits[number]
            for block in self._intake.blocks(read_rows([source], self._checked), most):
                usable += len(block)
                for row, tokens in self._tokenised(block, self._intake):
                    self.rows.append(row)  # type: ignore[attr-defined]
                    self.tokens.append(tokens)  # type: ignore[attr-defined]
            self.sizes.append(len(self.rows) - before)
            left = max(left - usable, 0) if left >= 0 else left
        self._counts = self._intake.close(len(self.rows), **self._left_out())

    def _limits(self, max_samples: int) -> list[int] | None:
        """Return how many rows to take of each source, by their shares; None without a limit or without weights."""
        weights = self._weights()
        return None if weights is None or max_samples < 0 else whole_shares(max_samples, weights)

    def _weights(self) -> tuple[float, ...] | None:
        """Return the weights of the sources, 1 where none is given; None if none has one."""
        weights = [source.options.weight for source in self.data_files]
        if all(weight is None for weight in weights):
            return None
        return tuple(1.0 if weight is None else weight for weight in weights)

    def _stream(self, max_samples: int) -> None:
        """Open the sources, and read their first rows only."""
        tables = [open_table(source) for source in self.data_files]
        limits, keep = self._limits(max_samples), 4 * self.config.train_batch_size
        streamed = StreamedRows(tables, self._load, max_samples if limits is None else limits, keep=keep)
        self.sizes = streamed.sizes
        self.rows, self.tokens = Column(streamed, 0), Column(streamed, 1)
        self._streamed = streamed
        if not self.known:
            self._intake.close(0, **self._left_out())

    def _load(self, wanted: Sequence[tuple[int, int, Any]], again: bool) -> list[tuple[R, T] | None]:
        """Return rows with their tokens, None for those to leave out.

        Args:
            wanted: Number of the source, number of the row in it, and the raw row.
            again: Whether the rows were read before, and are in the counts.

        Raises:
            DatasetError: A row can't be used, and must not be left out.
        """
        intake = Intake(()) if again else self._intake
        found: list[tuple[R, T] | None] = [None] * len(wanted)
        usable: list[tuple[int, R]] = []
        for place, (number, index, raw) in enumerate(wanted):
            source = self.data_files[number]
            row = checked_row(source, f"{source.title} row {index}", raw, self._checked, source.data_source)
            if isinstance(row, BadRow):
                intake.leave_out(row)
            else:
                usable.append((place, row))
        places = {id(row): place for place, row in usable}
        for row, tokens in self._tokenised([row for _, row in usable], intake):
            found[places[id(row)]] = (row, tokens)
        intake.refuse(**self._left_out())
        return found

    def _checked(self, raw: Mapping[str, Any]) -> R | str:
        """Return what `check` does, but for a row whose pictures a model that sees would not be shown."""
        row = self.check(raw)
        if isinstance(row, str) or row.images:
            return row
        wrong = passed_over(raw, self.config.image_key, self.config.video_key)
        return row if wrong is None or not self.sees else wrong

    def _left_out(self) -> dict[str, Any]:
        return {"skip_bad": self.config.bad_rows == "skip", "too_long": self.too_long()}

    def _require_rows_of_each(self) -> None:
        for source, size in zip(self.data_files, self.sizes, strict=True):
            if not size:
                raise DatasetError(
                    f"{source.title} has no row to use for its share of the prompts: {self.counts} of all sources. "
                    "Leave it out, or raise the limit of rows if there is one (data.train_max_samples)"
                )

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
    def shape(self, row: R) -> str:
        """Return what kind of row it is, in words for people; in the plural."""

    @abstractmethod
    def shown(self, row: R) -> str:
        """Return a row's rendered text, for people."""

    @abstractmethod
    def all_ids(self) -> Iterable[np.ndarray]:
        """Return the token ids of all rows, in their stored order."""

    @abstractmethod
    def beside_ids(self) -> Iterable[Mapping[str, Any]]:
        """Return what else is learnt from each row, plain values by name, in their stored order."""

    # ------------------------------------------------------------------ common to all data sets

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def counts(self) -> DatasetCounts:
        """Counts of rows read, left out, truncated and kept; of a streamed data set, so far."""
        return self._counts if self._streamed is None else self._intake.counts(self._streamed.num_used)

    @property
    def is_streamed(self) -> bool:
        """Whether rows stay on disk, and are read when they are drawn."""
        return self._streamed is not None

    @cached_property
    def known(self) -> Sequence[int]:
        """Numbers of the rows that have been looked at before the run: all, or the usable first ones of each source."""
        return range(len(self.rows)) if self._streamed is None else self._streamed.first_of_each()

    @cached_property
    def _pictures(self) -> PictureTokens:
        return PictureTokens(self.tokenizer)

    def picture_tokens(self, shown: Shown) -> int:
        """Return how many tokens stand for a picture or a video."""
        return self._pictures.num_tokens(shown)

    @property
    def sees(self) -> bool:
        """Whether the model sees, with an image processor in its folder."""
        return self._pictures.sees

    @cached_property
    def has_videos(self) -> bool:
        """Whether any prompt that is known shows one."""
        return any(isinstance(each, VideoSource) for index in self.known for each in self.rows[index].images)

    @property
    def says_times(self) -> bool:
        """Whether a video's times are text of the prompt; else they are in its positions."""
        return self._pictures.videos.says_times

    @cached_property
    def has_pictures(self) -> bool:
        """Whether any prompt shows one; of a streamed data set, any of those that are known."""
        return any(self.rows[index].images for index in self.known)

    def shown_by(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the column of the rows' pictures `(B,)`, by its name; nothing where the run is made without.

        Raises:
            DatasetError: A row shows a picture, and none does of those that were looked at before the run.
        """
        if not self.has_pictures:
            odd = next((row for row in map(self.rows.__getitem__, indices) if row.images), None)
            if odd is None:
                return {}
            raise DatasetError(
                f"{odd.origin} shows a picture, and none of the rows that were looked at before the run does: put such "
                "a row among the first of its source, so that the run is made for pictures"
            )
        shown = dict[int, tuple[Picture, ...]]()
        for index in dict.fromkeys(indices):  # a row that comes twice, as both answers of a pair, holds one object
            images = self.rows[index].images
            shown[index] = self._pictures.placed(self.prompt_ids(index), images) if images else ()
        return {MULTI_MODAL_DATA: object_column([shown[index] for index in indices])}

    @abstractmethod
    def prompt_ids(self, index: int) -> np.ndarray:
        """Return the tokens `(P,)` of a row's prompt, without padding."""

    def draw(self, position: Position, batch_size: int) -> tuple[list[int], Position]:
        """Return the rows of the next batch, in the order of the data set, and the position after it.

        Rows of a streamed data set that are to be left out are passed over; where they are many, the position moves
        further than the batch is long.

        Raises:
            ValueError: The batch is larger than the data set, or the position is beyond its end.
            DatasetError: Of a streamed data set: a row can't be used, or a whole epoch has too few rows for a batch.
        """
        if self._streamed is None:
            return self.order.next(position, batch_size)
        return self._streamed.draw(self.order, position, batch_size)

    def metrics(self) -> dict[str, float]:
        """Return how many rows were left out or cut, as `data/...`; what did not happen is absent."""
        counts = self.counts
        found = {"dropped_overlong": counts.too_long, "dropped_bad": counts.bad, "truncated": counts.truncated}
        return {f"data/{name}": float(count) for name, count in found.items() if count}

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Identity of the rows and of their order; see `hrl.data.order.fingerprint`.

        Of a streamed data set only the first rows of each source are compared, and the number of all.
        """
        return fingerprint(self.order, self.all_ids(), self.beside_ids())

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every row that count against the length limit, int64 (N,); of the known rows, if streamed."""
        return np.array([self.length(self.tokens[index]) for index in self.known], dtype=np.int64)

    def _tokenised(self, block: Sequence[R], intake: Intake) -> Iterator[tuple[R, T]]:
        """Render and tokenise rows; yield those that the chat template accepts and that fit."""
        rendered = []
        for row in block:
            try:
                rendered.append((row, self.render(row)))
            except ChatTemplateError as error:
                intake.leave_out(BadRow(row.origin, str(error)))
            except RENDERING_ERRORS as error:
                intake.leave_out(BadRow(row.origin, f"can't be rendered: {error}"))
        encoded = self.encode([texts for _, texts in rendered])
        for (row, _), tokens in zip(rendered, encoded, strict=True):
            if tokens is None:
                intake.leave_out(BadRow(row.origin, "has an answer without a token, or no prompt before it"))
                continue
            fitted = self.fit(tokens)
            if fitted is None:
                intake.leave_out_overlong(f"{row.origin} ({self.length(tokens)} tokens)")
                continue
            intake.truncated += fitted is not tokens
            yield row, fitted
