"""Ranges with names, for the traces of a profiler: phases, micro-batches, forward, backward, optimizer steps.

A range costs a function call while no profile is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import record_function

#: Prefix of the name of a range that is a phase: a method of a worker, as the driver calls it.
PHASE = "phase: "
#: The range around an optimizer step, whose operators are all counted as the optimizer's.
OPTIMIZER = "optimizer step"
CHECKSUM = "checksum"

_NOTHING = nullcontext()
_mark: Callable[[str], AbstractContextManager[object]] | None = None


def span(name: str) -> AbstractContextManager[object]:
    """Return a context manager that marks its block on the trace, if a profile is being taken."""
    return _NOTHING if _mark is None else _mark(name)


def phase_span(name: str) -> AbstractContextManager[object]:
    """Mark a phase, by which the table of a profile tells operators apart."""
    return _NOTHING if _mark is None else _mark(PHASE + name)


def mark_spans(*, with_nvtx: bool) -> None:
    """Let ranges appear on traces from now on.

    Args:
        with_nvtx: Also as NVTX ranges, which Nsight Systems shows.
    """
    global _mark
    _mark = _both if with_nvtx else record_function


def ignore_spans() -> None:
    """Let ranges cost nothing again."""
    global _mark
    _mark = None


@contextmanager
def _both(name: str) -> Iterator[None]:
    with record_function(name), torch.cuda.nvtx.range(name):
        yield
