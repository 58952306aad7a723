"""Several things done at once, in threads that end with the process.

`concurrent.futures` joins its threads when the process ends. One that hangs in a file system or a network that does not
answer would keep a run from ending, whatever deadline its caller has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_threads(
    work: Callable[[T], R], items: Iterable[T], count: int, name: str, begin: Callable[[], object] | None = None
) -> list[R]:
    """Return what `work` makes of each item, in order, or raise the first error.

    After an error, or an interruption of the caller, no thread begins another item. An error is raised once those that
    were begun have ended.

    Args:
        work: Is called with an item.
        items: Are handed out in order.
        count: How many threads there are at most.
        name: Of the threads.
        begin: Is called in each thread before its first item.
    """
    waiting: SimpleQueue[tuple[int, T]] = SimpleQueue()
    for numbered in enumerate(items):
        waiting.put(numbered)
    results: dict[int, R] = {}
    errors: list[BaseException] = []
    is_over = threading.Event()

    def run() -> None:
        try:
            if begin is not None:
                begin()
            while not is_over.is_set():
                place, item = waiting.get_nowait()
                results[place] = work(item)
        except Empty:
            return
        except BaseException as error:  # noqa: BLE001  raised again below
            errors.append(error)
            is_over.set()

    threads = [threading.Thread(target=run, name=name, daemon=True) for _ in range(min(count, waiting.qsize()))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        is_over.set()
    if errors:
        raise errors[0]
    return [results[place] for place in sorted(results)]
