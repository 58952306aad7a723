"""The record of what a rank wrote appears after all of it, and an error is not lost."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from hrl.workers.engine.background import BackgroundWriter, PartError, is_written, recorded, write_record
from hrl.workers.engine.digest import FileDigest, Written


def test_the_record_comes_after_the_last_file(tmp_path: Path) -> None:
    writer, gate = BackgroundWriter(), threading.Event()
    record, first, second = (tmp_path / name for name in ("written.json", "first", "second"))

    def write() -> Iterator[Written]:
        first.write_bytes(b"12345")
        yield Written.by_reading(first)
        assert gate.wait(30)
        second.write_bytes(b"123")
        yield Written.by_reading(second)

    writer.begin(write, record)
    writer.finish(wait=False)
    assert not record.exists() and not is_written(record)
    gate.set()
    writer.finish()
    assert json.loads(record.read_text()) == {
        "files": {
            "first": {"size": 5, "xxh3_128": xxh3_128_hexdigest(b"12345")},
            "second": {"size": 3, "xxh3_128": xxh3_128_hexdigest(b"123")},
        }
    }
    assert is_written(record)
    second.write_bytes(b"12")
    assert not is_written(record), "as on a disk that shows only a part of it"


def test_jobs_come_one_after_the_other_and_an_error_is_raised_once(tmp_path: Path) -> None:
    writer = BackgroundWriter()

    def full() -> Iterator[Written]:
        raise OSError(28, "No space left on device", str(tmp_path))
        yield Written(tmp_path, FileDigest(0, ""))

    writer.begin(full, tmp_path / "written.json")
    writer.begin(list, tmp_path / "later.json")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"):
        writer.finish()
    assert not (tmp_path / "written.json").exists()
    writer.finish()
    assert is_written(tmp_path / "later.json")


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own")
def test_the_thread_that_writes_gives_way_to_those_that_compute(tmp_path: Path) -> None:
    writer, found = BackgroundWriter(), []

    def write() -> Iterator[Written]:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        yield from ()

    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    writer.begin(write)
    writer.finish()
    assert found == [19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


def test_a_record_is_never_seen_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(Path, "replace", lambda *_: None)
    write_record(tmp_path / "written.json", [Written.by_reading(tmp_path / "file")])
    assert not is_written(tmp_path / "written.json")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"files": []}', '{"files": {"a": {"size": -1}}}', '{"files": ' + "[" * 100_000]
)
def test_a_record_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    record = tmp_path / "written.json"
    record.write_text(text)
    with pytest.raises(PartError, match=f"{record} is damaged: "):
        recorded(record)
