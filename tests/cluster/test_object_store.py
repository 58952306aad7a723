"""What is said when batches do not fit into the object store."""

import pytest

from hrl.cluster import object_store
from hrl.cluster.object_store import StoreWatch, shortage
from hrl.single_controller.object_store import StoreUse, store_use

GIB = 1 << 30


def test_a_store_that_is_too_small_is_told_with_both_numbers():
    tokens = 16384 * 8192  # × 64 bytes × 2 batches
    assert shortage(tokens, StoreUse(16 * GIB, 0, 0)) is None
    told = shortage(tokens, StoreUse(7 * GIB, 0, 0))
    assert "batches of up to 134,217,728 tokens may take 16.0 GiB of shared memory" in told
    assert "Ray's object store has 7.0 GiB" in told and "data.train_batch_size" in told
    assert shortage(tokens, None) is None


def test_what_goes_to_disk_is_counted_by_step_and_told_once(monkeypatch):
    seen = iter([StoreUse(4 * GIB, 0, 5 * GIB), StoreUse(4 * GIB, GIB, 5 * GIB), StoreUse(4 * GIB, 3 * GIB, 7 * GIB),
                 None, StoreUse(4 * GIB, 2 * GIB, 8 * GIB)])  # fmt: skip
    monkeypatch.setattr(object_store, "store_use", lambda: next(seen))
    watch = StoreWatch()  # what an earlier run of the same Ray has spilled does not count
    assert watch.look(1) == ({"perf/object_store_gib": 1.0, "perf/object_store_spilled_gib": 0.0}, None)
    metrics, news = watch.look(2)
    assert metrics == {"perf/object_store_gib": 3.0, "perf/object_store_spilled_gib": 2.0}
    store = "the object store of the driver's node, which holds 4.0 GiB for all runs of this Ray"
    assert news.startswith(f"step 2: {store}, wrote 2.0 GiB to disk")
    assert watch.look(3) == ({}, None)
    assert watch.look(4) == ({"perf/object_store_gib": 2.0, "perf/object_store_spilled_gib": 1.0}, None)


def test_without_ray_nothing_is_known(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    assert store_use() is None


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_session")
def test_the_nodes_own_ray_says_what_its_store_holds():
    import numpy as np
    import ray

    before = store_use()
    assert before is not None and before.capacity_bytes > before.used_bytes
    held = ray.put(np.zeros(20 << 20, dtype=np.uint8))
    after = store_use()
    assert after is not None and after.used_bytes - before.used_bytes >= 20 << 20
    del held
