"""What has happened to a folder since its manifest was written is found, whatever it is."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from hrl.cluster.manifest import MANIFEST, Damage, Manifest, ManifestError, _sealed, damages, describe, is_whole
from hrl.cluster.patience import PAUSES_S, UnreadableError
from hrl.workers.engine.digest import DigestingFile, FileDigest

FILES = {"actor/shard-1": b"weights" * 1000, "actor/empty": b"", "hf/config.json": b"{}", "state.json": b'{"step": 3}'}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "step_3"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    Manifest.of(folder, 3, score=0.5).write(folder)
    return folder


def test_a_folder_as_it_was_written_has_no_damage(folder: Path) -> None:
    assert damages(folder) == damages(folder, from_disk=True, gives_way=True) == [] and is_whole(folder)
    manifest = Manifest.read(folder)
    assert manifest.files == {
        name: FileDigest(len(content), xxh3_128_hexdigest(content)) for name, content in FILES.items()
    }
    assert (manifest.step, manifest.score, manifest.size) == (3, 0.5, 7013)


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_bit_that_flips_in_any_byte_of_any_file_is_found(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    for place in {*range(0, len(whole), max(1, len(whole) // 40)), len(whole) - 1} if whole else ():
        for bit in (0, 5):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            (folder / name).write_bytes(flipped)
            assert [damage.file for damage in damages(folder)] == [name], (place, bit)
    (folder / name).write_bytes(whole)
    assert damages(folder) == []


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda path: path.unlink(), "actor/shard-1 is missing"),
        (lambda path: path.write_bytes(b"w" * 6999), "actor/shard-1 has 6999 bytes, of 7000 that were written"),
        (lambda path: path.write_bytes(b"w" * 7000), "actor/shard-1 is not what was written: its xxh3 is "),
        (lambda path: (path.unlink(), path.mkdir()), "actor/shard-1 is no file"),
        (lambda path: (path.unlink(), path.symlink_to("shard-2")), "actor/shard-1 is missing"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "actor/shard-1 "),  # which must not be waited for
        (lambda path: (path.parent / "shard-2").write_bytes(b"x"), "actor/shard-2 is not in the manifest"),
        (lambda path: path.rename(path.parent.parent / "shard-1"), "actor/shard-1 is missing (and 1 more)"),
    ],
)
def test_a_damage_names_the_file_and_says_what_it_is(folder: Path, spoil: Callable[[Path], object], what: str) -> None:
    spoil(folder / "actor" / "shard-1")
    assert describe(damages(folder)).startswith(what)


def test_names_and_sizes_alone_are_compared_without_reading(folder: Path) -> None:
    (folder / "actor" / "shard-1").write_bytes(b"w" * 7000)
    assert is_whole(folder)
    (folder / "actor" / "shard-1").write_bytes(b"w" * 6999)
    assert not is_whole(folder)


def test_a_part_can_be_looked_at_alone(folder: Path) -> None:
    (folder / "actor" / "shard-1").unlink()
    assert damages(folder, "hf") == []
    assert [damage.file for damage in damages(folder, "actor")] == ["actor/shard-1"]


def test_a_file_that_is_added_is_told_from_one_that_is_damaged(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / ".nfs000001").write_text("the system's")
    assert damages(folder) == [Damage("notes.txt", "is not in the manifest", is_foreign=True)]


class FlakyFiles:
    """A file system that refuses the first attempts to read, of those files alone that `named` is in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refusals: int, named: str = "") -> None:
        self.refusals, self.named, self.pauses = refusals, named, list[float]()
        digest = FileDigest.of
        monkeypatch.setattr(FileDigest, "of", lambda path, **given: self.refuse(path) or digest(path, **given))
        monkeypatch.setattr("hrl.cluster.patience.time.sleep", self.pauses.append)

    def refuse(self, path: Path) -> None:
        if self.named in str(path) and self.refusals > 0:
            self.refusals -= 1
            raise OSError(errno.ESTALE, "Stale file handle")  # as a read does: without the file's name


def test_a_file_that_can_be_read_at_a_later_attempt_is_not_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FlakyFiles(monkeypatch, len(PAUSES_S), "shard-1")
    assert damages(folder) == []
    assert files.pauses == [*PAUSES_S]


def test_a_file_that_cannot_be_read_is_not_called_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FlakyFiles(monkeypatch, 1 + len(PAUSES_S), "shard-1")
    with pytest.raises(
        UnreadableError, match=r"actor/shard-1 can't be read: Stale file handle \(4 attempts within 3 s"
    ):
        damages(folder)


@pytest.mark.parametrize("call", ["pathlib.Path.stat", "pathlib.Path.read_text", "os.scandir"])
def test_nor_is_a_folder_whose_file_system_says_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*given: object, **more: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("hrl.cluster.patience.PAUSES_S", ())
    monkeypatch.setattr(call, refuse)
    with pytest.raises(UnreadableError, match="can't be read: Input/output error"):
        damages(folder)
    assert call == "os.scandir" or not is_whole(folder)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "is missing"),
        ("", "is damaged: Expecting value"),
        ("[]", "is damaged"),
        ("{}", "is damaged: 'step'"),
        ("[" * 100_000, "is damaged"),
    ],
)
def test_a_manifest_that_is_none_is_a_damage_and_no_traceback(folder: Path, text: str | None, what: str) -> None:
    (folder / MANIFEST).unlink()
    if text is not None:
        (folder / MANIFEST).write_text(text)
    (damage,) = damages(folder)
    assert damage.file == MANIFEST and what in damage.what and not is_whole(folder)


DIGEST = {"size": 1, "xxh3_128": "0" * 32}


NO_NAMES = ("../../etc/passwd", "/etc/passwd", "a\0b", "a\ud800b", "a\x1b[31m", "", ".", "a//b", "a/", "./a")
NO_DIGESTS = (3, [], {}, DIGEST | {"size": -1}, DIGEST | {"size": True}, DIGEST | {"xxh3_128": "0"})
NO_FIELDS = {"files": [[], None], "step": [True, -1, "1", 1.0], "score": ["best", {}, 10**400], "hrl": [None, {}]}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        *(({"files": {name: DIGEST}}, "no name of a file") for name in NO_NAMES),
        *(({"files": {"a": digest}}, "no size and hash") for digest in NO_DIGESTS),
        *(({name: value}, f"what it has as {name} is") for name, values in NO_FIELDS.items() for value in values),
    ],
)
def test_a_manifest_with_a_right_seal_and_something_else_in_it_is_a_damage_too(
    folder: Path, change: dict[str, object], what: str
) -> None:
    plain = json.loads((folder / MANIFEST).read_text()) | change
    (folder / MANIFEST).write_text(_sealed(plain))
    (damage,) = damages(folder)
    assert damage.file == MANIFEST and what in damage.what and len(damage.what) < 200 and not is_whole(folder)


def test_a_file_that_is_read_without_a_look_at_the_manifest_has_to_be_in_it(folder: Path) -> None:
    files = {name: digest for name, digest in Manifest.read(folder).files.items() if name != "state.json"}
    Manifest(3, files).write(folder)
    (damage,) = damages(folder, needed=["state.json"])
    assert damage == Damage("state.json", "is not in the manifest")
    (folder / "state.json").unlink()
    assert damages(folder, needed=["state.json"]) == [damage] and damages(folder) == []


def test_a_manifest_of_a_later_format_names_the_version_that_wrote_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr("hrl.cluster.manifest.FORMAT", 7)
        Manifest(3, {}, hrl="9.1").write(folder)
    with pytest.raises(ManifestError, match=r"has format 7, this version of hrl reads 1.* version '9\.1'"):
        Manifest.read(folder)


def test_a_score_that_comes_later_changes_nothing_else(folder: Path) -> None:
    before = json.loads((folder / MANIFEST).read_text())
    Manifest.read(folder).with_score(0.75).write(folder)
    after = json.loads((folder / MANIFEST).read_text())
    assert {name for name in before if before[name] != after[name]} == {"score", "xxh3_128"}
    assert damages(folder) == [] and Manifest.read(folder).score == 0.75


def test_what_a_writer_took_as_it_wrote_is_what_reading_gives(tmp_path: Path) -> None:
    with DigestingFile(tmp_path / "file") as file:
        for part in (b"a" * 5_000_000, memoryview(b"bc"), b""):
            file.write(part)
    assert file.digest == FileDigest.of(tmp_path / "file") == FileDigest.of(tmp_path / "file", from_disk=True)
    assert file.digest.size == 5_000_002


def test_a_manifest_lists_what_was_written_even_if_the_disk_has_something_else(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(b"what the disk made of it")
    written = {
        tmp_path / "shard": FileDigest(4, xxh3_128_hexdigest(b"true")),
        tmp_path / "lost": FileDigest(0, "0" * 32),
    }
    Manifest.of(tmp_path, 1, written).write(tmp_path)
    assert [damage.file for damage in damages(tmp_path)] == ["lost", "shard"]
