"""Where a command that trains begins: it answers signals before anything large is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hrl.processes.signals import ending_at_once

if TYPE_CHECKING:
    from hrl.trainer.loop import TrainingLoop


def train(kind: str, argv: Sequence[str] | None = None, trainer_cls: type[TrainingLoop] | None = None) -> int:
    """Do what `hrl.trainer.command.run_command` does, whose import takes a second; return its exit status."""
    with ending_at_once():
        from hrl.trainer.command import run_command

        return run_command(kind, argv, trainer_cls)
