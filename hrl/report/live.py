"""What moves at the foot of a terminal: the stage or phase that runs now, and the bar of the whole run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.spinner import Spinner
from rich.text import Text

from hrl.report.pace import duration

BAR_WIDTH = 30
Clock = Callable[[], float]
ShowStage = Callable[[str], AbstractContextManager[Callable[[str], None] | None]]
"""Shows that something goes on for the duration of a block, which may tell what it is at."""


def in_silence(title: str) -> AbstractContextManager[None]:
    """Show nothing; a `ShowStage`."""
    return nullcontext()


class PhaseBar:
    """The phases of the running step: finished ones with their seconds, and those that run counting up.

    Args:
        labels: Labels in order, e.g. `("gen", "reward", "update", "sync")`.
        clock: Seconds, replaced in tests.
    """

    def __init__(self, labels: Sequence[str], clock: Clock = time.perf_counter) -> None:
        self._own = tuple(labels)
        self.labels = list(labels)
        self.title = ""
        self._clock = clock
        self._done: dict[str, float] = {}
        self._running: dict[str, float] = {}

    def begin_step(self, title: str) -> None:
        """Start a step with no phase run yet; what only an earlier step had, such as a validation, is gone."""
        self.title = title
        self.labels = list(self._own)
        self._done = {}
        self._running = {}

    def begin(self, label: str) -> None:
        """Start a phase; others may be running."""
        if label not in self.labels:
            self.labels.append(label)
        self._running[label] = self._clock()

    def end(self, label: str) -> None:
        """End a running phase. The seconds of a phase that runs twice in a step add up."""
        if (started_at := self._running.pop(label, None)) is not None:
            self._done[label] = self._done.get(label, 0.0) + self._clock() - started_at

    def line(self, width: int) -> Text:
        """Return the phases in `width` columns: where they are too long, without the first ones that are over."""
        over = next((place for place, label in enumerate(self.labels) if label not in self._done), 0)
        texts = (self._line(left_out) for left_out in range(over + 1))
        return next((text for text in texts if text.cell_len <= width), self._line(over))

    def __rich__(self) -> Text:
        return self._line(0)

    def _line(self, left_out: int) -> Text:
        text = Text(f"{self.title}  ", style="bold", no_wrap=True, overflow="ellipsis")
        if left_out:
            text.append("…  ", style="green")
        for label in self.labels[left_out:]:
            if (started_at := self._running.get(label)) is not None:
                text.append(f"▸ {label} {self._clock() - started_at:.1f}s", style="bold cyan")
            elif label in self._done:
                text.append(f"✓ {label} {self._done[label]:.1f}s", style="green")
            else:
                text.append(f"· {label}", style="bright_black")
            text.append("  ")
        text.rstrip()
        return text


@dataclass
class RunBar:
    """The steps of the run that are done, the time since the run began, and the time that is left.

    Attributes:
        total_steps: Steps of the run.
        step: Steps done.
        clock: Seconds, replaced in tests.
        began_at: When the run began.
        left_s: Seconds that were left at `left_at`; None while that is not known.
    """

    total_steps: int
    step: int = 0
    clock: Clock = time.perf_counter
    began_at: float = 0.0
    left_s: float | None = None
    left_at: float = field(default=0.0)

    def update(self, step: int, left_s: float | None) -> None:
        """Take the number of steps done, and the seconds that are left from now on."""
        self.step, self.left_s, self.left_at = step, left_s, self.clock()

    def line(self, width: int) -> Text:
        """Return the bar in at most `width` columns."""
        now = self.clock()
        left = "" if self.left_s is None else duration(self.left_s - (now - self.left_at))
        counts = f" {self.step:{len(str(self.total_steps))}d}/{self.total_steps} steps"
        times = f"  {duration(now - self.began_at)} gone" + (f", about {left} left" if left else "")
        room = min(BAR_WIDTH, width - len("run ") - len(counts) - len(times))
        text = Text("run ", style="bold", no_wrap=True, overflow="ellipsis")
        if room >= 5:
            share = min(self.step / self.total_steps, 1.0) if self.total_steps else 1.0
            full = round(share * room)
            text.append("━" * full, style="green").append("─" * (room - full), style="bright_black")
        return text.append(counts, style="default").append(times, style="not bold bright_black")


@dataclass
class Stage:
    """Something that goes on besides the phases of a step, such as loading a model.

    Attributes:
        title: What it is.
        began_at: When it began.
        now: What it is at, if it says so.
    """

    title: str
    began_at: float
    now: str = ""


class Foot:
    """The moving lines at the foot of a terminal.

    Args:
        clock: Seconds, replaced in tests.

    Attributes:
        stages: What goes on, the outermost first.
        phases: The phases of the running step; None between steps.
        bar: The bar of the run; None until its length is known.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.stages: list[Stage] = []
        self.phases: PhaseBar | None = None
        self.bar: RunBar | None = None
        self._spinner = Spinner("dots")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.phases is not None:
            yield self.phases.line(options.max_width)
        for stage in self.stages:
            spin = self._spinner.render(self.clock())
            seconds = f"  {self.clock() - stage.began_at:.0f} s"
            text = Text.assemble(spin if isinstance(spin, Text) else "", f" {stage.title}", (seconds, "cyan"))
            if stage.now:
                text.append(f"  {stage.now}", style="bright_black")
            text.no_wrap, text.overflow = True, "ellipsis"
            yield text
        if self.bar is not None:
            yield self.bar.line(options.max_width)
