"""Profile this process: start torch's profiler, and write the trace and sum up what it saw when it stops."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hrl.profiling.operators import BETWEEN, Event, Profile, profile_of
from hrl.profiling.spans import ignore_spans, mark_spans

#: Set by Nsight Systems in the processes that it watches.
_NSIGHT = "NSYS_PROFILING_SESSION_ID"

_running: profile | None = None


def start_profile() -> None:
    """Profile all threads of this process from now on; what an earlier start has seen is dropped.

    Under Nsight Systems, which must have the device's events for itself, torch's profiler sees the host alone, ranges
    are NVTX ranges as well, and the capture range of CUDA's profiler interface begins
    (`nsys profile --capture-range=cudaProfilerApi`).
    """
    global _running
    if _running is not None:
        _end(_running)
    # Its libraries announce each start and stop on standard error, whatever the level.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    on_gpu, nsight = torch.cuda.is_available(), _NSIGHT in os.environ
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu and not nsight else [])]
    _running = profile(
        activities=activities,
        record_shapes=True,  # from which the operations of a product are counted
        with_flops=True,
        experimental_config=_ExperimentalConfig(profile_all_threads=True),  # an engine samples on its own
    )
    mark_spans(with_nvtx=on_gpu)
    if on_gpu and nsight:
        torch.cuda.profiler.start()
    _running.start()


def stop_profile(trace: Path, rest: str = BETWEEN) -> Profile:
    """Stop, write the trace, and return what the time was spent on.

    Args:
        trace: The file, ending in `.json.gz`; Perfetto and chrome://tracing load it.
        rest: The phase of what ran in none.

    Raises:
        RuntimeError: No profile is being taken.
        OSError: The trace can't be written.
    """
    global _running
    taken, _running = _running, None
    if taken is None:
        raise RuntimeError("no profile is being taken in this process: call start_profile() first")
    _end(taken)
    trace.parent.mkdir(parents=True, exist_ok=True)
    # Under its own name only when it is whole.
    with tempfile.TemporaryDirectory(dir=trace.parent, prefix=".") as folder:
        taken.export_chrome_trace(str(Path(folder) / trace.name))
        (Path(folder) / trace.name).replace(trace)
    return profile_of(_events(taken), rest)


def _end(taken: profile) -> None:
    ignore_spans()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # kernels that are under way belong to the profile
        if _NSIGHT in os.environ:
            torch.cuda.profiler.stop()
    taken.stop()


def _events(taken: profile) -> Iterator[Event]:
    """Yield what was seen, as torch keeps it: its own objects with all their facts take thirty times as long."""
    results: Any = taken.profiler.kineto_results  # type: ignore[union-attr]
    for event in results.events():
        of: int | None = None
        if event.device_type() != DeviceType.CPU:
            if event.is_user_annotation():
                continue  # a range of the host, once more on the device
            of = event.linked_correlation_id()
        elif event.linked_correlation_id() > 0:
            continue  # the host's call that launched a kernel
        start_ns = event.start_ns()
        yield Event(
            event.name(),
            start_ns,
            start_ns + event.duration_ns(),
            event.start_thread_id(),
            event.flops(),
            event.is_user_annotation(),
            event.correlation_id(),
            of,
        )
