"""Rows that no honest data set has: each is a bad row with its file and line, and never a traceback."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hrl.data.files import BadRow, DatasetError
from hrl.data.rows import PromptRow, check_prompt, read_rows
from hrl.processes.plain_data import to_plain

ROW = {"data_source": "numeric", "prompt": "1 + 1?", "reward_model": {"ground_truth": "2"}, "extra_info": {"a": 1}}


def check(raw):
    return check_prompt(raw, "prompt", "data_source")


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
