"""A run in the cell of a notebook: one output that is rewritten, however many steps the run has."""

from __future__ import annotations

import io
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Self

from rich.console import Console

from hrl.report.console import PLAIN_WIDTH, RunConsole
from hrl.report.pace import duration
from hrl.report.step_line import StepLine

HEAD_LINES = 40
"""Lines before the first step that stay."""
TAIL_LINES = 60
"""Newest lines that are shown below them: steps, and the tables of the end."""


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, which can rewrite what a cell shows."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class CellOutput(io.StringIO):
    """Text in the output of a cell: its first and its newest lines, under a bar of the steps.

    Attributes:
        step: Steps done.
        total_steps: Steps of the run; 0 while that is not known.
        left: The time that is left, in words.
    """

    def __init__(self, total_steps: int = 0) -> None:
        super().__init__()
        self.step, self.total_steps, self.left = 0, total_steps, ""
        self._head: list[str] = []
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._left_out = 0
        self._line = ""
        self._handle: Any = None

    def write(self, text: str) -> int:
        *whole, self._line = (self._line + text).split("\n")
        for line in whole:
            if self.step == 0 and len(self._head) < HEAD_LINES:
                self._head.append(line)
            else:
                self._left_out += len(self._tail) == TAIL_LINES
                self._tail.append(line)
        return len(text)

    def flush(self) -> None:
        """Show what was written."""
        if self._handle is None:
            from IPython.display import display

            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)

    def _repr_html_(self) -> str:
        bar = (
            f"<progress value='{self.step}' max='{max(self.total_steps, 1)}' style='width:30em'></progress> "
            f"step {self.step} of {self.total_steps or '…'}{self.left}"
        )
        return f"<div>{bar}<pre style='white-space:pre-wrap'>{escape(str(self))}</pre></div>"

    def __str__(self) -> str:
        left_out = [f"… {self._left_out} lines: all steps are in run.metrics …"] if self._left_out else []
        return "\n".join([*self._head, *left_out, *self._tail])

    __repr__ = __str__


class NotebookConsole(RunConsole):
    """Shows a run in a notebook as it is shown in a file, in one output."""

    def __init__(self) -> None:
        self._cell = CellOutput()
        plain = Console(
            file=self._cell,
            force_terminal=False,
            force_jupyter=False,
            width=PLAIN_WIDTH,
            highlight=False,
            no_color=True,
        )
        super().__init__(plain)

    def expect(self, total_steps: int, line: StepLine, phases: Sequence[str] = ()) -> Self:
        """Take what the run will be; see `RunConsole.expect`."""
        self._cell.total_steps = total_steps
        return super().expect(total_steps, line, phases)

    def step(
        self, step: int, metrics: Mapping[str, float], alarms: Sequence[str] = (), left_s: float | None = None
    ) -> None:
        """Show the line of a finished step, and the time that is left."""
        self._cell.step, self._cell.left = step, "" if left_s is None else f", about {duration(left_s)} left"
        super().step(step, metrics, alarms, left_s)
