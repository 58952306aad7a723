"""`hrl report` writes where it is told to."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from hrl import cli


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a run ü"
    folder.mkdir()
    (folder / "config.yaml").write_text("data: {}\n")
    return folder


def test_the_page_goes_into_the_run_folder_a_file_or_a_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for arguments, page in (
        ([str(run)], run / "report.html"),
        (["~/a run ü", "--out", "~/page.html"], tmp_path / "page.html"),
        ([str(run), "--out", str(tmp_path)], tmp_path / "report.html"),
    ):
        assert cli.main(["report", *arguments]) == 0
        assert capsys.readouterr().out == f"{page}\n" and page.is_file()


def test_a_run_without_a_step_is_told_to_have_no_curves(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run)]) == 0
    assert "has no metrics.jsonl: the run has made no step yet" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().err == ""


def test_a_pipe_or_a_device_is_written_to_and_stays(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "stdout").symlink_to(pipe)
    reader = os.open(pipe, os.O_RDWR)  # both ends, so that neither waits for the other
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)
    assert cli.main(["report", str(run), "--out", str(tmp_path / "stdout")]) == 0
    assert os.read(reader, 15) == b"<!doctype html>"
    os.close(reader)
    assert pipe.is_fifo() and (tmp_path / "stdout").is_symlink()
    assert capsys.readouterr().out == "", "where a page may go"
    (tmp_path / "stdout").unlink()
    (tmp_path / "stdout").symlink_to(tmp_path / "page.html")  # as after `> page.html`
    (tmp_path / "page.html").touch()
    assert cli.main(["report", str(run), "--out", str(tmp_path / "stdout")]) == 0
    assert (tmp_path / "stdout").is_symlink() and (tmp_path / "page.html").stat().st_size > 0


def test_a_reader_of_the_page_that_has_seen_enough_is_no_error(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object, **__: object) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(Path, "write_text", closed)
    monkeypatch.setattr(cli, "_write_no_more", lambda: None)
    assert cli.main(["report", str(run), "--out", str(tmp_path / "pipe")]) == 0


def test_a_place_that_cannot_be_written_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run), "--out", str(tmp_path / "not" / "there.html")]) == 1
    assert capsys.readouterr().err.endswith(
        "there.html can't be written: No such file or directory; name another file with --out\n"
    )
