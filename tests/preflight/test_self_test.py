"""The self-test of a machine: what passes here, and what a failure says."""

from __future__ import annotations

import shutil
from collections import namedtuple
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest

from hrl import cli
from hrl.models.ops import cpu_product
from hrl.preflight import self_test
from hrl.preflight.self_test import Outcome

Usage = namedtuple("Usage", "total used free")


def test_the_model_runs_and_the_cache_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HRL_CACHE", str(tmp_path / "cache"))
    assert self_test.cache().ok
    found = self_test.forward_and_backward()
    assert found.ok and "in bfloat16, loss" in found.detail


def test_a_user_without_a_home_is_told_to_name_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HRL_CACHE", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 123456789)
    found = self_test.cache()
    assert not found.ok and "no home folder" in found.detail and "HRL_CACHE" in found.remedy


def test_slower_logits_are_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_product, "obstacle", lambda: "the CPU has no bfloat16 instructions of AVX-512")
    slower = "float32 products, which are slower: the CPU has no bfloat16 instructions of AVX-512"
    assert self_test.logits() == Outcome("logits on a CPU", True, slower)
    monkeypatch.setattr(cpu_product, "obstacle", lambda: None)
    assert self_test.logits() == Outcome("logits on a CPU", True, "bfloat16 products")


def test_two_processes_add_their_numbers(tmp_path: Path) -> None:
    pair = [self_test._child(self_test._GLOO, str(rank), str(tmp_path / "store")) for rank in range(2)]
    assert self_test._processes(pair) == Outcome("two processes", True, "gloo added their numbers")


def test_a_full_disk_and_little_shared_memory_are_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 0, 1 << 29))
    for found in (self_test.disk(), self_test.shared()):
        assert not found.ok and found.remedy


def test_no_shared_memory_at_all_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory, "SharedMemory", none)
    found = self_test.shared()
    assert not found.ok and "No space left" in found.detail and "--shm-size" in found.remedy


def test_an_engine_that_can_t_be_imported_shows_its_error() -> None:
    found = self_test._engine(self_test._child("raise ImportError('libcudart.so is missing')"))
    assert not found.ok and "libcudart.so is missing" in found.detail
    assert not self_test._engine(None).ok


def test_a_failed_check_is_the_status_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [
        Outcome("disk", True, "900 GiB free"),
        Outcome("engine", False, "vLLM is not installed", "Install one."),
    ]
    monkeypatch.setattr(self_test, "self_test", lambda: iter(outcomes))
    assert cli.main(["env"]) == 1
    said = capsys.readouterr().out
    assert "ok      disk" in said and "failed  engine" in said and "Install one." in said
    assert cli.main(["env", "--json"]) == 1
