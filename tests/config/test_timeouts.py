"""Whose deadline passes first."""

from __future__ import annotations

import pytest

from hrl.config.trainer import TimeoutsConfig


def test_a_rank_gives_up_before_the_driver_does():
    timeouts = TimeoutsConfig(init_s=600.0, call_s=50.0)

    assert (timeouts.rank_init_s, timeouts.rank_call_s) == pytest.approx((540.0, 45.0))
    assert (timeouts.init_s, timeouts.call_s) == (600.0, 50.0)
    assert set(timeouts.model_dump()) == {"init_s", "call_s"}  # derived, not set
