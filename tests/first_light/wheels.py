"""Wheels for a machine without a network: prepared where there is one, carried over in pieces, joined and installed.

On a machine that reaches a package index::

    python -m tests.first_light.wheels prepare --lock requirements/gpu-torch2.11.lock --python 3.12 \\
        --have freeze.txt --out pieces

``freeze.txt`` is ``pip freeze`` of the other machine: what it has is not carried. On the other machine::

    python -m tests.first_light.wheels install pieces

Only the standard library and pip are used, on both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PIECE_BYTES = 60 << 20
MANIFEST = "manifest.json"
#: Tags that a machine with glibc 2.39 takes; a package's newest wheel may have any of them.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)] + [
    "manylinux1_x86_64",
    "manylinux2010_x86_64",
    "manylinux2014_x86_64",
    "linux_x86_64",
]


class PiecesError(RuntimeError):
    """A piece is missing or not what was prepared. The message names it."""


def split(files: Iterable[Path], out: Path, piece_bytes: int = PIECE_BYTES) -> None:
    """Writes every file in pieces of at most ``piece_bytes`` to ``out``, with a manifest of all checksums."""
    out.mkdir(parents=True, exist_ok=True)
    entries = []
    for file in sorted(files):
        whole, pieces = hashlib.sha256(), []
        for number, piece in enumerate(_pieces_of(file, piece_bytes)):
            name = f"{file.name}.{number:03d}"
            (out / name).write_bytes(piece)
            whole.update(piece)
            pieces.append({"name": name, "bytes": len(piece), "sha256": hashlib.sha256(piece).hexdigest()})
        entries.append({"name": file.name, "sha256": whole.hexdigest(), "pieces": pieces})
    (out / MANIFEST).write_text(json.dumps({"files": entries}, indent=1) + "\n")


def join(pieces: Path, out: Path) -> list[Path]:
    """Puts the files together again.

    Raises:
        PiecesError: there is no manifest, or a piece or a file is missing or has another checksum.
    """
    if not (pieces / MANIFEST).is_file():
        raise PiecesError(f"{pieces} holds no {MANIFEST}: it is not a folder that `prepare` wrote")
    entries: list[dict[str, Any]] = json.loads((pieces / MANIFEST).read_text())["files"]
    missing = [piece["name"] for e in entries for piece in e["pieces"] if not (pieces / piece["name"]).is_file()]
    if missing:
        raise PiecesError(f"{len(missing)} pieces are missing in {pieces}, first {missing[0]}")
    out.mkdir(parents=True, exist_ok=True)
    joined = []
    for entry in entries:
        target, whole = out / entry["name"], hashlib.sha256()
        with target.open("wb") as file:
            for piece in entry["pieces"]:
                data = (pieces / piece["name"]).read_bytes()
                if hashlib.sha256(data).hexdigest() != piece["sha256"]:
                    raise PiecesError(f"{piece['name']} arrived with another checksum: carry it over again")
                whole.update(data)
                file.write(data)
        if whole.hexdigest() != entry["sha256"]:
            raise PiecesError(f"{entry['name']} has another checksum than the file that was cut")
        joined.append(target)
    return joined


def pins(lock: Path, have: Path | None = None) -> list[str]:
    """The lock's lines, without packages that the other machine has."""
    wanted = [line.strip() for line in lock.read_text().splitlines() if line.strip() and not line.startswith("#")]
    there = set() if have is None else {_name(line) for line in have.read_text().splitlines()}
    return [pin for pin in wanted if _name(pin) not in there]


def prepare(wanted: list[str], python: str, out: Path, build: Iterable[str] = ()) -> None:
    """Downloads wheels for another Python and cuts them.

    Args:
        wanted: ``name==version`` lines.
        python: the other machine's, ``"3.12"``.
        out: folder of the pieces.
        build: names that have no wheel; built here from source, by a Python of the same version if they compile.
    """
    made_here = {_name(name) for name in build}
    tag = f"cp{python.replace('.', '')}"
    with tempfile.TemporaryDirectory() as folder:
        platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
        target = ["--python-version", python, "--implementation", "cp", "--abi", tag, "--abi", "abi3", "--abi", "none"]
        common = ["--no-deps", "--quiet"]
        ready = [pin for pin in wanted if _name(pin) not in made_here]
        _pip("download", *common, "--only-binary", ":all:", *target, *platforms, "--dest", folder, *ready)
        own = [pin for pin in wanted if _name(pin) in made_here]
        if own:
            _pip("wheel", *common, "--wheel-dir", folder, *own)
        split(Path(folder).glob("*.whl"), out)


def install(pieces: Path, target: Path | None = None) -> None:
    """Joins, verifies and installs, without any index."""
    with tempfile.TemporaryDirectory() as folder:
        wheels = join(pieces, Path(folder))
        where = [] if target is None else ["--target", str(target)]
        _pip("install", "--no-index", "--no-deps", *where, *map(str, wheels))


def _pieces_of(file: Path, piece_bytes: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while piece := stream.read(piece_bytes):
            yield piece


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[ =<>!~;@\[]", requirement.strip(), maxsplit=1)[0]).lower()


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def main(arguments: list[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    there = commands.add_parser("prepare")
    there.add_argument("--lock", type=Path, required=True)
    there.add_argument("--python", default="3.12")
    there.add_argument("--have", type=Path)
    there.add_argument("--build", action="append", default=[], metavar="NAME")
    there.add_argument("--without", action="append", default=[], metavar="NAME")
    there.add_argument("--out", type=Path, default=Path("pieces"))
    here = commands.add_parser("install")
    here.add_argument("pieces", type=Path)
    here.add_argument("--target", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "install":
        return install(given.pieces, given.target)
    left_out = {_name(name) for name in given.without}
    wanted = [pin for pin in pins(given.lock, given.have) if _name(pin) not in left_out]
    shutil.rmtree(given.out, ignore_errors=True)
    return prepare(wanted, given.python, given.out, given.build)


if __name__ == "__main__":
    main()
