"""Which GPUs a rank's engine sees."""

from __future__ import annotations

import pytest

from hrl.workers.actor_rollout_ref import engine_devices, own_device
from hrl.workers.rollout.base import RolloutError


@pytest.mark.parametrize(
    ("visible", "index", "device"),
    [
        (None, 3, "3"),
        ("5", 0, "5"),
        ("4,5,6,7", 2, "6"),  # RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES: every rank sees them all
        ("GPU-aa, GPU-bb", 1, "GPU-bb"),
    ],
)
def test_a_rank_names_its_own_device(visible, index, device):
    assert own_device(visible, index) == device


def test_an_engine_sees_the_devices_of_its_ranks_and_no_others():
    places = [("a", own_device("4,5,6,7", index)) for index in range(4)]

    assert [engine_devices(places, rank, 1) for rank in range(4)] == ["4", "5", "6", "7"]
    assert [engine_devices(places, rank, 2) for rank in range(4)] == ["4,5", "4,5", "6,7", "6,7"]
    assert engine_devices(places, 3, 4) == "4,5,6,7"


def test_an_engine_over_two_nodes_is_refused_and_one_beside_it_is_not():
    places = [("a", "0"), ("a", "1"), ("a", "2"), ("b", "0")]

    assert engine_devices(places, 1, 2) == "0,1"
    with pytest.raises(RolloutError, match=r"ranks 2 to 3 form one engine .* nodes \['a', 'b'\]"):
        engine_devices(places, 2, 2)
