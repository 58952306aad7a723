"""The table of a GPU run has every test once, also those that did not run."""

from __future__ import annotations

from types import SimpleNamespace

from tests.gpu_table import rows_of, table


def report(nodeid: str, duration: float = 0.0, longrepr: object = None) -> SimpleNamespace:
    return SimpleNamespace(nodeid=nodeid, duration=duration, longrepr=longrepr)


def test_every_test_has_a_line_with_its_result() -> None:
    stats = {
        "": [report("test_b.py::test_ok")],  # set-up and tear-down
        "passed": [report("test_b.py::test_ok", 1.26)],
        "failed": [report("test_a.py::test_wrong", 12.0, "Traceback")],
        "skipped": [report("test_c.py::test_later", longrepr=("test_c.py", 3, "Skipped: no vllm"))],
        "error": [report("test_d.py::test_early", 0.5, "Traceback")],
        "warnings": [object()],
    }
    assert table(rows_of(stats, "H100")) == [
        "test                   result             seconds  device",
        "test_a.py::test_wrong  failed             12.0     H100",
        "test_b.py::test_ok     passed             1.3      H100",
        "test_c.py::test_later  skipped (no vllm)  -        -",
        "test_d.py::test_early  error              -        -",
    ]
