"""Fixtures that several packages' tests share."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Test processes share the cores (`make test`), and each starts others: threads that wait for each other by spinning
# take the time of those that work, and models this small gain nothing from a second thread. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A quarter of the time that the tests' imports take would be a search for garbage, of which there is none: see
# `hrl.processes.imports`. It begins when the tests are collected.
gc.disable()

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("no deadlines", deadline=None)
hypothesis.settings.load_profile("no deadlines")

RAY_NUM_CPUS = 16  # logical: a test's pools may ask for up to so many processes, whatever the machine has


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray cluster of this test session, started when the first test asks for it and ended with the session."""
    from hrl.single_controller.ray_cluster import ray_cluster

    # Workers import the test modules that define their classes; pytest has put those folders on this process's path.
    root = Path(__file__).parent.parent
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    with ray_cluster("local", num_cpus=RAY_NUM_CPUS, object_store_bytes=200 << 20):
        yield


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """A `torch.distributed` world of this process alone."""
    from tests.models.tiny import world_of_one

    with world_of_one():
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama. Tests read it and write elsewhere."""
    from tests.models.tiny import save_llama

    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def bitsandbytes() -> Iterator[None]:
    """The folder of packages that are not for everybody."""
    folder = str(Path(sys.prefix) / "quantizers")
    sys.path.append(folder)
    yield
    sys.path.remove(folder)


@pytest.fixture
def own_registries() -> Iterator[None]:
    """What a test registers in `hrl.algos` is gone after it."""
    from tests.algos.registries import restored_registries

    with restored_registries():
        yield


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that need the session's cluster, and skips those marked `gpu` where there is no CUDA device.

    Raises:
        UsageError: A file has a test marked `engine` or `gpu` and does not say so where the Makefile looks.
    """
    for item in items:
        if "ray_session" in getattr(item, "fixturenames", ()):
            item.add_marker("cluster")
    apart = {item.path for item in items if item.get_closest_marker("engine") or item.get_closest_marker("gpu")}
    for path in sorted(apart):
        if not re.search(r"pytest\.mark\.(engine|gpu)", path.read_text(encoding="utf-8")):
            raise pytest.UsageError(f"{path}: `make test-engines` runs files that have `pytest.mark.engine` in them")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Lets garbage be collected again, but for what there is before the first test."""
    gc.enable()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Shows a table of the tests that need a CUDA device, if these were asked for."""
    if config.option.markexpr != "gpu":
        return
    from tests import gpu_table

    terminalreporter.section("GPU tests")
    for line in gpu_table.table(gpu_table.rows_of(terminalreporter.stats, gpu_table.device_name())):
        terminalreporter.write_line(line)
