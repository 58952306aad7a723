"""Signals that end a command."""

from __future__ import annotations

import signal


def interrupt_on_signals() -> None:
    """Have SIGINT and SIGTERM raise `KeyboardInterrupt`, so that everything that was started is ended.

    SIGINT is set explicitly too, since a background job of a shell starts with SIGINT ignored. Call it in the main
    thread, before anything that has to be undone, such as a hidden cursor.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
