"""A cluster that does not answer."""

import socket

import pytest

from hrl.single_controller.ray_cluster import ray_cluster, reaching
from hrl.single_controller.worker_errors import PlacementError


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_listens_is_told_with_its_keys(scheme):
    with socket.socket() as taken:  # bound and not listening: nobody else can answer there meanwhile
        taken.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{taken.getsockname()[1]}"
        said = f"cluster at {address}: .*trainer.ray_kwargs.address or RAY_ADDRESS"
        with pytest.raises(PlacementError, match=said), ray_cluster(address):
            pass


def test_a_cluster_that_ray_does_not_find_is_told_too():
    with pytest.raises(PlacementError, match="cluster at auto: none here"), reaching("auto"):
        raise ConnectionError("none here")


def test_what_fails_in_a_cluster_of_ones_own_stays_as_it_is():
    with pytest.raises(OSError, match="no room"), reaching("local"):
        raise OSError("no room")
