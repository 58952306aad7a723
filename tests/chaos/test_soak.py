"""A leak is seen in a noisy series, and noise, steps of a cache and a shrinking series are none."""

from __future__ import annotations

import numpy as np
import pytest

from tests.chaos.soak import ALLOWED, judged, sample, trend

STEPS = 300
NOISE = np.random.default_rng(0).normal(size=STEPS)


def wandering(scale: float) -> np.ndarray:
    """Noise whose neighbours are alike, as memory is."""
    return scale * np.convolve(NOISE, np.ones(8) / 8, mode="same")


def test_a_line_is_found_exactly() -> None:
    found = trend([5.0 + 2.0 * step for step in range(STEPS)])
    assert found.slope == pytest.approx(2.0) and found.error == pytest.approx(0.0, abs=1e-9)
    assert not found.is_flat("KiB") or found.slope <= ALLOWED["KiB"]


@pytest.mark.parametrize("per_step", [10.0, 50.0])
def test_a_leak_is_seen_through_noise(per_step: float) -> None:
    series = 300_000 + wandering(500.0) + per_step * np.arange(STEPS)
    assert not trend(series).is_flat("KiB")
    assert trend(series).slope == pytest.approx(per_step, rel=0.5)


def test_what_does_not_grow_is_flat() -> None:
    warming = 300_000 - 200_000 * np.exp(-np.arange(STEPS) / 15)
    for series in (wandering(500.0), warming, -20.0 * np.arange(STEPS), np.full(STEPS, 7.0)):
        assert trend(series).is_flat("KiB")


def test_a_leak_that_noise_hides_is_not_called_flat() -> None:
    leak = 300_000 + wandering(40_000.0) + 20.0 * np.arange(STEPS)
    hidden = trend(leak)
    assert hidden.is_flat("KiB") and hidden.is_too_noisy("KiB")
    outcome = judged([{("ranks", "KiB"): kib} for kib in leak], 0.0, "a run")
    assert outcome.score == 0 and "too noisy" in outcome.message and "ranks: " in outcome.message
    assert not trend(300_000 + wandering(500.0)).is_too_noisy("KiB")


def test_one_file_left_open_in_every_fiftieth_step_is_a_leak() -> None:
    assert not trend([10 + step // 50 for step in range(STEPS)]).is_flat("files")


def test_an_outcome_names_what_grew() -> None:
    series = [{("ranks", "KiB"): 1e5 + 40.0 * step, ("driver", "files"): 9.0} for step in range(STEPS)]
    outcome = judged(series, 0.0, "a run")
    assert outcome.score == 0 and outcome.message == "a run grew per step: ranks: 111600 KiB +40.000 ± 0.000"
    assert judged([{("driver", "files"): 9.0}] * STEPS, 0.0, "a run").score == 2


def test_a_part_whose_memory_is_judged_elsewhere_is_told_and_its_threads_still_count() -> None:
    series = [{("ray", "KiB"): 1e5 + 40.0 * step, ("ray", "threads"): 9.0} for step in range(STEPS)]
    outcome = judged(series, 0.0, "a run", elsewhere=["ray"])
    assert outcome.score == 2 and "ray: 111600 KiB +40.000" in outcome.message
    grown = [one | {("ray", "threads"): 9.0 + step // 20} for step, one in enumerate(series)]
    assert "ray: " in judged(grown, 0.0, "a run", elsewhere=["ray"]).message.partition("grew per step")[2]


def test_this_process_has_memory_files_and_threads() -> None:
    import os

    found = sample(os.getpid())
    assert found["driver", "KiB"] > 1000 and found["driver", "files"] > 2 and found["driver", "threads"] >= 1
