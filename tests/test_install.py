"""What is installed: the wheel is whole, its extras are those that are named, every Python it allows can read it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hrl.report.tracking import TRACKERS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
METADATA = PROJECT["project"]
EXTRAS = METADATA["optional-dependencies"]
PYTHONS = [f"3.{minor}" for minor in range(8, 20) if f"3.{minor}" in SpecifierSet(METADATA["requires-python"])]
#: Modules of the standard library that are gone in Python 3.12 and 3.13 (PEP 594, 632).
GONE = {
    "aifc",
    "asynchat",
    "asyncore",
    "audioop",
    "cgi",
    "cgitb",
    "chunk",
    "crypt",
    "distutils",
    "imghdr",
    "imp",
    "lib2to3",
    "mailcap",
    "msilib",
    "nis",
    "nntplib",
    "ossaudiodev",
    "pipes",
    "smtpd",
    "sndhdr",
    "spwd",
    "sunau",
    "telnetlib",
    "uu",
    "xdrlib",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, by the backend that pip and uv call."""
    folder = tmp_path_factory.mktemp("wheel")
    code = f"from hatchling.build import build_wheel; build_wheel({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("hrl-*.whl")
    return found


def names_below(folder: str) -> set[str]:
    """The files of a folder that git would track."""
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in path.parts
    }


def test_the_wheel_has_the_package_with_its_data_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names_below("hrl") <= names
    assert {f"hrl/_configs/{name.removeprefix('configs/')}" for name in names_below("configs")} <= names
    assert {name.split("/")[0] for name in names} == {"hrl", f"hrl-{METADATA['version']}.dist-info"}


def test_hrl_runs_from_an_unpacked_wheel_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    installed, work = tmp_path / "installed", tmp_path / "work"
    zipfile.ZipFile(wheel).extractall(installed)
    work.mkdir()
    entry = re.search(r"hrl = (\S+):(\w+)", (next(installed.glob("*.dist-info")) / "entry_points.txt").read_text())
    assert entry is not None
    for arguments, says in ((["--help"], "hrl COMMAND"), (["check", "--config-only", "recipe=ppo"], "is valid")):
        start = (
            f"import sys; sys.path.insert(0, {str(installed)!r}); import hrl; "
            f"assert hrl.__file__.startswith({str(installed)!r}), hrl.__file__; "
            f"from {entry[1]} import {entry[2]} as main; sys.exit(main({arguments!r}))"
        )
        command = [sys.executable, "-P", "-c", start]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        assert says in done.stdout


def test_every_extra_is_named_where_a_reader_looks_for_it_and_no_other() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    table = "".join(line for line in text.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([a-z][a-z-]+)`", table.replace("`trainer.logger`", ""))) & set(EXTRAS) == set(EXTRAS) - {
        "dev"
    }
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for extras in re.findall(r"(?:hrl|'\.|\.whl|-e \.)\[([a-z0-9,-]+)\]", document.read_text()):
            assert set(extras.split(",")) <= set(EXTRAS), document


def test_every_tracker_has_an_extra_of_its_name() -> None:
    assert set(TRACKERS) <= set(EXTRAS)


def test_the_locks_have_what_the_project_requires() -> None:
    for lock, engine in (("cpu", "cpu"), ("gpu", "gpu"), ("gpu-torch2.11", "gpu")):
        lines = (line.split("==") for line in (ROOT / "requirements" / f"{lock}.lock").read_text().split())
        pins = {name.lower().replace("_", "-"): version for name, version in lines}
        wanted = [*METADATA["dependencies"], *EXTRAS[engine], *EXTRAS["data"], *EXTRAS["language"], *EXTRAS["math"]]
        for requirement in map(Requirement, wanted):
            name = requirement.name.lower().replace("_", "-")
            assert requirement.specifier.contains(pins.get(name, "0"), prereleases=True), f"{lock}: {requirement}"


def test_building_the_package_needs_only_what_the_install_has() -> None:
    """The checkout is installed without build isolation, from the lock of those who do not test."""
    pins = {line.split("==")[0] for line in (ROOT / "requirements" / "cpu.lock").read_text().split()}
    assert {"hatchling", "editables", "packaging", "pathspec", "pluggy", "tomlkit", "trove-classifiers"} <= pins


def test_classifiers_and_tools_say_the_pythons_that_are_allowed() -> None:
    said = re.findall(r"Python :: (3\.\d+)", "\n".join(METADATA["classifiers"]))
    assert said == PYTHONS
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + PYTHONS[0].replace(".", "")
    assert PROJECT["tool"]["mypy"]["python_version"] == PYTHONS[0]
    for document in ("docs/install.md",):
        assert all(python in (ROOT / document).read_text() for python in PYTHONS)


def test_every_file_is_syntax_of_the_oldest_python_and_imports_nothing_that_the_newest_lacks() -> None:
    oldest = (3, int(PYTHONS[0].split(".")[1]))
    for path in sorted((ROOT / "hrl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), feature_version=oldest)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            assert not {name.split(".")[0] for name in names} & GONE, path
