"""A run that is killed twice in one go: the short half of `tests/chaos/kills.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.kills import STATEFUL, Chain, Scene
from tests.chaos.victims import in_one_process


@pytest.mark.cluster
@pytest.mark.timeout(200)
def test_a_run_that_was_killed_twice_in_place_of_a_write_is_bit_for_bit_the_run_that_nobody_killed(
    tmp_path: Path,
) -> None:
    chain = Chain("twice", Scene(in_one_process, STATEFUL, steps=3), kills=2, at_writes=True)
    for fault in chain.faults():
        outcome = fault.inject(tmp_path)
        assert outcome.score == 2, outcome.message
