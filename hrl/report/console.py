"""Show a run in progress: on a terminal, as plain lines in a file, or as JSON for programs.

A terminal shows what runs now below the lines, and takes it away when it has ended; a file, a pipe, a notebook and a
terminal without cursor control (`TERM=dumb`) get only plain lines. The environment variable `NO_COLOR` turns colours
off.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from typing import IO, Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hrl.masking import masked_text
from hrl.metrics import source_and_metric
from hrl.report.answers import Series, before_and_after_table, describe, that_differ
from hrl.report.chat import samples_shown
from hrl.report.first_look import FirstLook
from hrl.report.health import Raised
from hrl.report.live import Clock, Foot, PhaseBar, RunBar, Stage
from hrl.report.phases import LABELS
from hrl.report.run_folder import RolloutKind, json_line
from hrl.report.samples import ALL_SOURCES, Sample, best_median_worst, printable, readable
from hrl.report.step_line import JUDGEMENT, Layout, StepLine, counter

PLAIN_WIDTH = 120
"""The width of a line in a file."""
FIRST_TICK_S = 5.0
"""After so many seconds a stage is named again in a file; the next time after twice as many, and so on."""


# ---------------------------------------------------------------------------------------------- a validation


def validation_table(metrics: Mapping[str, float], first: Mapping[str, float], title: str) -> Table:
    """Return every `val/<source>/<metric>` as a row, with its change since the first validation.

    `acc` has no row where it was the same as the score or as another part then and now.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("source", overflow="fold")
    table.add_column("metric", overflow="fold")
    table.add_column("value", justify="right")
    table.add_column("since start", justify="right")
    shown = [name for name in metrics if name.startswith("val/") and not name.endswith("/n")]
    rows = {name: source_and_metric(name, metrics) for name in shown}
    values = {(*row, metrics[name], first.get(name)) for name, row in rows.items()}
    for name, (source, metric) in sorted(rows.items(), key=lambda item: (not item[1][0], *item[1])):
        part, _, of = metric.rpartition("/")
        now_and_then = (metrics[name], first.get(name))
        same = [row for row in values if row[0] == source and row[1] != metric and row[2:] == now_and_then]
        if part == JUDGEMENT and any(row[1].rpartition("/")[2] == of for row in same):
            continue
        change = Text(f"{metrics[name] - first[name]:+.3f}") if name in first else Text("-")
        table.add_row(printable(source or ALL_SOURCES), printable(metric), Text(f"{metrics[name]:.3f}"), change)
    return table


# ---------------------------------------------------------------------------------------------- the run


@contextmanager
def _ticking(stage: Stage, tick: Callable[[Stage], None]) -> Iterator[None]:
    """Call `tick` during the block after `FIRST_TICK_S`, then after twice as long, and so on."""
    ended = threading.Event()

    def run() -> None:
        pause = FIRST_TICK_S
        while not ended.wait(pause):
            tick(stage)
            pause *= 2

    thread = threading.Thread(target=run, name="stage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class RunConsole:
    """Shows a run on a terminal, or writes it as plain lines.

    Args:
        console: Where to write; standard output by default.
        clock: Seconds, replaced in tests.
    """

    def __init__(self, console: Console | None = None, clock: Clock = time.perf_counter) -> None:
        self._console = console if console is not None else Console(highlight=False)
        self.total_steps = 0
        self._layout = Layout(StepLine((), {}), 0)
        self._clock = clock
        self._began_at = clock()
        self._foot = Foot(clock)
        self._phases = PhaseBar([], clock)
        self._live: Live | None = None
        self._first_validation: dict[str, float] = {}

    def expect(self, total_steps: int, line: StepLine, phases: Sequence[str] = ()) -> Self:
        """Take what the run will be, once it is known, and return this console.

        Args:
            total_steps: Steps of the run.
            line: What the line of a step shows.
            phases: The phases of a step of this run, in order (names in `PHASES`).
        """
        self.total_steps = total_steps
        self._layout = Layout(line, total_steps)
        self._phases = PhaseBar([LABELS.get(name, name) for name in phases], self._clock)
        return self

    @property
    def width(self) -> int:
        """The columns of a line."""
        return self._console.width if self._console.is_terminal else max(self._console.width, PLAIN_WIDTH)

    def banner(self, title: str, facts: Mapping[str, str]) -> None:
        """Show a summary of the run that is about to start."""
        facts = {label: masked_text(fact) for label, fact in facts.items()}
        self._words(Text(readable(masked_text(title)), style="bold"))
        label_width = max((len(label) for label in facts), default=0)
        if not self._console.is_terminal:
            for label, fact in facts.items():
                self._line(Text.assemble(f"  {label:<{label_width}}  ", printable(fact, limit=1000)))
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(width=label_width + 2, style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for label, fact in facts.items():
            table.add_row(f"  {label}", printable(fact, limit=1000))
        self._console.print(table)

    def note(self, text: str) -> None:
        """Show a remark about the run."""
        self._words(printable(masked_text(text), limit=4000))

    def first_look(self, look: FirstLook) -> None:
        """Show what the first samples say: a line, or one of them and what to try if there is nothing to learn."""
        self.banner(f"first look: {look.headline}", look.facts)

    @contextmanager
    def stage(self, title: str) -> Iterator[Callable[[str], None]]:
        """Show that something goes on for the duration of the block, and for how long it does.

        On a terminal it moves at the foot and leaves a line when it has ended; in a file it is a line, and one more now
        and then if it takes long.

        Returns:
            Takes what it is at, for stages that can tell.
        """
        title = masked_text(title)
        stage = Stage(title, self._clock())

        def tell(now: str) -> None:
            stage.now = masked_text(now)

        if not self._console.is_interactive:
            self._line(Text(f"[{self._clock() - self._began_at:5.1f} s] {title}"))
            with _ticking(stage, self._tick):
                yield tell
            return
        self._foot.stages.append(stage)
        try:
            with self._moving():
                yield tell
        finally:
            self._foot.stages.remove(stage)
        seconds = self._clock() - stage.began_at
        self._line(Text.assemble(("✓ ", "green"), (f"{seconds:5.1f} s  {title}", "bright_black")))

    def _tick(self, stage: Stage) -> None:
        now = self._clock()
        at = f", {stage.now}" if stage.now else ""
        text = f"[{now - self._began_at:5.1f} s] {stage.title}: {now - stage.began_at:.0f} s so far{at}"
        self._line(Text(text))

    @contextmanager
    def run_bar(self, step: int) -> Iterator[None]:
        """Show how far the run is, on a terminal, for the duration of the block; `step` are done already."""
        bar = RunBar(self.total_steps, step, self._clock, self._began_at)
        if not self._console.is_interactive:
            yield
            return
        self._foot.bar = bar
        try:
            with self._moving():
                yield
        finally:
            self._foot.bar = None

    @contextmanager
    def step_phases(self, step: int) -> Iterator[None]:
        """Show the phases of a step on a terminal for the duration of the block."""
        self._phases.begin_step(counter(step, self.total_steps))
        if not self._console.is_interactive:
            yield
            return
        self._foot.phases = self._phases
        try:
            with self._moving():
                yield
        finally:
            self._foot.phases = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show a phase as running for the duration of the block; `name` is that of its timer."""
        label = LABELS.get(name, name)
        self._phases.begin(label)
        try:
            yield
        finally:
            self._phases.end(label)

    def step(
        self, step: int, metrics: Mapping[str, float], alarms: Sequence[str] = (), left_s: float | None = None
    ) -> None:
        """Show the line of a finished step.

        Args:
            step: The step.
            metrics: Its metrics.
            alarms: The names of the alarms that are raised.
            left_s: Seconds that the rest of the run takes; None where that is not known.
        """
        text = Text(self._layout.text(step, metrics, self.width, alarms))
        if alarms:
            text.highlight_regex(r"(?<=/\d)! |! [\w, ]+$|(?<=\d)!", "bold yellow")
        self._line(text)
        if self._foot.bar is not None:
            self._foot.bar.update(step, left_s)

    def alarm(self, alarm: Raised) -> None:
        """Show what a newly raised alarm means."""
        self._words(Text(alarm.text, style="yellow"))

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the table of a validation; nothing if `metrics` has none."""
        table = validation_table(metrics, self._first_validation, f"validation after step {step}")
        if not table.row_count:
            return
        if not self._first_validation:
            self._first_validation = dict(metrics)
        self._show(table)

    def rollouts(self, step: int, samples: Sequence[Sample], kind: RolloutKind = "train") -> None:
        """Show the best, the median and the worst sample of a step, or of the validation after it."""
        of = "step" if kind == "train" else "the validation after step"
        self._show(samples_shown(best_median_worst(samples), f"samples of {of} {step}"))

    def before_and_after(self, series: Sequence[Series], limit: int = 5) -> None:
        """Show the first and the last answers to the same prompts, at most `limit` of those that changed."""
        self._show(before_and_after_table(series, limit))

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Draw the foot for the duration of the block, or of the block around it that does so already."""
        if self._live is not None:
            yield
            return
        # What others write to this terminal goes above the foot; what goes to a file stays what it is.
        self._live = Live(
            self._foot,
            console=self._console,
            transient=True,
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        try:
            with self._live:
                yield
        finally:
            self._live = None

    def _words(self, text: Text) -> None:
        # Between words on a terminal; a file keeps lines whole.
        self._console.print(text, soft_wrap=not self._console.is_terminal)

    def _line(self, text: Text) -> None:
        # No line breaks: a terminal wraps long lines, and a file keeps them whole.
        self._console.print(text, soft_wrap=True)

    def _show(self, renderable: RenderableType) -> None:
        self._console.print(renderable, width=self.width)


class JsonConsole:
    """Writes a run for programs: one JSON object per line on standard output, and nothing else there.

    Every object has a `time` (UTC, ISO 8601) and an `event`: `banner`, `note`, `stage`, `first_look`, `step`, `alarm`,
    `validation`, `rollouts` or `before_and_after`. The metrics of a step are added under their names in
    `metrics.jsonl`. Lines are ASCII, so a model's text can neither break a line nor control a terminal.

    Args:
        file: Where to write; standard output by default.
    """

    def __init__(self, file: IO[str] | None = None) -> None:
        self.total_steps = 0
        self._file = sys.stdout if file is None else file

    def expect(self, total_steps: int, line: StepLine, phases: Sequence[str] = ()) -> Self:
        """Take the number of steps, and return this console."""
        self.total_steps = total_steps
        return self

    def banner(self, title: str, facts: Mapping[str, str]) -> None:
        """Write a summary of the run that is about to start."""
        facts = {label: masked_text(fact) for label, fact in facts.items()}
        self._write("banner", title=masked_text(title), facts=facts)

    def note(self, text: str) -> None:
        """Write a remark about the run."""
        self._write("note", text=masked_text(text))

    def first_look(self, look: FirstLook) -> None:
        """Write what the first samples say."""
        self._write("first_look", **look.as_dict())

    @contextmanager
    def stage(self, title: str) -> Iterator[Callable[[str], None]]:
        """Write that something begins, and its seconds when it has ended."""
        began = time.perf_counter()
        title = masked_text(title)
        self._write("stage", title=title)
        yield lambda now: self._write("stage", title=title, now=masked_text(now))
        self._write("stage", title=title, seconds=round(time.perf_counter() - began, 3))

    def run_bar(self, step: int) -> AbstractContextManager[None]:
        """Do nothing; a step's object has the time that is left."""
        return nullcontext()

    def step_phases(self, step: int) -> AbstractContextManager[None]:
        """Do nothing; a step's metrics have the seconds of its phases."""
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def step(
        self, step: int, metrics: Mapping[str, float], alarms: Sequence[str] = (), left_s: float | None = None
    ) -> None:
        """Write the metrics of a finished step, and how long the rest of the run takes, where that is known."""
        left = {} if left_s is None else {"left_s": round(left_s, 1)}
        self._write("step", step=step, total_steps=self.total_steps, **left, **metrics)

    def alarm(self, alarm: Raised) -> None:
        """Write a newly raised alarm, as in `alarms.jsonl`."""
        self._write("alarm", **alarm.record())

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the `val/...` metrics, if there are any."""
        scores = {name: value for name, value in metrics.items() if name.startswith("val/")}
        if scores:
            self._write("validation", step=step, **scores)

    def rollouts(self, step: int, samples: Sequence[Sample], kind: RolloutKind = "train") -> None:
        """Write the best, the median and the worst sample of a step, or of the validation after it."""
        picked = [{"label": label, **sample} for label, sample in best_median_worst(samples)]
        self._write("rollouts", step=step, kind=kind, samples=picked)

    def before_and_after(self, series: Sequence[Series], limit: int = 5) -> None:
        """Write the first and the last answers to the same prompts, at most `limit` pairs of those that changed."""
        shown = that_differ(series)[:limit]
        pairs = [
            {
                when: {**answer.sample, "mean_score": answer.score}
                for when, answer in (("before", each.answers[0]), ("after", each.answers[-1]))
            }
            for each in shown
        ]
        self._write("before_and_after", changes=describe(series, len(shown)), pairs=pairs)

    def _write(self, event: str, **content: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._file.write(json_line({"time": now, "event": event, **content}, ascii_only=True))
        self._file.flush()


Display = RunConsole | JsonConsole
"""Where a run is shown."""
