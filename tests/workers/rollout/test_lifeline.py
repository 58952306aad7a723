"""The end of processes that are not this one's own to join."""

from __future__ import annotations

import multiprocessing
import signal
import time

from hrl.workers.rollout.lifeline import ProcessLife


def _stubborn(ready) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(60)


def test_a_process_that_does_not_leave_is_ended():
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_stubborn, args=(ready,))
    process.start()
    assert ready.wait(60)
    life = ProcessLife(process.pid)

    begun = time.monotonic()
    life.end(grace_s=0.2)

    assert 0.2 <= time.monotonic() - begun < 5
    process.join(5)
    assert process.exitcode == -signal.SIGKILL
