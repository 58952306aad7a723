"""What a reader, a crash or a link in the folder finds of a file while it is written."""

from __future__ import annotations

import errno
import os
import re
import resource
from pathlib import Path

import pytest

import hrl
from hrl.files import add_whole, expanded, make_durable, open_itself, remove, unfinished_in, write_whole


def test_a_home_that_is_not_known_leaves_the_name_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/a") == Path("/home/me/a") and expanded(Path("~/a")) == Path("/home/me/a")
    assert expanded("~nobody-has-this-name/a") == Path("~nobody-has-this-name/a")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 123456789)  # a container's number without a name
    assert expanded("~/a") == Path("~/a")


def test_homes_are_expanded_in_one_way_everywhere() -> None:
    """`Path.expanduser` and `Path.home` end in a traceback where a home is not known."""
    package = Path(hrl.__file__).parent
    raises = re.compile(r"(?<!os\.path)\.expanduser\(|Path\.home\(")
    assert [str(file) for file in package.rglob("*.py") if raises.search(file.read_text())] == []


def test_a_file_is_the_old_one_until_it_is_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    assert write_whole(file, "old").read_text() == "old"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{file}'"):
        write_whole(file, "new", durable=True)
    assert file.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["file"]
    assert write_whole(file, b"new").read_text() == "new"


def test_text_that_has_no_bytes_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "file", "half a pair: \ud800")
    assert not list(tmp_path.iterdir())


def test_a_file_has_the_rights_that_the_process_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert write_whole(tmp_path / "file", "").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_what_waits_under_the_name_of_the_unfinished_file_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    (tmp_path / ".file.guessed.partial").symlink_to(own)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "file", "new")
    assert own.read_text() == "precious" and (tmp_path / ".file.guessed.partial").is_symlink()


def test_what_a_killed_writer_leaves_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class KilledError(BaseException):
        pass

    def kill(*_: object) -> None:
        raise KilledError

    (tmp_path / ".download.partial").touch()
    monkeypatch.setattr(Path, "replace", kill)
    with pytest.raises(KilledError):
        write_whole(tmp_path / "file", "new")
    (left,) = unfinished_in(tmp_path)
    assert left.read_text() == "new"


def test_a_link_is_replaced_and_not_opened(tmp_path: Path) -> None:
    own, link = tmp_path / "own", tmp_path / "link"
    own.write_text("precious")
    link.symlink_to(own)
    with pytest.raises(OSError, match=f"it is a link, which hrl does not write through: '{link}'"):
        open_itself(link, os.O_RDWR)
    write_whole(link, "new")
    assert not link.is_symlink() and own.read_text() == "precious"


def test_a_sync_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_durable(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}'"):
        make_durable(tmp_path)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_makes_no_folder_durable_is_good_enough_for_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
    make_durable(tmp_path)
    with pytest.raises(OSError, match=f"'{tmp_path}/file'"):
        make_durable(tmp_path / "file")


@pytest.mark.parametrize("is_folder", [True, False])
def test_removing_a_link_leaves_what_it_leads_to(tmp_path: Path, is_folder: bool) -> None:
    own, link = tmp_path / "own", tmp_path / "link"
    (own / "file" if is_folder else own).parent.mkdir(exist_ok=True)
    (own / "file" if is_folder else own).write_text("precious")
    link.symlink_to(own)
    remove(link)
    assert not link.is_symlink() and own.exists()
    remove(own)
    assert not own.exists()
    link.symlink_to(own)
    remove(link)
    assert not link.is_symlink()


def test_a_line_that_the_disk_cuts_off_is_not_there_at_all(tmp_path: Path) -> None:
    file = tmp_path / "log"
    add_whole(file, "one\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # of the next line six bytes fit
    try:
        with pytest.raises(OSError, match=f"File too large: '{file}'"):
            add_whole(file, "two and a half\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.read_text() == "one\n"
    add_whole(file, "three\n")
    assert file.read_text() == "one\nthree\n"


def test_a_disk_that_refuses_when_the_file_is_closed_has_nothing_of_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, close = tmp_path / "log", os.close
    add_whole(file, "one\n")

    def refused(handle: int) -> None:
        close(handle)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch, pytest.raises(OSError, match=f"Disk quota exceeded: '{file}'"):
        patch.setattr("os.close", refused)
        add_whole(file, "two\n")
    assert file.read_text() == "one\n"
