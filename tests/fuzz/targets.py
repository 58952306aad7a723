"""All that is fuzzed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from tests.fuzz.cases import Target

ROOMS = ("rows", "config", "commands", "checkpoints")
"""Files of this folder that have a list `TARGETS`."""


def targets() -> Sequence[Target]:
    """Return all targets."""
    return [target for room in ROOMS for target in importlib.import_module(f"tests.fuzz.{room}").TARGETS]
