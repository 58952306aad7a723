"""Processes that must not outlive others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import psutil
import pytest

from hrl.workers.rollout.lifeline import ProcessLife, die_with_parent


def _child(pids) -> None:
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pids.send(os.getpid())
    time.sleep(60)


def _parent(pids) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(pids,))
    child.start()
    child.join()


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def started(target) -> tuple[multiprocessing.Process, int]:
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(writer,))
    process.start()
    assert reader.poll(60)
    return process, reader.recv()


def test_a_child_dies_with_a_parent_that_gets_sigkill():
    parent, child = started(_parent)

    os.kill(parent.pid, signal.SIGKILL)
    parent.join(10)

    deadline = time.monotonic() + 5
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not lives(child)


def test_a_process_that_does_not_leave_is_ended():
    process, pid = started(_child)
    life = ProcessLife(pid)

    begun = time.monotonic()
    life.end(grace_s=0.2)

    assert 0.2 <= time.monotonic() - begun < 5
    process.join(5)
    assert process.exitcode == -signal.SIGKILL


def test_only_children_of_multiprocessing_can_die_with_their_parent():
    with pytest.raises(RuntimeError, match="started by multiprocessing"):
        die_with_parent()
