"""Rows come in the usual containers and are the same rows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from hrl.api import rows as module
from hrl.api.rows import UsageError, as_sources_or_rows

ROWS = [{"prompt": f"{a}?", "answer": str(a), "level": a} for a in range(5)]


class Columns:
    """What polars has of this; polars is no dependency."""

    def to_dicts(self) -> list[dict[str, Any]]:
        return ROWS


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        tuple(ROWS),
        (row for row in ROWS),
        {name: [row[name] for row in ROWS] for name in ROWS[0]},
        {name: np.array([row[name] for row in ROWS]) for name in ROWS[0]},
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).with_format("numpy"),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
        pd.DataFrame(ROWS),
        pd.DataFrame(ROWS).sample(frac=1, random_state=0).sort_values("level"),
        pa.Table.from_pylist(ROWS),
        Columns(),
    ],
    ids=lambda data: type(data).__name__,
)
def test_every_container_holds_the_same_rows(data: Any) -> None:
    names, rows = as_sources_or_rows(data)
    assert names is None and rows == ROWS


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ("openai/gsm8k", ["openai/gsm8k"]),
        (Path("a.jsonl"), ["a.jsonl"]),
        (["a.jsonl", Path("b.csv")], ["a.jsonl", "b.csv"]),
    ],
)
def test_names_stay_names(data: Any, names: list[str]) -> None:
    assert as_sources_or_rows(data) == (names, None)


def test_a_missing_value_of_pandas_is_none() -> None:
    frame = pd.DataFrame({"prompt": ["a", "b", "c"], "answer": ["1", None, np.nan], "score": [1.5, float("nan"), 2.0]})
    frame["day"] = pd.array([1, pd.NA, 3], dtype="Int64")
    _, rows = as_sources_or_rows(frame)
    assert rows is not None
    assert [row["answer"] for row in rows] == ["1", None, None]
    assert [row["score"] for row in rows] == [1.5, None, 2.0]
    assert [row["day"] for row in rows] == [1, None, 3]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (5, "data is a int; give a list of rows"),
        (b"rows.jsonl", "data is a bytes"),
        ([1, 2], "row 0 of data is a int; a row is a dict"),
        ([ROWS[0], "rows.jsonl"], "row 1 of data is a str"),
        ({"prompt": "What is 1 + 1?"}, "data is a dict whose 'prompt' is a str; give a list of rows"),
        ({"prompt": ["a", "b"], "answer": ["1"]}, "different lengths: prompt has 2, answer has 1"),
        (
            datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS)),
            "a dict of data sets; give one of them: train, test",
        ),
    ],
)
def test_what_is_no_rows_is_refused_with_what_it_is(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        as_sources_or_rows(data)


def test_prompts_without_columns_are_told_how_rows_are_written() -> None:
    with pytest.raises(UsageError, match=r"text 0 of data is 'What is 1.*rows are dicts"):
        as_sources_or_rows(["What is 1 + 1?", "And 2 + 2?"])


def test_a_file_may_have_a_space_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "my rows.jsonl").touch()
    assert as_sources_or_rows(str(tmp_path / "my rows.jsonl"))[0] == [str(tmp_path / "my rows.jsonl")]


def test_an_option_that_no_source_has_is_left_to_the_schema() -> None:
    source = {"path": "a.jsonl", "wieght": 2.0}
    assert as_sources_or_rows(source) == ([source], None)


def test_a_named_index_of_pandas_is_a_column() -> None:
    frame = pd.DataFrame({"answer": [1, 2]}, index=pd.Index(["a", "b"], name="prompt"))
    assert as_sources_or_rows(frame)[1] == [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]


def test_pictures_are_not_decoded() -> None:
    features = datasets.Features({"prompt": datasets.Value("string"), "picture": datasets.Image()})
    rows = [{"prompt": "a", "picture": {"bytes": b"no picture", "path": None}}]
    for data in (datasets.Dataset.from_list(rows, features=features),):
        assert as_sources_or_rows(data)[1] == rows
        assert as_sources_or_rows(data.to_iterable_dataset())[1] == rows


def test_an_iterable_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 100)
    with pytest.raises(UsageError, match="more than 100 rows.*islice"):
        as_sources_or_rows({"prompt": str(a)} for a in itertools.count())
    _, rows = as_sources_or_rows({"prompt": str(a)} for a in range(100))
    assert rows is not None and len(rows) == 100


def test_a_column_named_by_a_huge_integer_is_told():
    with pytest.raises(UsageError, match="a column whose name is an integer of thousands of digits"):
        as_sources_or_rows(pd.DataFrame([["1?"]], columns=pd.Index([10**5000], dtype=object)))


def test_a_date_of_a_table_that_python_has_none_for_names_row_and_column() -> None:
    days = pa.array([0, 10_000_000], pa.int32()).cast(pa.date32())
    table = pa.table({"prompt": ["a", "b"], "created_at": days})
    for data in (table, table.to_batches()[0], datasets.Dataset(table)):
        with pytest.raises(
            UsageError, match=r"row 1 of data holds a value in 'created_at', of the type 'date32\[day\]'"
        ):
            as_sources_or_rows(data)
