"""Models small enough for whole runs on two cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runs.own_network import can_be_watched
from tests.runs.runner import Runner


@pytest.fixture(scope="module")
def this_process() -> Iterator[None]:
    """The runs of a module are made in the test's own process, without Ray."""
    from tests.runs.in_process import in_process

    with in_process():
        yield


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Runs on a random two-layer Llama with the tokenizer of the bundled model, and a random classifier over it.

    Each is in a network of its own where that can be had, and sends nothing out of it; elsewhere the tests' summary
    says so.
    """
    return Runner.of_random_models(tmp_path_factory.mktemp("models"), is_enclosed=can_be_watched())
