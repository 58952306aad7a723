"""Files of text read by number give the rows that reading them from the start gives."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma

import pytest

from hrl.data.by_place import CsvRows, JsonLines, by_place
from hrl.data.files import BadRow, rows_of_file
from hrl.errors import DatasetError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_json_lines_are_read_from_where_they_stand(tmp_path):
    """No conversion: a column may have any types, and the places of the lines are all that is in memory."""
    one, two = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    one.write_bytes('\ufeff{"answer": "3"}\n\n{"answer": {"é": [1]}}\nno json\n'.encode())
    two.write_bytes(b'{"answer": null}')
    rows = JsonLines([one, two])
    assert len(rows) == 4
    assert rows[3] == {"answer": None} and rows[1] == {"answer": {"é": [1]}} and rows[0] == {"answer": "3"}
    assert isinstance(rows[2], BadRow) and rows[2].origin == f"{one} byte 44"


CSV = '\ufeffprompt, answer,\r\n"two\r\nlines, ""said""",1,\r\n\r\nshort,2\r\nünï,3,x\r\nlong,4,,5\r\nlast,,'


@pytest.mark.parametrize(
    "text",
    [CSV, CSV.replace("\r\n", "\n"), CSV.replace("\r\n", "\r"), CSV.replace(",", ";"), "prompt\na\nb\n", "prompt\n"],
)
@pytest.mark.parametrize("packing", ["", ".gz"])
def test_a_csv_file_has_the_same_rows_and_bad_rows_by_number(tmp_path, text, packing):
    path = tmp_path / f"r.csv{packing}"
    path.write_bytes(gzip.compress(text.encode()) if packing else text.encode())
    read = [row for _, row in rows_of_file(path)]
    rows = by_place([path])
    assert isinstance(rows, CsvRows)
    assert [getattr(row, "reason", row) for row in rows] == [getattr(row, "reason", row) for row in read]
    assert rows[-1:] == read[-1:] if read else len(rows) == 0
    if text.count("last"):
        assert len(rows) == 5
        assert [type(row) for row in rows] == [dict, BadRow, dict, BadRow, dict]
        assert rows[2] == {"prompt": "ünï", "answer": "3"}  # a column without a name, as pandas writes its index


def test_files_with_other_columns_keep_their_own(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\na,1\n")
    (tmp_path / "b.csv").write_text("answer;prompt\n2;b\n")
    assert list(CsvRows([tmp_path / "a.csv", tmp_path / "b.csv"])) == [
        {"prompt": "a", "answer": "1"},
        {"prompt": "b", "answer": "2"},
    ]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
def test_packed_files_are_unpacked_and_damage_is_told(tmp_path, suffix, pack):
    path = tmp_path / f"r.jsonl{suffix}"
    packed = pack("".join(json.dumps({"prompt": str(n)}) + "\n" for n in range(500)).encode())
    path.write_bytes(packed)
    assert JsonLines([path])[499] == {"prompt": "499"}
    path.write_bytes(packed[:60] + bytes(20) + packed[80:])
    with pytest.raises(DatasetError, match=rf"r\.jsonl{suffix} is damaged"):
        JsonLines([path])
    with pytest.raises(DatasetError, match=rf"r\.jsonl{suffix} is damaged"):
        list(rows_of_file(path))


def test_a_json_file_is_streamed_where_it_has_a_row_a_line(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert list(by_place([path])) == [{"prompt": "a"}, {"prompt": "b"}]
    path.write_text('[{"prompt": "a"}]')
    assert by_place([path]) is None
    for text in ('{"data": [{"prompt": "a"}]}', json.dumps({"data": [{"prompt": "a"}]}, indent=1)):
        path.write_text(text)
        with pytest.raises(DatasetError, match="one JSON object, which has to be read whole: leave out streaming"):
            by_place([path])
