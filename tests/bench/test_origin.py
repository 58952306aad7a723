"""`bench.origin`: the commit of a figure says whether the tree had changes besides."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import origin


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit."""
    monkeypatch.setattr(origin, "ROOT", tmp_path)
    for variable in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "code.py").write_text("1\n")
    (tmp_path / "bench" / "RESULTS.md").write_text("# Results\n")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "one")):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_a_clean_tree_is_its_commit(repository: Path) -> None:
    command = ["git", "-C", str(repository), "rev-parse", "--short", "HEAD"]
    assert origin.commit() == subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_changed_or_a_new_file_is_a_plus(repository: Path) -> None:
    clean = origin.commit()
    (repository / "new.py").write_text("2\n")
    assert origin.commit() == f"{clean}+"
    (repository / "new.py").unlink()
    (repository / "code.py").write_text("2\n")
    assert origin.commit() == f"{clean}+"


def test_what_benchmarks_write_is_no_change(repository: Path) -> None:
    clean = origin.commit()
    (repository / "bench" / "RESULTS.md").write_text("other\n")
    (repository / "bench" / "results" / "gae.json").write_text("{}\n")
    assert origin.commit() == clean


def test_without_a_repository_the_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert origin.commit() == "unknown"


def test_threads_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert origin.threads() == 3
