"""Work in several threads: in order, to the first error, and never in the way of the end of the process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from hrl.cluster.threads import in_threads


def test_results_have_the_order_of_their_items_whichever_is_done_first() -> None:
    def work(item: int) -> int:
        time.sleep(0.02 * (5 - item))
        return item * item

    assert in_threads(work, range(6), 3, "squares") == [0, 1, 4, 9, 16, 25]
    assert in_threads(work, [], 3, "none") == []


def test_after_an_error_nothing_more_is_begun_and_what_was_begun_has_ended() -> None:
    begun, ended, both = [], [], threading.Barrier(2)

    def work(item: int) -> None:
        begun.append(item)
        both.wait(10)
        if item == 0:
            raise OSError("the first")
        time.sleep(0.1)
        ended.append(item)

    with pytest.raises(OSError, match="the first"):
        in_threads(work, range(100), 2, "failing")
    assert sorted(begun) == [0, 1] and ended == [1]


def test_each_thread_begins_once() -> None:
    begun: list[str] = []
    in_threads(lambda _: None, range(9), 3, "begun", begin=lambda: begun.append(threading.current_thread().name))
    assert begun == ["begun"] * 3


def test_a_thread_that_hangs_keeps_no_process_from_its_end() -> None:
    source = (
        "import threading, time\n"
        "from hrl.cluster.threads import in_threads\n"
        "hang = lambda: in_threads(time.sleep, [1000.0] * 2, 2, 'hanging')\n"
        "caller = threading.Thread(target=hang, daemon=True)\n"
        "caller.start()\n"
        "caller.join(0.2)\n"
        "print(caller.is_alive())\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
