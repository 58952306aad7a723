"""Seconds of a weight sync, by hand."""

import pytest

from hrl.plan.assumptions import ON_GPU
from hrl.plan.hardware import GPUS
from hrl.plan.sync import GATHER, MEMORY, MESSAGES, NETWORK, SLEEP, sync_s
from tests.plan.recorded import SMOL

H100 = GPUS["h100"]


def test_engines_beside_the_trainer_get_handles():
    terms = sync_s(SMOL, 1, H100, ON_GPU, shares=True, sleeps=True)
    assert terms == {
        MEMORY: pytest.approx(18 * 134515008 / (3.35e12 * 0.7)),
        MESSAGES: pytest.approx(0.1 + 272 * 2e-4),
        SLEEP: 3.0,
    }


def test_engines_elsewhere_get_a_broadcast_and_never_sleep():
    terms = sync_s(SMOL, 8, H100, ON_GPU, shares=False, sleeps=True)
    assert SLEEP not in terms
    assert terms[NETWORK] == pytest.approx(2 * 134515008 / (50e9 * 0.8))
    assert terms[GATHER] == pytest.approx(2 * 134515008 * 7 / 8 / (450e9 * 0.8) + 2 * 7 * ON_GPU.hop_s)
