"""Profiles of this process: what is seen, on which threads, and what ends one."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from hrl.profiling import spans
from hrl.profiling.operators import ATTENTION, ELEMENTWISE, PRODUCTS
from hrl.profiling.recorder import start_profile, stop_profile


def work() -> None:
    with spans.span("inside"):
        left = torch.randn(64, 32, requires_grad=True)
        (left @ torch.randn(32, 16)).exp().sum().backward()


def test_operators_of_every_thread_are_seen_in_their_phases(tmp_path: Path) -> None:
    start_profile()
    with spans.phase_span("update"):
        work()
    with spans.phase_span("sample"):
        other = threading.Thread(target=work)
        other.start()
        other.join()
    trace = tmp_path / "new" / "step_1.json.gz"
    profile = stop_profile(trace)
    work()
    for name in ("update", "sample"):
        classes = profile.phases[name].classes
        assert classes[PRODUCTS].calls >= 2  # forward and backward
        assert classes[PRODUCTS].flops == 2 * (2 * 64 * 32 * 16)
        assert ELEMENTWISE in classes and ATTENTION not in classes
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == "user_annotation"].count("inside") == 2
    assert [file.name for file in trace.parent.iterdir()] == [trace.name]


def test_a_trace_has_shapes_and_numbers_and_no_contents_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "hush-hush")
    tokens, weight = torch.tensor([73217321, 3]), torch.full((5, 7), 0.734251)
    start_profile()
    functional.embedding(tokens.clamp(max=4), weight).clamp(max=99887766)
    assert tokens.tolist()[0] == 73217321
    stop_profile(tmp_path / "step_1.json.gz")
    text = gzip.decompress((tmp_path / "step_1.json.gz").read_bytes()).decode()
    for there in ("[5, 7]", '"99887766"', f'"host_name": "{socket.gethostname()}"'):
        assert there in text
    for absent in ("73217321", "0.734", "hush-hush", "SOME_KEY", str(Path(__file__).parents[2])):
        assert absent not in text


def test_a_second_start_begins_anew(tmp_path: Path) -> None:
    start_profile()
    with spans.phase_span("first"):
        work()
    start_profile()
    with spans.phase_span("second"):
        work()
    assert {"first", "second"} & stop_profile(tmp_path / "trace.json.gz").phases.keys() == {"second"}


def test_without_a_profile_spans_do_nothing_and_there_is_none_to_stop(tmp_path: Path) -> None:
    assert spans.span("one") is spans.phase_span("two")
    with pytest.raises(RuntimeError, match="no profile is being taken"):
        stop_profile(tmp_path / "trace.json.gz")


def test_with_nvtx_a_range_is_both(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("pop"))
    spans.mark_spans(with_nvtx=True)
    try:
        with spans.phase_span("update"), spans.span("forward"):
            pass
    finally:
        spans.ignore_spans()
    assert ranges == ["phase: update", "forward", "pop", "pop"]
