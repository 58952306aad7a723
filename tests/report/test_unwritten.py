"""What is kept of writes that a disk refuses, in which order it is written, and what is lost first."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from hrl.report.unwritten import Unwritten


class Disk:
    def __init__(self) -> None:
        self.is_full = False
        self.has: list[str] = []

    def write(self, name: str) -> Callable[[], None]:
        def do() -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.has.append(name)

        return do


def test_what_is_refused_is_written_in_its_order_before_the_next() -> None:
    disk, unwritten = Disk(), Unwritten(is_kept=True)
    for name, waiting in (("a", 0), ("b", 1), ("c", 2), ("d", 0)):
        disk.is_full = name in "bc"
        unwritten.write(disk.write(name), 1)
        assert len(unwritten) == waiting and (unwritten.refusal is not None) == disk.is_full
    assert disk.has == ["a", "b", "c", "d"] and unwritten.lost == 0


def test_what_waits_can_be_written_without_anything_new() -> None:
    disk, unwritten = Disk(), Unwritten(is_kept=True)
    disk.is_full = True
    unwritten.write(disk.write("a"), 1)
    unwritten.try_again()
    assert len(unwritten) == 1 and str(unwritten.refusal) == "[Errno 28] No space left on device"
    disk.is_full = False
    unwritten.try_again()
    assert disk.has == ["a"] and not unwritten and unwritten.refusal is None


def test_the_largest_is_lost_first_and_counted() -> None:
    disk, unwritten = Disk(), Unwritten(is_kept=True, most_bytes=10)
    disk.is_full = True
    for name, size_bytes in (("line 1", 2), ("samples 1", 6), ("line 2", 2), ("samples 2", 5)):
        unwritten.write(disk.write(name), size_bytes)
    assert unwritten.lost == 1
    disk.is_full = False
    unwritten.try_again()
    assert disk.has == ["line 1", "line 2", "samples 2"]


def test_what_is_not_kept_is_raised_and_forgotten() -> None:
    disk, unwritten = Disk(), Unwritten(is_kept=False)
    disk.is_full = True
    with pytest.raises(OSError, match="No space left"):
        unwritten.write(disk.write("a"), 1)
    disk.is_full = False
    unwritten.write(disk.write("b"), 1)
    assert disk.has == ["b"] and not unwritten


def test_an_error_of_another_kind_is_raised_once() -> None:
    unwritten = Unwritten(is_kept=True)
    with pytest.raises(ValueError, match="damaged"):
        unwritten.write(lambda: (_ for _ in ()).throw(ValueError("damaged")), 1)
    assert not unwritten
