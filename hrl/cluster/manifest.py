"""The file `manifest.json` of a checkpoint: what the folder holds, and the proof that it still does.

It is written last. It lists every other file of the folder with its size and hash, the step, how good its validation
was, and the version of hrl; and it has a hash of itself. So a folder with a manifest was written to its end, and
`damages` finds whatever has happened to it since: a file that is gone, cut, changed or added, the manifest itself too.

`is_whole` is cheap (names and sizes), `damages` reads everything. Names of files are relative to the folder, with `/`.
What can't be read is no damage, see `hrl.cluster.patience`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from xxhash import xxh3_128_hexdigest

from hrl import __version__
from hrl.cluster.patience import UnreadableError, patiently
from hrl.cluster.threads import in_threads
from hrl.errors import HrlError
from hrl.files import make_durable, write_whole
from hrl.report.run_folder import is_number
from hrl.workers.engine.background import give_way
from hrl.workers.engine.digest import FileDigest

MANIFEST = "manifest.json"
FORMAT = 1
#: How the names of files end that torch takes for shards, whatever they begin with.
TENSORS = ".safetensors"
_SELF = "xxh3_128"
#: Files that are read at a time: one thread hashes faster than a disk delivers, and network disks deliver several files
#: faster than one.
_READERS = 4


class ManifestError(HrlError, ValueError):
    """A manifest is missing, damaged, or of another format; `damages` returns it as a damage."""


class Damage(NamedTuple):
    """Something about a folder that is not as its manifest says.

    Attributes:
        file: Relative to the folder.
        what: The predicate of a sentence whose subject is the file.
        is_foreign: Whether the manifest does not know the file, so that all that was written may still be right.
    """

    file: str
    what: str
    is_foreign: bool = False

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's folder holds.

    Attributes:
        step: Whose checkpoint it is.
        files: Every file but the manifest, by its name relative to the folder.
        score: How good the validation of the step was, more being better; None without one.
        hrl: The version that wrote it.
    """

    step: int
    files: Mapping[str, FileDigest]
    score: float | None = None
    hrl: str = __version__

    @classmethod
    def of(
        cls, folder: Path, step: int, known: Mapping[Path, FileDigest] | None = None, score: float | None = None
    ) -> Manifest:
        """Return the manifest of a folder as it is now.

        Args:
            folder: All files below it are listed; an older manifest is not.
            step: Whose checkpoint it is.
            known: Digests that those who wrote the files have taken; all other files are read.
            score: See above.
        """
        files = {path.relative_to(folder).as_posix(): digest for path, digest in (known or {}).items()}
        for name, path in _files_below(folder):
            if name not in files:
                files[name] = FileDigest.of(path)
        return cls(step, files, score)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of a folder.

        Raises:
            ManifestError: There is none, or it is not, to the byte, what `write` wrote.
            UnreadableError: It can't be read.
        """
        file = folder / MANIFEST
        try:
            text = patiently(lambda: file.read_text(encoding="utf-8"), file)
        except FileNotFoundError as error:
            raise ManifestError(f"{file} is missing: the folder was not written, or not copied, to its end") from error
        except OSError as error:
            raise ManifestError(f"{file} is no file: {error.strerror or error}") from error
        except ValueError as error:
            raise ManifestError(f"{file} is damaged: {error}") from error
        return cls.parse(text, str(file))

    @classmethod
    def parse(cls, text: str, file: str) -> Manifest:
        """Return the manifest that a text is.

        Args:
            text: What a file holds.
            file: Its name, for errors.

        Raises:
            ManifestError: It is not, to the byte, what `write` wrote.
        """
        try:
            plain = json.loads(text)
            if isinstance(plain, dict) and plain.get("format", FORMAT) != FORMAT and text == _sealed(plain):
                raise ManifestError(
                    f"{file} has format {plain['format']!r:.40}, this version of hrl reads {FORMAT}: it was written "
                    f"by version {plain.get('hrl')!r:.40}, which can continue it"
                )
            manifest = cls._of_plain(plain)
        except ManifestError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ManifestError(f"{file} is damaged: {' '.join(str(error).split())}") from error
        if text != manifest.text:
            raise ManifestError(f"{file} is damaged: it is not what was written")
        return manifest

    @classmethod
    def _of_plain(cls, plain: Any) -> Manifest:
        step, score, hrl, files = (plain[name] for name in ("step", "score", "hrl", "files"))
        kinds = {
            "step": isinstance(step, int) and not isinstance(step, bool) and step >= 0,
            "score": score is None or is_number(score),
            "hrl": isinstance(hrl, str),
            "files": isinstance(files, dict),
        }
        for name, is_right in kinds.items():
            if not is_right:
                raise TypeError(f"what it has as {name} is something else")
        for name in files:
            if not is_name_below(name):
                raise ValueError(f"{name!r:.80} is no name of a file below the folder")
        return cls(step, {name: FileDigest.of_plain(digest) for name, digest in files.items()}, score, hrl)

    @property
    def text(self) -> str:
        """The text of the file."""
        files = {name: digest.to_plain() for name, digest in self.files.items()}
        plain = {"format": FORMAT, "step": self.step, "score": self.score, "hrl": self.hrl, "files": files}
        return _sealed(plain)

    @property
    def size(self) -> int:
        """Bytes of all files, the manifest left out."""
        return sum(digest.size for digest in self.files.values())

    def with_score(self, score: float | None) -> Manifest:
        """Return the manifest of the same files with another score."""
        return replace(self, score=score)

    def write(self, folder: Path) -> Path:
        """Write it to the folder, durably and all at once, and return the file."""
        file = write_whole(folder / MANIFEST, self.text, durable=True)
        make_durable(folder)
        return file


def is_name_below(name: Any) -> bool:
    """Return whether a value names a file below a folder as a manifest does; what a terminal can't show is no name."""
    if not isinstance(name, str) or not name.isprintable():
        return False
    path = PurePosixPath(name)
    return path.as_posix() == name and path.parts != () and not path.is_absolute() and ".." not in path.parts


def is_whole(folder: Path) -> bool:
    """Return whether a folder has a manifest, and every file that it lists with its size. No content is read."""
    try:
        files = Manifest.read(folder).files
        return not any(damage_by_size(folder, name, digest.size) for name, digest in files.items())
    except (ManifestError, UnreadableError):
        return False


def damages(
    folder: Path, *parts: str, needed: Collection[str] = (), from_disk: bool = False, gives_way: bool = False
) -> list[Damage]:
    """Compare a folder with its manifest; return what is wrong, in the order of the files' names.

    Args:
        folder: Of a checkpoint; everything in it is read, by a few threads.
        *parts: Folders and files in it, such as `hf`, to look at alone; without one, everything.
        needed: Files that the manifest has to list, because somebody reads them without a look at it.
        from_disk: Whether to read from the disk what the system still has in memory, see `FileDigest.of`.
        gives_way: Whether the threads have the lowest priority.

    Raises:
        UnreadableError: A file can't be read, so nobody can tell whether it is right.
    """
    try:
        manifest = Manifest.read(folder)
    except ManifestError as error:
        return [Damage(MANIFEST, str(error).removeprefix(f"{folder / MANIFEST} "))]
    listed = {name: digest for name, digest in manifest.files.items() if _is_in(name, parts)}
    there = {name for name, _ in patiently(lambda: list(_files_below(folder)), folder) if _is_in(name, parts)}
    foreign = [
        Damage(name, "is not in the manifest", is_foreign=name not in needed)
        for name in (there | {*needed}) - listed.keys()
    ]
    compared = in_threads(
        lambda item: _compare(folder, *item, from_disk=from_disk),
        listed.items(),
        _READERS,
        "verifying",
        begin=give_way if gives_way else None,
    )
    return sorted([*foreign, *(damage for damage in compared if damage is not None)])


def describe(found: Iterable[Damage]) -> str:
    """Return damages in words: the first, and how many more there are."""
    first, *others = [str(damage) for damage in found]
    return first + (f" (and {len(others)} more)" if others else "")


def _compare(folder: Path, name: str, digest: FileDigest, *, from_disk: bool) -> Damage | None:
    damage = damage_by_size(folder, name, digest.size)
    if damage is not None:
        return damage
    path = folder / name
    found = patiently(lambda: FileDigest.of(path, from_disk=from_disk), path)
    if found.size != digest.size:
        return Damage(name, _other_size(found.size, digest.size))
    if found.xxh3_128 != digest.xxh3_128:
        return Damage(name, f"is not what was written: its xxh3 is {found.xxh3_128}, and was {digest.xxh3_128}")
    return None


def damage_by_size(folder: Path, name: str, written: int) -> Damage | None:
    """Compare the size of a file with what was written, in bytes; its content is not read.

    Raises:
        UnreadableError: The file system does not say.
    """
    path = folder / name
    try:
        found = patiently(path.stat, path)
    except OSError:
        return Damage(name, "is missing")
    if not stat.S_ISREG(found.st_mode):
        return Damage(name, "is no file")
    return None if found.st_size == written else Damage(name, _other_size(found.st_size, written))


def _other_size(found: int, written: int) -> str:
    return f"has {found} bytes, of {written} that were written"


def _files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield every file below a folder but the manifest.

    What begins with a dot belongs to the system, not to hrl; but for tensors, since torch reads every file of theirs.
    """
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if (not name.startswith(".") or name.endswith(TENSORS)) and path != folder / MANIFEST:
                yield path.relative_to(folder).as_posix(), path


def _refuse(error: OSError) -> None:
    """Let a walk end at a folder that can't be read; by itself it would leave the folder out without a word."""
    raise error


def _is_in(name: str, parts: Collection[str]) -> bool:
    return not parts or any(name == part or name.startswith(f"{part}/") for part in parts)


def _sealed(plain: Mapping[str, Any]) -> str:
    """Return the text of a manifest, with a hash of the rest of it."""
    body = {name: value for name, value in plain.items() if name != _SELF}
    seal = xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
    return json.dumps({**body, _SELF: seal}, indent=1, sort_keys=True) + "\n"
