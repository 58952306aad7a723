"""Processes that need not import torch and transformers, which takes seconds of a core in each.

They are forks of one process per test session that has imported these and run nothing. What they run is imported anew,
as in a process that was spawned; their environment is that of the session's first one.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import BaseContext

METHOD = "forkserver"


def warm_context() -> BaseContext:
    """A context of `multiprocessing`, in place of `spawn`."""
    context = multiprocessing.get_context(METHOD)
    context.set_forkserver_preload(["tests.processes.warm_imports"])
    return context
