"""Sources are what they are written as; their columns are mapped; what is missing is named with what is there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pytest

from hrl.config.sources import SourceConfig, is_source, source_title
from hrl.data.dataset import PromptRow, check_prompt
from hrl.data.files import BadRow
from hrl.data.sources import Source, has_field, look_into, mapped, read_rows, show_row, sources_of
from hrl.errors import DatasetError


def check(raw):
    return check_prompt(raw, "prompt")


def one(data) -> Source:
    (source,) = sources_of(data)
    return source


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "odd:name.jsonl").write_text('{"prompt": "a"}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("written", "path", "name", "split"),
    [
        ("openai/gsm8k", "openai/gsm8k", None, None),
        ("openai/gsm8k:main", "openai/gsm8k", "main", None),
        ("openai/gsm8k:main:train[:10%]", "openai/gsm8k", "main", "train[:10%]"),
        ("openai/gsm8k::test", "openai/gsm8k", None, "test"),
        ("folder::train", "folder", None, "train"),
        ("odd:name.jsonl", "odd:name.jsonl", None, None),
        ("bundled:addition/train", "bundled:addition/train", None, None),
        ("reasoning_gym:chain_sum?size=2", "reasoning_gym:chain_sum?size=2", None, None),
    ],
)
def test_configuration_and_split_stand_behind_the_path(here, written, path, name, split):
    options = one(written).options
    assert (options.path, options.name, options.split) == (path, name, split)
    assert one({"path": written, "weight": 2.0}).options.weight == 2.0


def test_a_split_is_given_once(here):
    with pytest.raises(DatasetError, match="configuration or split twice"):
        one({"path": "openai/gsm8k:main:train", "split": "test"})


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("openai/gsm8k:main:train", "openai/gsm8k"),
        ("folder::train", "folder"),
        ("folder/train.jsonl", "train"),
        ("sums.jsonl.gz", "sums"),
        ("a.b.csv", "a.b"),
        ("bundled:addition/train", "bundled/addition"),
        ({"path": "a.csv", "data_source": "numeric"}, "numeric"),
        ([{"prompt": "a"}], "python"),
    ],
)
def test_a_source_names_the_rows_that_name_none(here, written, name):
    assert one(written).data_source == name


def test_a_row_is_no_source_and_a_source_no_row():
    assert is_source({"path": "a.jsonl", "weight": 1.0})
    assert not is_source({"path": "a.jsonl", "prompt": "what is this"})
    assert not is_source({"prompt": "a"})
    assert not is_source({"path": ["a", "b"]})  # a column
    assert is_source({"path": Path("a.jsonl")}) and one({"path": Path("a.jsonl")}).options.path == "a.jsonl"
    assert source_title({"path": "a/b", "name": "c", "split": "d"}) == "a/b:c:d"


def test_columns_are_mapped_by_the_section_and_by_the_source():
    data = type("Data", (), {"map": {"tools": "functions", "extra": "meta.a.b"}, "prompt_key": "prompt"})()
    source = Source(SourceConfig(path="x", prompt_key="question", answer_key="solution", map={"extra": "c"}))
    assert source.with_keys_of(data).columns == {
        "tools": "functions",
        "extra": "c",
        "prompt": "question",
        "answer": "solution",
    }
    raw = {"question": "?", "functions": None, "meta": {"a": {"b": 3}}, "meta.a": 4}
    assert mapped(raw, {"prompt": "question", "deep": "meta.a.b", "dotted": "meta.a", "gone": "no.such"}) == raw | {
        "prompt": "?",
        "deep": 3,
        "dotted": 4,
        "gone": None,
    }


def test_a_bad_row_says_which_column_was_meant():
    source = Source(SourceConfig(path="x"), [{"prompt": "a", "question": 3}], {"prompt": "question"})
    (bad,) = read_rows([source], check)
    assert isinstance(bad, BadRow)
    assert bad.reason.startswith("'prompt' is 3, expected a string") and bad.reason.endswith(
        "('prompt' is its column 'question')"
    )


def test_the_answer_key_of_a_source_replaces_the_ground_truth_of_its_rows():
    row = {"prompt": "a", "reward_model": {"ground_truth": "theirs", "style": "rule"}, "ground_truth": "g", "right": 4}
    (own,) = read_rows([Source(SourceConfig(path="x", answer_key="right"), [row], {"answer": "right"})], check)
    assert isinstance(own, PromptRow)
    assert own.reward_model == {"ground_truth": 4, "style": "rule"} and "ground_truth" not in own.columns
    (theirs,) = read_rows([Source(SourceConfig(path="x"), [row])], check)
    assert isinstance(theirs, PromptRow) and theirs.reward_model["ground_truth"] == "theirs"
    lacking = [{**row, "right": None}, {"prompt": "a"}]
    for bad in read_rows([Source(SourceConfig(path="x", answer_key="right"), lacking, {"answer": "right"})], check):
        assert isinstance(bad, BadRow) and bad.reason == "'right' is missing or null (answer_key of its source)"


def test_rows_of_pandas_are_rows_of_python():
    frame = pandas.DataFrame(
        {
            "prompt": [np.array([{"role": "user", "content": "a"}], dtype=object), "b"],
            "answer": [3, None],
            "when": [pandas.Timestamp("2020-01-01"), pandas.NaT],
            "reward_model": [{"ground_truth": np.array(["1", "2"])}, None],
        }
    )
    first, second = read_rows([frame.to_dict("records")], check)
    assert isinstance(first, PromptRow) and isinstance(second, PromptRow)
    assert first.messages == [{"role": "user", "content": "a"}]
    assert first.reward_model == {"ground_truth": ["1", "2"]}  # verl's place goes before the column
    assert "when" not in first.columns  # no plain data
    assert "ground_truth" not in second.reward_model and "answer" not in second.columns


def test_what_is_looked_at_is_the_beginning(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"a": {"b": number}, f"only_{number}": 1}) + "\n" for number in range(100)))
    look = look_into(one(str(path)))
    assert look.columns is not None and "only_63" in look.columns and "only_64" not in look.columns
    assert look.shown == "The first row: {a: {'b': 0}, only_0: 1}"
    assert has_field(look, "a.b") and not has_field(look, "a.c")


def test_a_huge_row_is_shown_on_a_line():
    assert len(show_row({"a": "x" * 10_000, "b": list(range(1000))})) < 350
    assert len(show_row({f"column_{number}": number for number in range(500)})) < 350


@pytest.mark.parametrize(
    "written", ["https://here.org/rows.jsonl", "s3://bucket/rows.parquet", "hf://datasets/a/b.csv"]
)
def test_a_url_is_refused_as_one(here, written):
    with pytest.raises(DatasetError, match=f"{written} is a URL: download the file"):
        look_into(one(written))


def test_a_number_of_too_many_digits_is_shown_all_the_same():
    assert show_row({"a": 10**5000, "b": [10**5000]}) == (
        "{a: a int of thousands of digits, b: a list of thousands of digits}"
    )


def test_a_folder_with_several_splits_needs_one(here):
    (here / "folder" / "test.jsonl").write_text('{"prompt": "b"}\n')
    with pytest.raises(
        DatasetError, match="the splits test, train: name the files of one, or one split, folder::train"
    ):
        list(read_rows(["folder"], check))


def test_a_split_beside_files_of_none_is_not_trained_on_with_them(tmp_path):
    for name in ("math.jsonl", "math_test.jsonl"):
        (tmp_path / name).write_text('{"prompt": "b"}\n')
    with pytest.raises(DatasetError, match=r"with math_test.jsonl, .* split test, beside .* such as math.jsonl: name"):
        list(read_rows([str(tmp_path)], check))
    assert len(list(read_rows([str(tmp_path / "math.jsonl")], check))) == 1


def test_a_name_like_one_of_the_hub_below_a_folder_that_is_here_is_a_missing_file(here):
    with pytest.raises(DatasetError, match=r"folder/trian does not exist.*if there were no folder folder here"):
        list(read_rows(["folder/trian"], check))


def test_a_number_that_python_has_no_type_for_is_a_column_that_cannot_travel():
    (row,) = read_rows([[{"prompt": "hi", "deep": np.longdouble("1.5")}]], lambda raw: check_prompt(raw, "prompt"))
    assert isinstance(row, PromptRow)
    assert row.left_out == (("deep", "deep is a longdouble"),)


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("x" * 5000, "is too long to be the name of a file"),
        ("a/" * 4000, "is too long"),
        ("a\0b", "embedded null"),
        ("\ud800.jsonl", "unicode string"),
    ],
    ids=["name", "path", "NUL", "surrogate"],
)
def test_what_no_file_can_be_called_is_refused(written, why):
    for data in (written, {"path": written}, [written]):
        with pytest.raises(DatasetError, match=why):
            sources_of(data)
    assert sources_of(f"reasoning_gym:chain_sum?{'x' * 5000}")  # no file, and judged by the task
