"""Hostile rows: damaged files of every format, and rows that are well-formed and make no sense.

What reads them is what a run does before its first step: `hrl check`'s look, data sets of every kind, a batch on its
way to a rank, and every row on its way to the process of the rewards.
"""

from __future__ import annotations

import bz2
import datetime
import decimal
import functools
import gzip
import io
import json
import lzma
import tempfile
import zoneinfo
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from hrl.api.rows import UsageError, as_sources_or_rows
from hrl.config import compose_cli
from hrl.config.compose import compose_kind
from hrl.config.run_kind import KINDS
from hrl.data.dataset import RLHFDataset
from hrl.data.offline.demonstrations import DemonstrationDataset
from hrl.data.offline.pairs import PairDataset
from hrl.data.order import Position
from hrl.data.sources import look_into, sources_of
from hrl.errors import DatasetError
from hrl.models.tokenizer import token_ids
from hrl.preflight.data_look import look_at_rows
from hrl.preflight.findings import Findings
from hrl.preflight.given import Given
from hrl.processes.messages import encode
from hrl.processes.plain_data import from_plain, to_plain
from hrl.report.run_folder import json_line
from hrl.report.samples import sample_facts
from hrl.reward.trial import probes
from hrl.single_controller.packing import pack_batch, unpack_batch
from tests.data.conftest import make_tokenizer
from tests.fuzz.cases import NoCaseError, PoorMessageError, Target
from tests.fuzz.values import (
    Change,
    Nested,
    arrow_column,
    arrow_columns,
    changed,
    changes,
    json_values,
    plain,
    python_values,
    rows_of,
)

TABLE = [
    {
        "prompt": f"{n} + 1?",
        "answer": str(n + 1),
        "chosen": "yes",
        "rejected": "no",
        "completion": "x",
        "n": n,
        "f": n / 3,
    }
    for n in range(40)
]
DEEP_TABLE = [
    {
        "prompt": [{"role": "user", "content": f"{n} + 1?"}],
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n, "tags": ["a", "b"]},
        "data_source": "numeric",
    }
    for n in range(40)
]

TYPED_TABLE = [
    {
        "prompt": f"{n} + 1?",
        "answer": str(n + 1),
        "chosen": "yes",
        "rejected": "no",
        "day": datetime.date(2024, 1, 1) + datetime.timedelta(n),
        "created_at": datetime.datetime(2024, 1, 1, n % 24, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        "took": datetime.timedelta(seconds=n),
        "time": datetime.time(n % 24),
        "price": decimal.Decimal(n) / 4,
    }
    for n in range(40)
]


def as_json_lines(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_csv(rows: list[dict[str, Any]], sign: str = ",") -> bytes:
    return pd.DataFrame(rows).to_csv(index=False, sep=sign).encode()


def as_parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, **options)
    return buffer.getvalue()


@functools.cache
def valid_files() -> dict[str, bytes]:
    """Name → content of valid files, one of every format, and of every way that Parquet writes columns."""
    lines = as_json_lines(TABLE)
    zstd = pa.BufferOutputStream()
    with pa.CompressedOutputStream(zstd, "zstd") as packed:
        packed.write(lines)
    return {
        "rows.jsonl": lines,
        "deep.jsonl": as_json_lines(DEEP_TABLE),
        "rows.json": json.dumps(TABLE).encode(),
        "data.json": json.dumps({"version": 1, "data": DEEP_TABLE}, indent=1).encode(),
        "rows.csv": as_csv(TABLE),
        "rows.tsv": as_csv(TABLE, "\t"),
        "lines.jsonl.gz": gzip.compress(lines, mtime=0),
        "rows.csv.bz2": bz2.compress(as_csv(TABLE)),
        "rows.json.xz": lzma.compress(json.dumps(TABLE).encode()),
        "lines.jsonl.zst": zstd.getvalue().to_pybytes(),
    }


@functools.cache
def valid_parquet() -> dict[str, bytes]:
    """Name → content of valid Parquet files."""
    return {
        "plain.parquet": as_parquet(TABLE, use_dictionary=False, compression="none"),
        "dictionary.parquet": as_parquet(TABLE * 3, compression="snappy", row_group_size=50),
        "summed.parquet": as_parquet(TABLE, write_page_checksum=True, compression="zstd"),
        "deep.parquet": as_parquet(DEEP_TABLE, compression="gzip", data_page_version="2.0"),
        "delta.parquet": as_parquet(
            [{"prompt": row["prompt"], "n": row["n"]} for row in TABLE],
            use_dictionary=False,
            column_encoding={"prompt": "DELTA_BYTE_ARRAY", "n": "DELTA_BINARY_PACKED"},
        ),
        "typed.parquet": as_parquet(TYPED_TABLE, use_dictionary=False, compression="none"),
    }


# ---- reading ---------------------------------------------------------------------------------------------------


@functools.cache
def tokenizer() -> Any:
    return make_tokenizer()


@functools.cache
def configuration(kind: str, bad_rows: str) -> Any:
    few = ["data.train_batch_size=1", f"data.bad_rows={bad_rows}", "trainer.device=cpu", "trainer.test_freq=-1"]
    if kind == "ppo":
        more = ["reward.functions=[numeric]", "data.max_prompt_length=64", "data.filter_overlong_prompts=true"]
        return compose_cli([*few, *more, "data.train_files=rows.jsonl", "trainer.val_before_train=false"])
    return compose_kind(KINDS[kind], [*few, "data.train_files=rows.jsonl", "data.truncation=drop"])


def take(source: Any, bad_rows: str = "skip", kind: str = "ppo") -> None:
    """Do with rows what a run does with them before its first step, and then with the first ones.

    Raises:
        DatasetError: They can't be used.
    """
    config = configuration(kind, bad_rows)
    if kind != "ppo":
        data = config.data.model_copy(update={"train_files": [source]} if isinstance(source, str) else {})
        cls = DemonstrationDataset if kind == "sft" else PairDataset
        ids = token_ids(tokenizer())
        dataset: Any = cls(source, tokenizer(), data, -1, stop_ids=ids.stop)
        dataset.fingerprint  # noqa: B018
        unpack_batch(pack_batch(dataset.batch(dataset.known[:4])))
        return
    dataset = RLHFDataset(source, tokenizer(), config.data)
    dataset.columns, dataset.left_out, dataset.fingerprint, dataset.data_sources, dataset.lengths  # noqa: B018
    json.dumps(dataset.fingerprint)
    rows, _ = dataset.draw(Position(), 1)
    batch = dataset.batch([*rows, *dataset.known[:4]])
    unpack_batch(pack_batch(batch))
    for index in dataset.known[:8]:
        row = dataset.rows[index]
        for value in (row.reward_model.get("ground_truth"), row.extra_info, *row.columns.values()):
            from_plain(json.loads(encode({"value": to_plain(value)})))
        record = {"ground_truth": row.reward_model.get("ground_truth"), "question": row.messages[-1]["content"]}
        sample_facts(json.loads(json_line(record)))
        probes([row])
        dataset[index]
        dataset.shown(row)


def checked(source: str) -> None:
    """Look at rows as `hrl check` does, which turns what it refuses into problems."""
    findings = Findings()
    config = configuration("ppo", "error")
    config = config.model_copy(update={"data": config.data.model_copy(update={"train_files": [source]})})
    look_at_rows(findings, config, Given(), tokenizer(), token_ids(tokenizer()))
    findings.raise_problems()


# ---- targets ---------------------------------------------------------------------------------------------------

UNWRITABLE = (ValueError, TypeError, RecursionError, OverflowError, AttributeError, pa.ArrowException)
"""What writing raises for rows that a format can't hold."""
WAYS = ("check", "skip", "error", "sft", "dpo", "stream", "look")
"""How rows are read."""


def read(path: Path, way: str) -> None:
    """Read a file in one of the ways; its name must be in what is said of it."""
    try:
        if way == "check":
            checked(str(path))
        elif way == "look":
            look_into(sources_of(str(path))[0])
        elif way in ("sft", "dpo"):
            take(str(path), "skip", way)
        elif way == "stream":
            take({"path": str(path), "streaming": True})
        else:
            take(str(path), way)
    except DatasetError as error:
        if path.name not in str(error):
            raise PoorMessageError(f"does not name the file: {error}") from error
        raise


def _file(case: tuple[str, list[Change], str], files: Mapping[str, bytes]) -> None:
    name, wanted, way = case
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(changed(files[name], wanted))
        read(path, way)


def _cases(names: Iterable[str], ways: Iterable[str] = WAYS) -> st.SearchStrategy[Any]:
    return st.tuples(st.sampled_from(sorted(names)), changes, st.sampled_from(sorted(ways)))


def _well_formed(case: tuple[str, list[Any], str]) -> None:
    """Write rows that are well-formed in a format, as far as it can hold them, and read them."""
    name, given, way = case
    if name.endswith(".parquet") and _deepest(given) > 101:
        raise NoCaseError("Arrow takes gigabytes to write it")
    rows = [plain(row) for row in given]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        try:
            if name.endswith(".jsonl"):
                path.write_bytes(as_json_lines(rows))
            elif name.endswith(".json"):
                path.write_text(json.dumps(rows))
            elif name.endswith(".csv"):
                path.write_bytes(as_csv(rows))
            else:
                path.write_bytes(as_parquet(rows))
        except UNWRITABLE as error:
            raise NoCaseError from error
        read(path, way)


def _typed(case: tuple[dict[str, tuple[str, pa.DataType, list[int | None]]], str]) -> None:
    """Write columns of types that JSON lacks, with values that Python may have none for, and read them."""
    columns, way = case
    good = {name: ["1 + 1?", "2 + 2?", "3 + 3?"] for name in ("prompt", "chosen", "completion")}
    good["rejected"] = ["a", "b", "c"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        try:
            made = {name: arrow_column(*column) for name, column in columns.items()}
            pq.write_table(pa.table(good | made), path)
        except UNWRITABLE as error:
            raise NoCaseError from error
        if way == "arrow":
            _from_python(("arrow table", pq.read_table(path)))
        else:
            read(path, way)


def _deepest(value: Any) -> int:
    """Return the levels of the deepest value that is given by its depth."""
    if isinstance(value, Nested):
        return value.levels
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(map(_deepest, inner), default=0)


def _from_python(case: tuple[str, Any]) -> None:
    """Give rows as objects, in one of the containers that Python users have."""
    container, given = case
    rows: Any = given if container == "arrow table" else [plain(row) for row in given]
    try:
        if container == "pandas":
            rows = pd.DataFrame(rows)
        elif container == "arrow":
            rows = pa.Table.from_pylist(rows)
        elif container == "columns":
            rows = {name: [row.get(name) for row in rows] for name in rows[0]}
        elif container == "generator":
            rows = iter(rows)
    except UNWRITABLE as error:
        raise NoCaseError from error
    names, found = as_sources_or_rows(rows)
    if names is not None or not found:
        raise UsageError("sources, and no rows")
    take(found, "skip")


TARGETS = [
    Target("text files with damaged bytes", _cases(valid_files(), set(WAYS)), lambda case: _file(case, valid_files())),
    Target(
        "Parquet files with damaged bytes",
        _cases(valid_parquet(), set(WAYS) - {"stream"}),
        lambda case: _file(case, valid_parquet()),
    ),
    Target(
        "well-formed files of rows that make no sense",
        st.tuples(
            st.sampled_from(("rows.jsonl", "rows.json", "rows.csv", "rows.parquet")),
            st.lists(rows_of(json_values), min_size=1, max_size=3),
            st.sampled_from(sorted(set(WAYS) - {"stream"})),
        ),
        _well_formed,
    ),
    Target(
        "Parquet columns of types that JSON lacks",
        st.tuples(
            st.dictionaries(
                st.sampled_from(("created_at", "prompt", "answer", "extra_info", "chosen", "completion")),
                arrow_columns,
                min_size=1,
                max_size=2,
            ),
            st.sampled_from((*sorted(set(WAYS) - {"stream"}), "arrow")),
        ),
        _typed,
    ),
    Target(
        "rows given from Python",
        st.tuples(
            st.sampled_from(("list", "list", "pandas", "arrow", "columns", "generator")),
            st.lists(st.one_of(rows_of(python_values), python_values), min_size=1, max_size=3),
        ),
        _from_python,
    ),
]
