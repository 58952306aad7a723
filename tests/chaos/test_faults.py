"""The short half of the faults, as part of the suite; `make chaos` injects all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.faults import Fault, faults


@pytest.mark.parametrize(
    "fault", [each for each in faults() if each.is_quick], ids=lambda each: f"{each.kind}: {each.variant}"
)
def test_a_fault_ends_as_promised(fault: Fault, tmp_path: Path) -> None:
    outcome = fault.inject(tmp_path)
    assert outcome.score == 2, outcome.message
