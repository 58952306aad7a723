"""Rows through the package `datasets`: data sets of the hub, folders that it saved, and files converted to its form.

What it returns lies on disk, memory-mapped: a row is read when it is asked for.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hrl.data.by_number import ByNumber
from hrl.data.files import PARQUET, UNREADABLE, BadRow, decoded, is_saved_data_set, kind_of, without_missing
from hrl.errors import DatasetError, UnreachableError
from hrl.nearest import did_you_mean, listing

if TYPE_CHECKING:
    from datasets import Dataset

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_GATED = re.compile("gated|authenticated", re.IGNORECASE)
TRAIN = "train"
_ROWS_AT_ONCE = 1000


def looks_like_hub(path: str) -> bool:
    """Return whether a text may be `<owner>/<name>` of the hub; a path with the suffix of a file of rows is none."""
    owner = path.partition("/")[0]
    return bool(_NAME.fullmatch(path)) and not kind_of(Path(path)) and not Path(owner).is_dir()


def open_data_set(path: str, name: str | None, split: str | None) -> Table:
    """Return a data set of the hub or of a folder, downloaded to the cache of `datasets` where it is not there yet.

    Args:
        path: `<owner>/<name>`, or a folder.
        name: Its configuration; None for the only one.
        split: Its split, also `train[:100]`; None for the only one, or `train`.

    Raises:
        DatasetError: There is no such data set, configuration or split; says what there is.
        UnreachableError: The hub can't be reached, and the data set is not on this machine.
    """
    datasets = _package(path)
    title = f"data set {path}" + (f", configuration {name}," if name else "")
    with _explained(title, path, name, split):
        if is_saved_data_set(Path(path)):
            found: Any = datasets.load_from_disk(path)
            if isinstance(found, datasets.DatasetDict):
                chosen = _choose(title, split, list(found))
                found = found[chosen]
            elif split is not None:
                raise DatasetError(f"{title} was saved as one split; leave out the split {split!r}")
            return Table(undecoded(found), title)
        with _offline_without_network(datasets, path):
            if split is None:
                split = _choose(title, None, datasets.get_dataset_split_names(path, name))
            return Table(undecoded(datasets.load_dataset(path, name, split=split)), title)


def converted(files: Sequence[Path]) -> Table:
    """Return the rows of files of Parquet or of JSON lists, converted once to the cache of `datasets`.

    Raises:
        DatasetError: A row can't be read, or the rows of a column have different types.
    """
    datasets = _package(str(files[0]))
    kind = kind_of(files[0])
    builder = "parquet" if kind in PARQUET else "json"
    options: dict[str, Any] = {}
    if kind in PARQUET:  # without them a file of 1 GB takes 1.6 GB of memory on its way
        from pyarrow.dataset import ParquetFragmentScanOptions

        scan = ParquetFragmentScanOptions(use_buffered_stream=True, pre_buffer=False)
        options = {"fragment_scan_options": scan, "batch_size": _ROWS_AT_ONCE}
    title = f"data file {files[0]}" if len(files) == 1 else f"{len(files)} files from {files[0]} on"
    with _explained(title, str(files[0]), None, None):
        names = [str(file) for file in files]
        return Table(
            undecoded(datasets.load_dataset(builder, data_files={TRAIN: names}, split=TRAIN, **options)), title
        )


def cache_folder() -> Path:
    """Return the folder in which `datasets` keeps what it converted."""
    folder = Path(_package("streaming").config.HF_DATASETS_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Table(ByNumber[object]):
    """Rows of `datasets` as they were written: without the nulls that its form adds.

    Args:
        rows: The rows.
        title: Their name, for messages.
    """

    def __init__(self, rows: Dataset, title: str) -> None:
        self._rows, self._title = rows, title

    def __len__(self) -> int:
        return len(self._rows)

    def item(self, index: int) -> object:
        """Return a row, or the `BadRow` that it is."""
        try:
            return without_missing(self._rows[index])
        except UNREADABLE:
            (row,) = decoded(self._rows.with_format("arrow")[index : index + 1])
            return BadRow(f"{self._title} row {index}", row) if isinstance(row, str) else without_missing(row)

    def __iter__(self) -> Iterator[object]:
        """Yield all rows, many at once from the disk as long as all can be read."""
        number = 0
        try:
            for row in self._rows:
                yield without_missing(row)
                number += 1
        except UNREADABLE:
            yield from (self[index] for index in range(number, len(self)))


def _package(path: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DatasetError(f"{path} is read by the package datasets: pip install datasets ({error})") from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _choose(title: str, split: str | None, there: Sequence[str]) -> str:
    """Return the split that is meant."""
    if split is None:
        if len(there) == 1:
            return there[0]
        if TRAIN in there:
            return TRAIN
        raise DatasetError(f"{title} has no split {TRAIN!r}; name one of {listing(list(there))}")
    if split not in there:
        hint = did_you_mean(split, there, "")
        raise DatasetError(f"{title} has no split {split!r}; it has {listing(list(there))}. {hint}".rstrip())
    return split


@contextmanager
def _offline_without_network(datasets: Any, path: str) -> Iterator[None]:
    """Look only into the cache where the hub's name can't be resolved: the package would retry for 23 seconds."""
    config, was = datasets.config, datasets.config.HF_HUB_OFFLINE
    proxies = any(name.lower() in ("https_proxy", "all_proxy") for name in os.environ)
    if not Path(path).exists() and not proxies:
        try:
            socket.getaddrinfo(urlsplit(config.HF_ENDPOINT).hostname, None)
        except socket.gaierror:
            config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = was


@contextmanager
def _explained(title: str, path: str, name: str | None, split: str | None) -> Iterator[None]:
    """Turn the errors of `datasets` into one that says what to do."""
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError, DatasetsError
    from huggingface_hub.errors import HfHubHTTPError
    from pyarrow import ArrowException

    try:
        yield
    except DatasetError:
        raise
    except DatasetNotFoundError as error:
        if _GATED.search(str(error)):
            hint = "accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN"
            raise DatasetError(f"{title} is gated: {hint}") from error
        hint = f"neither a file or folder {path}, nor a data set of the hub that you can read"
        raise DatasetError(
            f"{title} is not there: {hint}. Check the name; a private one needs `hf auth login`"
        ) from error
    except DatasetGenerationError as error:
        cause = error.__cause__ or error
        raise DatasetError(
            f"{title} can't be converted to rows on disk: {_first_line(cause)}. Leave out streaming, which needs one "
            "type for each column"
        ) from error
    except (DatasetsError, ValueError, RuntimeError, FileNotFoundError, NotImplementedError, ArrowException) as error:
        raise DatasetError(f"{title} can't be read: {_words(error)}") from error
    except (OSError, HfHubHTTPError) as error:  # ConnectionError among them
        raise UnreachableError(
            f"{title} can't be reached ({_first_line(error)}), and is not in the cache of this machine. Without a "
            "network, download its Parquet files elsewhere and name them"
        ) from error


def _words(error: BaseException) -> str:
    text = _first_line(error)
    if "corresponds to no data" in text:
        return "it has no rows"
    quoted = r"'([^']*)'"
    found = re.search(r"BuilderConfig '(.*?)' not found\. Available: \[(.*)\]", str(error), re.DOTALL)
    if found:
        there = re.findall(quoted, found[2])
        return (
            f"it has no configuration {found[1]!r}; it has {listing(there)}. {did_you_mean(found[1], there)}".rstrip()
        )
    if text.startswith("Config name is missing"):
        there = re.findall(quoted, str(error).partition("available configs:")[2].partition("]")[0])
        return f"it has several configurations, name one: {listing(there)}"
    found = re.search(r"Unknown split \"?'?(.*?)\"?'?\. Should be one of \[(.*)\]", str(error))
    if found:
        return f"it has no split {found[1]!r}; it has {listing(re.findall(quoted, found[2]))}"
    if text.startswith("Dataset scripts are no longer supported"):
        return "its rows are made by a script, which is not run; name the Parquet files of its converted branch"
    return text


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


def undecoded(rows: Any) -> Dataset:
    """Return the rows with pictures and sounds as they are stored, also those in lists and fields of a column.

    Decoding them needs further packages, and a decoded picture would be written anew.
    """
    from datasets import Dataset

    rows = rows.with_format(None)
    if not isinstance(rows, Dataset):
        return rows.decode(False) if rows.features else rows
    rows = deepcopy(rows)  # the caller's keeps its features; tables are mapped, and not copied
    pending: list[Any] = [dict(rows.info.features or {})]
    while pending:
        feature = pending.pop()
        if isinstance(feature, dict):
            pending += feature.values()
        elif hasattr(feature, "feature"):  # of a list
            pending.append(feature.feature)
        elif getattr(feature, "decode", False):
            feature.decode = False
    return rows
