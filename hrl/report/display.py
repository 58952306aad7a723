"""Where a run is shown: on the terminal, in a cell of a notebook, or as JSON."""

from __future__ import annotations

from hrl.config.trainer import JSON_CONSOLE, RunConfig
from hrl.report.console import Display, JsonConsole, RunConsole
from hrl.report.notebook import NotebookConsole, in_notebook


def display_of(trainer: RunConfig) -> Display:
    """Return where a run is shown: lines for people, unless `trainer.logger` asks for JSON."""
    if JSON_CONSOLE in trainer.logger:
        return JsonConsole()
    return NotebookConsole() if in_notebook() else RunConsole()
