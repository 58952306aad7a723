"""The engine process that is there before vLLM asks for it: it runs what it is given, and ends when nobody does."""

import multiprocessing
import os
from pathlib import Path

import pytest

from hrl.workers.rollout.early_process import EarlyProcess


def write_down(path: str, text: str) -> None:
    Path(path).write_text(f"{text} {os.environ['HRL_TEST_LATE']} {os.getppid()}")


@pytest.mark.engine
def test_it_runs_what_it_is_given_with_the_environment_of_that_moment(tmp_path, monkeypatch):
    process = EarlyProcess("EngineCore")
    monkeypatch.setenv("HRL_TEST_LATE", "late")
    process.give(write_down, {"path": str(tmp_path / "found"), "text": "done"})
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "found").read_text() == f"done late {os.getpid()}"


@pytest.mark.engine
def test_without_work_it_ends():
    process = EarlyProcess("EngineCore")
    process.end(60)
    assert process.exitcode == 0 and process not in multiprocessing.active_children()


def test_one_that_has_ended_is_named_with_its_exit_code(tmp_path):
    process = EarlyProcess("EngineCore")
    process.kill()
    process.join(60)
    process.give(write_down, {"path": str(tmp_path / "found"), "text": "done"})
    with pytest.raises(ChildProcessError, match="^its process ended with exit code -9 before it had work$"):
        process.start()
