"""A death is put down to memory only where the kernel says that it has killed since the run began."""

from __future__ import annotations

from pathlib import Path

import pytest

from hrl.processes import evidence


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files as the kernel has them: no container's count, and a machine that has killed seven so far."""
    counts = [(tmp_path / "memory.events", "oom_kill"), (tmp_path / "vmstat", "oom_kill")]
    (tmp_path / "vmstat").write_text("pgfault 9\noom_kill 7\nnr_free 3\n")
    monkeypatch.setattr(evidence, "_counts", lambda: counts)
    monkeypatch.setattr(evidence, "_before", 7)
    monkeypatch.setattr(evidence, "free_shared_memory", lambda: 8 << 30)
    return tmp_path


def test_what_happened_before_the_run_explains_nothing(machine: Path) -> None:
    assert evidence.oom_kills() == 7
    assert evidence.why_memory_ended_it() is None


def test_a_kill_since_then_is_told_with_the_way_out(machine: Path) -> None:
    (machine / "vmstat").write_text("oom_kill 8\n")
    reason = evidence.why_memory_ended_it()
    assert reason is not None and "has ended a process here since the run began" in reason and "hrl check" in reason


def test_the_containers_own_count_goes_before_the_machines(machine: Path) -> None:
    (machine / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 2\noom_group_kill 0\n")
    (machine / "vmstat").write_text("oom_kill 99\n")
    assert evidence.oom_kills() == 2


def test_full_shared_memory_is_told_with_what_is_free(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "free_shared_memory", lambda: 3 << 20)
    reason = evidence.why_memory_ended_it()
    assert reason is not None and "/dev/shm is full (3 MiB free)" in reason and "--shm-size" in reason


def test_where_nobody_counts_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "_counts", lambda: [(Path("/nowhere"), "oom_kill")])
    monkeypatch.setattr(evidence, "free_shared_memory", lambda: None)
    assert evidence.oom_kills() is None and evidence.why_memory_ended_it() is None
