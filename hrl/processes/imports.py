"""Imports of large libraries."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports(*, freezes: bool = True) -> Iterator[None]:
    """Do without garbage collection while modules are imported, and leave what they made out of every later one.

    Modules leave nothing behind that a collection would find, and looking for it takes a fifth of the time that torch
    or vLLM takes to import.

    Args:
        freezes: Whether later collections leave out what there is at the end, if a module is new. Not in a process of
            somebody else's, in which that may be garbage of his that holds much memory.
    """
    was_enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        if freezes and len(sys.modules) > before:
            gc.freeze()
