"""A model small enough for whole runs, made once for all faults of a process."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from tests.runs.runner import Runner


@functools.cache
def runner() -> Runner:
    """Starts runs of a random model; its folder goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Runner.of_random_models(folder)
