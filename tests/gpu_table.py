"""What `make test-gpu` shows at its end: every test with its result, seconds and device.

A GPU run is rare, and what it found has to be read by somebody who was not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest

_RESULTS = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def rows_of(stats: Mapping[str, Sequence[pytest.TestReport]], device: str) -> list[tuple[str, str, str, str]]:
    """(test, result, seconds, device) of every test that was selected, by name."""
    rows = []
    for result in _RESULTS:
        for report in stats.get(result, ()):
            ran = result not in ("skipped", "error")
            reason = f" ({report.longrepr[2].removeprefix('Skipped: ')})" if isinstance(report.longrepr, tuple) else ""
            seconds = f"{report.duration:.1f}" if ran else "-"
            rows.append((report.nodeid, result + reason, seconds, device if ran else "-"))
    return sorted(rows)


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligned lines under a head."""
    lines = [("test", "result", "seconds", "device"), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def device_name() -> str:
    """The card that the tests ran on."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
