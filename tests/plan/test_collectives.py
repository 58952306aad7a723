"""Seconds of collectives, by hand."""

import pytest

from hrl.plan.assumptions import ON_GPU
from hrl.plan.collectives import gather_s, replicate_s
from hrl.plan.hardware import GPUS

H100 = GPUS["h100"]
SHARE = ON_GPU.collective_share


def test_one_rank_gathers_nothing():
    assert gather_s(1e9, 10, 1, H100, ON_GPU) == 0.0


def test_a_machine_gathers_over_its_links_and_several_over_the_network():
    assert gather_s(8e9, 1, 8, H100, ON_GPU) == pytest.approx(7e9 / (450e9 * SHARE) + 7 * ON_GPU.hop_s)
    assert gather_s(8e9, 3, 16, H100, ON_GPU) == pytest.approx(7.5e9 / (400e9 * SHARE) + 3 * 15 * ON_GPU.hop_s)


def test_replicas_of_whole_machines_add_up_over_each_ranks_part_of_the_network():
    assert replicate_s(8e9, 8, 1, H100, ON_GPU) == 0.0
    assert replicate_s(8e9, 8, 4, H100, ON_GPU) == pytest.approx(2 * 0.75 * 1e9 / (50e9 * SHARE))
    assert replicate_s(8e9, 16, 4, H100, ON_GPU) == pytest.approx(2 * 0.75 * 0.5e9 / (50e9 * SHARE))


def test_replicas_on_one_machine_add_up_over_its_links_and_share_its_network():
    assert replicate_s(8e9, 2, 4, H100, ON_GPU) == pytest.approx(2 * 0.75 * 4e9 / (450e9 * SHARE))
    assert replicate_s(8e9, 1, 64, H100, ON_GPU) == pytest.approx(2 * 63 / 64 * 8e9 / (400e9 * SHARE))
