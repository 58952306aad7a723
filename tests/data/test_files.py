"""What can't be a file of rows is refused with what to name instead; a row that no honest data set has is a bad row."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import io
import json
import os
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hrl.data.dataset import PromptRow, check_prompt
from hrl.data.files import BadRow, files_in, rows_of_file, stem_of
from hrl.data.sources import look_into, read_rows, sources_of
from hrl.errors import DatasetError
from hrl.nearest import nearest_path
from hrl.processes.plain_data import to_plain

ROW = {"data_source": "numeric", "prompt": "1 + 1?", "reward_model": {"ground_truth": "2"}, "extra_info": {"a": 1}}


def check(raw):
    return check_prompt(raw, "prompt")


def refusal(path: Path) -> str:
    with pytest.raises(DatasetError) as caught:
        files_in(path)
    return str(caught.value)


def columns_of(path: Path) -> list[str] | None:
    (source,) = sources_of(str(path))
    return look_into(source).columns


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "hi"}\n')
    (tmp_path / "data" / "held_out.parquet").write_bytes(b"PAR1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("data/trian.jsonl", "data/train.jsonl"),
        ("data/train.json", "data/train.jsonl"),
        ("dta/train.jsonl", "data/train.jsonl"),
        ("Data/TRAIN.jsonl", "data/train.jsonl"),
        ("train.jsonl", "data/train.jsonl"),  # one folder further down
    ],
)
def test_the_nearest_existing_file_is_named(folder, written, meant):
    assert refusal(Path(written)) == f"data file {written} does not exist. Did you mean {meant}?"
    assert refusal(folder / written).endswith(f"Did you mean {folder / meant}?")


def test_without_a_similar_name_what_is_there_is_listed(folder):
    assert refusal(Path("data/zzz")) == (
        f"data file data/zzz does not exist. {folder}/data has held_out.parquet, train.jsonl."
    )
    assert refusal(Path("/no/such/place/rows.jsonl")).endswith("The folder /no/such/place does not exist either.")
    assert nearest_path(Path("/no/such/place")) is None


def test_a_pattern_and_a_folder_are_answered_with_their_files(folder):
    assert refusal(Path("data/*.jsonl")).endswith("name the files. There are: [data/train.jsonl]")
    assert refusal(Path("data/*.zip")).endswith("There is no file of rows")
    assert refusal(Path("data")) == (
        "data is a folder with files of several kinds (1 .parquet and 1 .jsonl); name the files. There are: "
        "[data/held_out.parquet, data/train.jsonl]"
    )


def test_an_empty_and_an_unreadable_file_say_so(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    assert refusal(tmp_path / "empty.jsonl").endswith("empty.jsonl is empty")
    unreadable = tmp_path / "unreadable.jsonl"
    unreadable.symlink_to("/proc/self/mem")  # whoever asks, its first byte can't be read
    assert "unreadable.jsonl can't be read: Input/output error" in refusal(unreadable)


def test_a_parquet_file_that_is_none_says_so(tmp_path):
    (tmp_path / "rows.parquet").write_text('{"prompt": "hi"}\n')
    assert refusal(tmp_path / "rows.parquet").endswith("does not begin with PAR1")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DatasetError, match="cut.parquet is not a readable Parquet file"):
        columns_of(tmp_path / "cut.parquet")


@pytest.mark.parametrize("suffix", [".arrow", ".pkl"])
def test_other_formats_are_refused_with_a_line_that_converts_them(tmp_path, monkeypatch, suffix):
    import pandas

    rows = tmp_path / f"rows{suffix}"
    table = pa.table({"prompt": ["one", "two"], "data_source": ["x", "x"]})
    if suffix == ".pkl":
        table.to_pandas().to_pickle(rows)
    else:
        with pa.ipc.new_stream(rows, table.schema) as stream:
            stream.write_table(table)
    line = refusal(rows).partition("e.g. in Python: ")[2]
    monkeypatch.chdir(tmp_path)
    exec(line, {"pyarrow": pa, "pandas": pandas})  # noqa: S102 (the line that the message gives)
    (made,) = (file for file in tmp_path.iterdir() if file != rows)
    found = list(read_rows([str(made)], check))
    assert [row.messages[0]["content"] for row in found if isinstance(row, PromptRow)] == ["one", "two"]


def test_columns_of_json_lines_are_those_of_its_first_objects(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('\n{"a": 1}\nno json\n[1]\n{"a": 1, "b": 2}\n')
    assert columns_of(file) == ["a", "b"]
    file.write_text("no json\n")
    assert columns_of(file) is None


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "hi", "data_source": "x"}\n')
    assert columns_of(file) == ["prompt", "data_source"]
    (row,) = read_rows([str(file)], check)
    assert isinstance(row, PromptRow) and row.messages == [{"role": "user", "content": "hi"}]


def test_a_link_that_leads_nowhere_says_so(tmp_path):
    (tmp_path / "rows.jsonl").symlink_to(tmp_path / "rows.jsonl")
    assert refusal(tmp_path / "rows.jsonl").endswith("rows.jsonl is a link that leads nowhere")


# ---- rows that no honest data set has: each is a bad row with its file and line, and never a traceback ----------


def nested(levels):
    value = "x"
    for _ in range(levels):
        value = [value]
    return value


def with_extra(text):
    return json.dumps(ROW).replace('{"a": 1}', '{"a": ' + text + "}")


@pytest.mark.parametrize(
    "line, reason",
    [
        (json.dumps(ROW | {"prompt": "a\ud800b"}), "'prompt' holds half a character"),
        (json.dumps(ROW | {"prompt": [{"role": "user", "content": "\udfff"}]}), "'prompt' holds half a character"),
        (json.dumps(ROW | {"data_source": "\ud800"}), "'data_source' holds half a character"),
        (
            '{"prompt": "a", "answer": "1", "answer": "2"}',
            "has the key 'answer' twice in one object, and they may differ",
        ),
        (with_extra('{"b": 1, "b": 1}'), "has the key 'b' twice in one object"),
        (with_extra("9" * 5000), "holds an integer of thousands of digits; write it as a string"),
        (with_extra("[" * 100_000 + "]" * 100_000), "is nested more than 100 levels deep"),
        (with_extra("[" * 100 + "]" * 100), "'extra_info' is nested more than 100 levels deep"),
        (
            json.dumps(ROW | {"prompt": [{"role": "user", "content": "a", "more": nested(200)}]}),
            "'prompt' is nested more than 100 levels deep",
        ),
    ],
)
def test_a_hostile_line_is_a_bad_row_and_the_next_one_is_read(tmp_path, line, reason):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(ROW)}\n{line}\n{json.dumps(ROW)}\n")
    before, bad, after = read_rows([str(file)], check)
    assert isinstance(before, PromptRow) and isinstance(after, PromptRow)
    assert isinstance(bad, BadRow)
    assert bad.origin == f"{file} line 2"
    assert reason in bad.reason


def test_what_is_just_shallow_enough_reaches_a_reward_process():
    (row,) = read_rows([[ROW | {"extra_info": {"a": nested(99)}}]], check)
    assert isinstance(row, PromptRow)
    to_plain(row.extra_info)


def test_half_a_character_in_a_ground_truth_is_only_compared_with():
    (row,) = read_rows([[ROW | {"reward_model": {"ground_truth": "\ud800"}}]], check)
    assert isinstance(row, PromptRow)


@pytest.mark.parametrize("checksums", [True, False])
def test_flipped_bytes_in_a_parquet_file_are_told_with_the_place(tmp_path, checksums):
    file = tmp_path / "rows.parquet"
    table = pa.Table.from_pylist([ROW | {"prompt": f"{number} + 1?"} for number in range(3000)])
    pq.write_table(table, file, write_page_checksum=checksums, compression="zstd", row_group_size=1000)
    content = bytearray(file.read_bytes())
    start = pq.ParquetFile(file).metadata.row_group(2).column(1).data_page_offset
    for position in range(start + 40, start + 400):
        content[position] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(DatasetError, match=r"rows\.parquet is damaged after row [0-9]+: "):
        list(read_rows([str(file)], check))


# ---- every format gives the same rows ---------------------------------------------------------------------------

TABLE = [
    {"prompt": 'say "hi", please', "answer": "1"},
    {"prompt": "two\nlines", "answer": None},
    {"prompt": "ünï, ©", "answer": "3"},
]


def write(path: Path) -> Path:
    """`TABLE`, in the format that the name says."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(TABLE), path)
        return path
    if name.endswith((".csv", ".tsv")):
        text = io.StringIO()
        writer = csv.DictWriter(text, ["prompt", "answer"], delimiter="\t" if name.endswith(".tsv") else ",")
        writer.writeheader()
        writer.writerows(TABLE)
        content = text.getvalue()
    elif name.endswith(".jsonl"):
        content = "".join(json.dumps(row) + "\n" for row in TABLE)
    else:
        content = json.dumps(TABLE)
    encoded = content.encode()
    with pa.output_stream(path, compression="detect") as file:
        file.write(encoded)
    return path


def rows_in(path: Path) -> list[object]:
    return [row for _, row in rows_of_file(path)]


@pytest.mark.parametrize(
    "name",
    ["r.parquet", "r.jsonl", "r.json", "r.csv", "r.tsv", "r.jsonl.gz", "r.json.gz", "r.csv.gz", "r.jsonl.zst", "r.CSV"],
)
def test_every_format_gives_the_same_rows(tmp_path, name):
    path = write(tmp_path / name.lower()).rename(tmp_path / name)
    files_in(path)
    assert rows_in(path) == TABLE
    assert stem_of(path) == "r"


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"data": TABLE, "version": "1"}),
        "\ufeff" + json.dumps(TABLE),
        "".join(json.dumps(row) + "\n" for row in TABLE),  # JSON lines by another name
        json.dumps({"meta": {"a": [1, 2]}, "rows": TABLE, "tags": ["x"], "errors": []}),
    ],
)
def test_a_json_file_is_read_in_every_usual_form(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text, encoding="utf-8")
    assert rows_in(path) == TABLE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  \n", "is empty"),
        ("[1, 2", "is not JSON"),
        ("3", "holds a int; expected a list of rows"),
        (json.dumps({"prompt": ["a", "b"]}), "looks like a table by columns: write it by rows"),
        (json.dumps({"prompt": {"0": "a"}}), "looks like a table by columns"),
        (json.dumps({"train": TABLE, "test": TABLE}), "several lists of rows (train, test)"),
        (json.dumps({"prompt": "a"}), "it is one object with prompt"),
    ],
)
def test_a_json_file_without_one_list_of_rows_says_what_it_is(tmp_path, text, message):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DatasetError) as caught:
        rows_in(path)
    assert message in str(caught.value)


def test_a_row_of_a_csv_with_other_fields_than_the_header_is_a_bad_row(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"\xef\xbb\xbfprompt,answer\r\na,1\r\n\r\nb, and c,2\r\nd,3\r\n")
    first, bad, last = rows_in(path)
    assert first == {"prompt": "a", "answer": "1"} and last == {"prompt": "d", "answer": "3"}
    assert isinstance(bad, BadRow)
    assert bad == BadRow(f"{path} line 4", "has 3 fields, and the header 2: is a comma unquoted?")


@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
def test_the_header_of_a_csv_says_what_delimits_its_fields(tmp_path, sign):
    path = tmp_path / "rows.csv"
    path.write_text(f'"prompt; or, question"{sign}answer\n"a{sign}b"{sign}1\n')
    assert rows_in(path) == [{"prompt; or, question": f"a{sign}b", "answer": "1"}]


def test_columns_without_a_name_are_no_columns(tmp_path):
    path = tmp_path / "rows.csv"
    pd.DataFrame({"prompt": ["a"]}).to_csv(path)
    assert rows_in(path) == [{"prompt": "a"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.jsonl", gzip.compress(b"{}"), "is packed: call it r.jsonl.gz"),
        ("r.csv", "prompt\na".encode("utf-16"), "is UTF-16 text: save it as UTF-8"),
        ("r.json", b"PAR1....", "is a Parquet file by its content"),
        ("r.jsonl.zst", b"{}", "is not packed as its name says (.zst)"),
        ("r.parquet.gz", gzip.compress(b""), "is none of .parquet"),
    ],
)
def test_a_file_that_is_another_than_its_name_says_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert message in refusal(tmp_path / name)


def test_a_document_of_several_lines_is_not_taken_for_json_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(TABLE[0], indent=1))
    assert "a document of several lines is called .json" in rows_in(path)[0].reason


def test_a_field_of_a_csv_may_be_long(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f"prompt\n{'x' * 1_000_000}\n")
    ((row),) = rows_in(path)
    assert len(row["prompt"]) == 1_000_000


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
def test_two_columns_of_one_name_are_refused(tmp_path, name):
    path = tmp_path / name
    if name.endswith("csv"):
        path.write_text("prompt,answer,prompt\na,b,c\n")
    else:
        pq.write_table(pa.table([["a"], ["b"], ["c"]], names=["prompt", "answer", "prompt"]), path)
    with pytest.raises(DatasetError, match="has two columns of the name 'prompt'; rename one"):
        rows_in(path)


def test_damaged_files_say_where(tmp_path):
    packed = write(tmp_path / "cut.jsonl.gz")
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(DatasetError, match=r"cut\.jsonl\.gz is damaged after line"):
        rows_in(packed)
    (tmp_path / "plain.jsonl.gz").write_text("{}\n")
    assert refusal(tmp_path / "plain.jsonl.gz").endswith("is not packed as its name says (.gz)")
    (tmp_path / "latin.csv").write_bytes("prompt\ncaf\xe9\n".encode("latin-1"))
    with pytest.raises(DatasetError, match=r"latin\.csv is not UTF-8"):
        rows_in(tmp_path / "latin.csv")
    (tmp_path / "open.csv").write_text('prompt\n"never closed\n')
    with pytest.raises(DatasetError, match=r"open\.csv is damaged at line"):
        rows_in(tmp_path / "open.csv")


def test_a_folder_is_its_files(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "_cache").mkdir()
    for name in ("b.jsonl", "a.jsonl", "part/c.jsonl.gz", "_cache/d.jsonl", ".hidden.jsonl"):
        write(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no rows")
    assert [str(file.relative_to(tmp_path)) for file in files_in(tmp_path)] == ["a.jsonl", "b.jsonl", "part/c.jsonl.gz"]
    (tmp_path / "empty").mkdir()
    assert "is a folder without a file of rows" in refusal(tmp_path / "empty")


def test_what_is_no_ordinary_file_is_refused_before_anything_waits_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert refusal(tmp_path / "pipe.jsonl").endswith(
        "pipe.jsonl is a pipe, and rows are read more than once: write them into a file"
    )
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    assert "zero.jsonl is a device" in refusal(tmp_path / "zero.jsonl")


def test_a_text_that_no_tokenizer_should_be_given_is_a_bad_row():
    longest = 10_000_000
    good, bad = read_rows(
        [[{"prompt": "x" * longest}, {"prompt": [{"role": "user", "content": "x" * 10_000_001}]}]], check
    )
    assert isinstance(good, PromptRow)
    assert isinstance(bad, BadRow)
    assert (
        bad.reason == "'prompt' holds a text of 10,000,001 characters, and one of more than 10,000,000 is not tokenised"
    )


def test_a_parquet_schema_of_what_arrow_does_not_know_is_a_damaged_file(tmp_path, monkeypatch):
    pq.write_table(pa.Table.from_pylist([ROW]), tmp_path / "rows.parquet")

    def unknown(path):
        raise pa.ArrowNotImplementedError("Unrecognized edge interpolation algorithm: 87")

    monkeypatch.setattr(pq, "read_schema", unknown)
    with pytest.raises(DatasetError, match=r"rows\.parquet is not a readable Parquet file: Unrecognized"):
        columns_of(tmp_path / "rows.parquet")


def test_a_parquet_column_whose_name_is_no_text_is_a_damaged_file(tmp_path):
    pq.write_table(pa.table({"outer": [{"a_part": 1}]}), tmp_path / "rows.parquet")
    damaged = (tmp_path / "rows.parquet").read_bytes().replace(b"a_part", b"\xf1_part")
    (tmp_path / "rows.parquet").write_bytes(damaged)
    with pytest.raises(DatasetError, match=r"rows\.parquet is not a readable Parquet file: "):
        columns_of(tmp_path / "rows.parquet")


FAR = pa.array([0, 10_000_000, 1], pa.int32()).cast(pa.date32())
"""Days of which the second is in the year 29,349."""
MICROSECONDS = pa.array([0, 2**62, 1])
UNREADABLE = {
    "date": (FAR, "date32[day]", "OverflowError"),
    "timestamp": (MICROSECONDS.cast(pa.timestamp("us")), "timestamp[us]", "OverflowError"),
    "timestamp with a zone": (
        MICROSECONDS.cast(pa.timestamp("us", "Europe/Berlin")),
        "timestamp[us, tz=Europe/Berlin]",
        "OverflowError",
    ),
    "duration": (MICROSECONDS.cast(pa.duration("s")), "duration[s]", "OverflowError"),
    "time": (MICROSECONDS.cast(pa.time64("us")), "time64[us]", "OverflowError"),
    "date in an object": (pa.StructArray.from_arrays([FAR], ["day"]), "struct<day: date32[day]>", "OverflowError"),
    "date in a list": (
        pa.LargeListArray.from_arrays([0, 1, 2, 3], FAR),
        "large_list<element: date32[day]>",
        "Overflow",
    ),
    "no text": (pa.array([b"a", b"\xff", b"c"]).view(pa.string()), "text that is not UTF-8", "invalid start byte"),
}


@pytest.mark.parametrize("given", UNREADABLE.values(), ids=UNREADABLE)
def test_a_value_that_python_has_none_for_makes_its_row_bad_and_names_the_column(tmp_path, given):
    values, kind, why = given
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "created_at": values}), tmp_path / "rows.parquet")
    first, bad, last = read_rows([str(tmp_path / "rows.parquet")], check)
    assert isinstance(first, PromptRow) and isinstance(last, PromptRow)
    assert isinstance(bad, BadRow) and bad.origin.endswith("rows.parquet row 1")
    assert "in 'created_at'" in bad.reason and kind in bad.reason and why in bad.reason


@pytest.mark.parametrize("zone", ["Not/AZone", "+99:99", "../../etc/passwd", "\x1b[31m"])
def test_in_a_time_zone_that_nobody_knows_every_moment_is_a_bad_row(tmp_path, zone):
    created = pa.array([5, None, *range(2000)], pa.timestamp("us", zone))
    pq.write_table(pa.table({"prompt": ["a"] * len(created), "created_at": created}), tmp_path / "rows.parquet")
    rows = list(read_rows([str(tmp_path / "rows.parquet")], check))
    assert isinstance(rows[1], PromptRow)  # a null is in no zone
    bad = [row for row in rows if isinstance(row, BadRow)]
    assert len(bad) == len(created) - 1 and bad[-1].origin.endswith("row 2001")
    assert f"tz={zone}".encode("unicode_escape").decode() in bad[0].reason and "leave it out" in bad[0].reason
    assert "\x1b" not in bad[0].reason


def test_values_of_every_type_of_arrow_are_read_as_pythons(tmp_path):
    day, moment = datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)
    table = pa.table({
        "date": [day],
        "moment": pa.array([moment], pa.timestamp("us", "UTC")),
        "duration": [datetime.timedelta(days=1)],
        "time": [datetime.time(12, 30)],
        "decimal": [decimal.Decimal("1.50")],
        "large_list": pa.array([["a"]], pa.large_list(pa.string())),
        "dictionary": pa.array(["a"]).dictionary_encode(),
        "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "rows.parquet")
    assert rows_in(tmp_path / "rows.parquet") == [{
        "date": day,
        "moment": moment,
        "duration": datetime.timedelta(days=1),
        "time": datetime.time(12, 30),
        "decimal": decimal.Decimal("1.50"),
        "large_list": ["a"],
        "dictionary": "a",
        "map": [("a", 1)],
    }]  # fmt: skip
