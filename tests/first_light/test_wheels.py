"""Wheels arrive bit for bit, or not at all."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.first_light import wheels
from tests.first_light.wheels import MANIFEST, PiecesError, join, pins, split


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """A large one, one of exactly two pieces, one smaller than a piece."""
    made = []
    for name, size in (("large-1.whl", 2500), ("even-1.whl", 2000), ("small-1.whl", 3)):
        path = tmp_path / "wheels" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(hashlib.shake_256(name.encode()).digest(size))
        made.append(path)
    return made


def test_pieces_join_bit_exactly(files: list[Path], tmp_path: Path) -> None:
    split(files, tmp_path / "pieces", 1000)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "pieces").iterdir() if path.name != MANIFEST}
    assert sizes == {
        "even-1.whl.000": 1000,
        "even-1.whl.001": 1000,
        "large-1.whl.000": 1000,
        "large-1.whl.001": 1000,
        "large-1.whl.002": 500,
        "small-1.whl.000": 3,
    }
    joined = join(tmp_path / "pieces", tmp_path / "joined")
    assert {path.name: path.read_bytes() for path in joined} == {path.name: path.read_bytes() for path in files}


def test_damage_is_named(files: list[Path], tmp_path: Path) -> None:
    pieces = tmp_path / "pieces"
    split(files, pieces, 1000)
    with pytest.raises(PiecesError, match="holds no manifest"):
        join(tmp_path, tmp_path / "joined")
    data = bytearray((pieces / "large-1.whl.001").read_bytes())
    data[17] ^= 1
    (pieces / "large-1.whl.001").write_bytes(data)
    with pytest.raises(PiecesError, match=r"large-1\.whl\.001 arrived with another checksum"):
        join(pieces, tmp_path / "joined")
    (pieces / "large-1.whl.001").unlink()
    with pytest.raises(PiecesError, match=r"1 pieces are missing .* first large-1\.whl\.001"):
        join(pieces, tmp_path / "joined")


def test_pieces_in_another_order_are_noticed(files: list[Path], tmp_path: Path) -> None:
    pieces = tmp_path / "pieces"
    split(files, pieces, 1000)
    manifest = json.loads((pieces / MANIFEST).read_text())
    manifest["files"][1]["pieces"].reverse()
    (pieces / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(PiecesError, match=r"large-1\.whl has another checksum than the file that was cut"):
        join(pieces, tmp_path / "joined")


def test_what_the_other_machine_has_is_not_carried(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("# made by hand\ntorch==2.11.0\nPy_Yaml==6.0\nvllm==0.25.1\n\n")
    (tmp_path / "freeze").write_text("torch @ file:///wheels/torch.whl\npy.yaml==5.4\n")
    assert pins(tmp_path / "lock") == ["torch==2.11.0", "Py_Yaml==6.0", "vllm==0.25.1"]
    assert pins(tmp_path / "lock", tmp_path / "freeze") == ["vllm==0.25.1"]


def test_a_wheel_is_installed_from_its_pieces_without_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "hrl_carried-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("hrl_carried.py", "ARRIVED = True\n")
        archive.writestr(
            "hrl_carried-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: hrl-carried\nVersion: 1.0\n"
        )
        archive.writestr(
            "hrl_carried-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("hrl_carried-1.0.dist-info/RECORD", "")
    split([wheel], tmp_path / "pieces", 100)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    wheels.main(["install", str(tmp_path / "pieces"), "--target", str(tmp_path / "site")])
    found = subprocess.run(
        [sys.executable, "-c", "import hrl_carried; print(hrl_carried.ARRIVED)"],
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.stdout == "True\n", found.stderr
