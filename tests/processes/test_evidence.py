"""A death is put down to memory only where the kernel says that it has killed since the run began."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hrl.processes import evidence


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files as the kernel has them: no container's count, and a machine that has killed seven so far."""
    counts = [(tmp_path / "memory.events", True), (tmp_path / "vmstat", False)]
    (tmp_path / "vmstat").write_text("pgfault 9\noom_kill 7\nnr_free 3\n")
    monkeypatch.setattr(evidence, "_counts", lambda: counts)
    monkeypatch.setattr(evidence, "_before", evidence.Kills(7, is_own=False))
    monkeypatch.setattr(evidence, "free_shared_memory", lambda: 8 << 30)
    return tmp_path


def test_what_happened_before_the_run_explains_nothing(machine: Path) -> None:
    assert evidence.oom_kills() == (7, False)
    assert evidence.why_memory_ended_it() is None


@pytest.mark.parametrize(
    ("killed", "told"),
    [
        (8, "has ended a process on this machine since the run began, and this may have been it: give"),
        (9, "has ended 2 processes on this machine since the run began, and this may have been one of them: give"),
    ],
)
def test_a_kill_since_then_may_have_been_anybodys_on_the_machine(machine: Path, killed: int, told: str) -> None:
    (machine / "vmstat").write_text(f"oom_kill {killed}\n")
    reason = evidence.why_memory_ended_it()
    assert reason is not None and told in reason and "hrl check" in reason


def test_a_kill_in_the_container_is_ours(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "memory.events").write_text("oom_kill 1\n")
    monkeypatch.setattr(evidence, "_before", evidence.Kills(0, is_own=True))
    reason = evidence.why_memory_ended_it()
    assert reason is not None and "has ended a process here since the run began: give" in reason


def test_a_run_counts_from_its_own_beginning(machine: Path) -> None:
    (machine / "vmstat").write_text("oom_kill 8\n")
    evidence.count_kills_from_now()
    assert evidence.why_memory_ended_it() is None
    (machine / "vmstat").write_text("oom_kill 9\n")
    assert "has ended a process on" in str(evidence.why_memory_ended_it())


def test_a_count_of_the_machine_is_not_compared_with_that_of_a_container(machine: Path) -> None:
    (machine / "memory.events").write_text("oom_kill 99\n")
    assert evidence.why_memory_ended_it() is None


def test_the_containers_own_count_goes_before_the_machines(machine: Path) -> None:
    (machine / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 2\noom_group_kill 0\n")
    (machine / "vmstat").write_text("oom_kill 99\n")
    assert evidence.oom_kills() == (2, True)


def test_full_shared_memory_is_told_with_what_is_free(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "free_shared_memory", lambda: 3 << 20)
    reason = evidence.why_memory_ended_it()
    assert reason is not None and "/dev/shm is full (3 MiB free)" in reason and "--shm-size" in reason


def test_where_nobody_counts_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "_counts", lambda: [(Path("/nowhere"), True)])
    monkeypatch.setattr(evidence, "free_shared_memory", lambda: None)
    assert evidence.oom_kills() is None and evidence.why_memory_ended_it() is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),
    ],
)
def test_an_exit_status_is_told_in_words(code: int, words: str) -> None:
    assert evidence.exit_in_words(code) == words


def test_the_last_error_that_was_printed_to_a_file_is_told_with_the_file(tmp_path: Path) -> None:
    program = (
        "import sys; from hrl.processes.evidence import printed_last\n"
        "print('(EngineCore pid=7) ERROR 11-28 [core.py:9] ValueError: the first', flush=True)\n"
        "print('(EngineCore pid=7) ERROR 11-28 [core.py:9] torch.OutOfMemoryError: head_dim=16', flush=True)\n"
        "print('(EngineCore pid=7) ERROR 11-28 EngineDeadError: See above for the root cause.', flush=True)\n"
        "print(printed_last(), file=sys.stderr)"
    )
    with (tmp_path / "out").open("wb") as out:
        told = subprocess.run([sys.executable, "-c", program], stdout=out, stderr=subprocess.PIPE, text=True).stderr
    assert told == f"its last error was torch.OutOfMemoryError: head_dim=16 (its output is in {tmp_path}/out)\n"
    quiet = "from hrl.processes.evidence import printed_last; print(printed_last())"
    seen = subprocess.run([sys.executable, "-c", quiet], capture_output=True, text=True)
    assert seen.stdout == "its last output is on stderr\n", "of a pipe nothing can be read"
