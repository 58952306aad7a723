"""One object for all output of a run: console, metrics.jsonl, trackers, samples, report.

Trainers pass finished numbers and samples; nothing here depends on the algorithm.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from hrl.config.trainer import RunConfig
from hrl.processes.terminal import StandardStreams
from hrl.profiling.operators import Profile
from hrl.report.answers import validation_series
from hrl.report.charts import REWARD, Picture, write_picture
from hrl.report.console import Display
from hrl.report.dashboard import Dashboard
from hrl.report.first_look import FirstLook
from hrl.report.health import Health, Raised
from hrl.report.html_report import write_html_report
from hrl.report.outcome import Outcome
from hrl.report.pace import Pace
from hrl.report.phases import Tokens, timing_metrics
from hrl.report.profile import profile_line, profile_record, profile_table, profile_text, write_profile, write_timeline
from hrl.report.run_folder import RunFolder, read_metrics, writing_to
from hrl.report.samples import Sample
from hrl.report.timeline import Span, overlap_metrics, timeline_text
from hrl.report.tracking import Tracking
from hrl.single_controller.worker_errors import phase as worker_phase

logger = logging.getLogger(__name__)


class RunReporter:
    """The output of a run, as a context manager that writes the report at its end, however the run ended.

    Args:
        folder: The run's folder, locked.
        console: The console that shows the run.
        trainer: The section that names the run and its trackers.
        config: The resolved configuration, written to `config.yaml` and sent to the trackers.
        picture: The picture of the run's curve.
        streams: What the run writes to and goes on without.

    Attributes:
        num_devices: What throughput is divided by: GPUs, or the devices of all pools in a run on CPUs alone.
    """

    def __init__(
        self,
        folder: RunFolder,
        console: Display,
        trainer: RunConfig,
        config: Mapping[str, Any],
        *,
        picture: Picture = REWARD,
        streams: StandardStreams | None = None,
    ) -> None:
        self.folder = folder
        self.console = console
        self.num_devices = 1
        self._title = trainer.experiment_name
        self._picture = picture
        self._streams = streams
        self._timing: dict[str, float] = {}
        self._spans: list[Span] = []
        self._timeline: list[Span] = []
        self._is_refused = False
        self._pace = Pace(console.total_steps, trainer.test_freq, trainer.validates_last)
        self._last_step_at: float | None = None
        self._health = Health(trainer.alarms, read_metrics(folder.path))
        self._news: list[Raised] = []
        folder.write_config(config)
        folder.write_environment()
        with ExitStack() as failed, writing_to(folder.path):
            failed.push(self._say_how_it_failed)
            Outcome("running", "", console.total_steps).write(folder.path)
            self._dashboard = _dashboard(folder.path, trainer.dashboard)
            if self._dashboard is not None:
                failed.push(self._dashboard)
            self._tracking = Tracking(
                trainer.project_name, trainer.experiment_name, trainer.logger, config, run_dir=folder.path
            )
            failed.pop_all()

    def _say_how_it_failed(self, _: object, error: BaseException | None, __: object) -> None:
        """Write down how a start ended, since the process that wrote `running` may live on, as in a notebook."""
        Outcome.of(error, self.console.total_steps).write(self.folder.path)

    def __enter__(self) -> Self:
        if self._dashboard is not None:
            self._dashboard.__enter__()
            self.console.note(f"live view: {self._dashboard.address}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            # The report first: trackers may take half a minute each, and an impatient user ends that.
            self._close_with_report(Outcome.of(error, self.console.total_steps))
            self._tracking.finish()
        finally:
            if self._dashboard is not None:
                self._dashboard.__exit__(kind, error, _)
            self.folder.close()

    def report_so_far(self) -> None:
        """Write picture and report of a run that has ended and whose processes stay."""
        self._write_report(Outcome.of(None, self.console.total_steps))

    def _close_with_report(self, outcome: Outcome) -> None:
        """Show what changed, then write picture and report."""
        self.folder.unwritten.try_again()
        files = self._write_report(outcome, show_changes=True)
        self._tell_of_refusal()
        if files and self._health.summary:
            what = f"{self.folder.alarms_file} has what they mean and what helps"
            self.console.note(f"alarms: {self._health.summary}; {what}")
        for file in files:
            self.console.note(f"{file.stem.replace('_', ' ')}: {file}")
        if lost := len(self.folder.unwritten) + self.folder.unwritten.lost:
            self.console.note(f"{lost} records of the log and the samples are lost, which the disk refused")

    def _write_report(self, outcome: Outcome, *, show_changes: bool = False) -> list[Path]:
        """Write report and picture, and return those that could be written.

        A failure is logged; it hides neither the error of the run nor the other file.
        """
        folder = self.folder
        report = picture = None
        with _logged("outcome"):
            outcome.write(folder.path)
        if show_changes:
            with _logged("comparison of the validations"):
                series = validation_series(folder.rollouts, most_steps=2)
                if series:
                    self.console.before_and_after(series)
        with self.console.stage("writing the report"):
            with _logged("report"):
                report = write_html_report(folder.path)
            with _logged("picture"):
                picture = write_picture(read_metrics(folder.path), folder.path, self._picture, self._title)
        return [file for file in (picture, report) if file is not None]

    # ------------------------------------------------------------------ while a step runs

    def run(self, step: int) -> AbstractContextManager[None]:
        """Show how far the run is for the duration of the block; `step` are done already.

        A run whose processes stayed may go on after its end was written down, so that it is running is written again.
        """
        with writing_to(self.folder.path):
            Outcome("running", "", self.console.total_steps).write(self.folder.path)
        return self.console.run_bar(step)

    def stage(self, title: str) -> AbstractContextManager[Callable[[str], None]]:
        """Show that something goes on besides a step; see `RunConsole.stage`."""
        return self.console.stage(title)

    def step(self, step: int) -> AbstractContextManager[None]:
        """Show the phases of a step on a terminal for the duration of the block."""
        return self.console.step_phases(step)

    @contextmanager
    def phase(self, name: str, pool: str | None = None) -> Iterator[None]:
        """Time a phase as `timing_s/<name>`, show it, and name it in the errors of workers.

        The phase `step` contains the others and is only timed.

        Args:
            name: Of the timer.
            pool: The pool that it runs on, if not on the driver or on all of them.
        """
        started = perf_counter()
        with ExitStack() as stack:
            if name != "step":
                self._timing.setdefault(name, 0.0)  # in the order in which phases begin
                stack.enter_context(worker_phase(name))
                stack.enter_context(self.console.phase(name))
            yield
        ended = perf_counter()
        self._timing[name] = self._timing.get(name, 0.0) + ended - started
        self._spans.append(Span(name, pool, started, ended))

    def stood_still(self, name: str, seconds: float) -> None:
        """Add time between two steps, as `timing_s/<name>`, to the record of the next one."""
        self._timing[name] = self._timing.get(name, 0.0) + seconds

    # ------------------------------------------------------------------ when it is over

    def own_metrics(self, tokens: Tokens) -> dict[str, float]:
        """Return a finished step's times, throughput, failed calls of trackers and refused records; restart the timers.

        Args:
            tokens: Numbers of tokens of the step.
        """
        metrics = timing_metrics(self._timing, tokens, self.num_devices) | self._failures()
        metrics |= overlap_metrics(self._spans)
        self._timing.clear()
        self._timeline, self._spans = self._spans, []
        return metrics

    def _failures(self) -> dict[str, float]:
        """Return what trackers, the disk and the console have refused so far, where there is any."""
        counted = {
            "tracking/failures": self._tracking.failures,
            "log/records_waiting": len(self.folder.unwritten),
            "log/records_lost": self.folder.unwritten.lost,
            "console/writes_lost": self._streams.lost if self._streams else 0,
        }
        return {name: float(count) for name, count in counted.items() if count}

    def _tell_of_refusal(self) -> None:
        """Say that the disk refuses the log and the run goes on, or takes it again; once each."""
        refusal, was_refused = self.folder.unwritten.refusal, self._is_refused
        self._is_refused = refusal is not None
        if refusal is not None and not was_refused:
            self.console.note(
                f"the log in {self.folder.path} can't be written: {refusal.strerror or refusal}; it is kept in memory "
                "until the disk takes it. The run goes on (trainer.on_save_error=continue)"
            )
        elif refusal is None and was_refused:
            self.console.note("the log is written again, with what was kept in memory")

    def judge(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return `health/<alarm>` of a step, see `Health.judge`; new alarms are told when the step is reported."""
        judged, self._news = self._health.judge(step, metrics)
        return judged

    def step_done(self, step: int, metrics: Mapping[str, float], ended_at: float) -> None:
        """Report a finished step: write its metrics to the log and the trackers, and show its line.

        Args:
            step: Its number, from 1.
            metrics: All of its metrics, with the reporter's `own_metrics` and `judge`.
            ended_at: When it ended, by `perf_counter`: a validation of it may have ended later.
        """
        self._log(step, metrics)
        before, self._last_step_at = self._last_step_at, ended_at
        self._pace.step_done(step, metrics, None if before is None else ended_at - before)
        self.console.step(step, metrics, self._health.raised, self._pace.left_s())
        for alarm in self._news:
            self.folder.write_alarm(alarm.record())
            self.console.alarm(alarm)
        self._tell_of_refusal()
        if step == self.console.total_steps:  # before the last step, the step's line has the score
            self.console.validation(step, metrics)

    def profile(self, step: int, profiles: Mapping[str, Sequence[Profile]], metrics: Mapping[str, float]) -> None:
        """Write the profile of a step to the run folder, and show what took most of its time.

        Args:
            step: Its number.
            profiles: Kind of process → the profile of each process.
            metrics: Of the step.
        """
        record = profile_record(step, profiles, metrics)
        self.folder.write(lambda: write_profile(self.folder.path, record), len(profile_text(record)))
        timeline = timeline_text(step, self._timeline)
        self.folder.write(lambda: write_timeline(self.folder.path, step, timeline), len(timeline))
        file = profile_table(self.folder.path, step)
        self.console.note(f"profile of step {step}: {profile_line(record)}. Tables: {file}, with traces beside it")

    def first_look(self, look: FirstLook) -> None:
        """Show what the first samples say, and write it to the run folder."""
        self.folder.write_first_look(look.as_dict())
        self.console.first_look(look)

    def samples(self, step: int, samples: Sequence[Sample], *, show: bool) -> None:
        """Write the samples of a step to the run folder; with `show`, also show the best, the median and the worst."""
        self.folder.write_rollouts(step, samples)
        if show:
            self.console.rollouts(step, samples)

    def validation_samples(self, step: int, samples: Sequence[Sample], *, tracked: int) -> None:
        """Write the samples of the validation after a step to the run folder, and the first `tracked` to the trackers.

        If any are tracked, the best, the median and the worst are shown as well.
        """
        self.folder.write_rollouts(step, samples, kind="val")
        if tracked:
            self.console.rollouts(step, samples, kind="val")
            self._tracking.log_generations(samples[:tracked], step)

    def validation_done(self, step: int, metrics: dict[str, float]) -> None:
        """Report a validation outside a step, adding its metrics to the step's record in `metrics.jsonl`, if any."""
        times = {f"timing_s/{name}": seconds for name, seconds in self._timing.items()}
        self._log(step, metrics | times | self._failures())
        self._tell_of_refusal()
        self._health.judge(step, metrics)
        self._pace.validated(times)
        self._timing.clear()
        self._spans.clear()
        self.console.validation(step, metrics)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.folder.write_metrics(step, metrics)
        self._tracking.log(metrics, step)


@contextmanager
def _logged(name: str) -> Iterator[None]:
    """Log that an output of the run could not be written."""
    try:
        yield
    except (OSError, ValueError) as error:
        logger.warning("the %s of the run could not be written", name, exc_info=error)


def _dashboard(folder: Path, asked: bool | int) -> Dashboard | None:
    """Return the live view that `trainer.dashboard` asks for, not yet started."""
    if asked is False:
        return None
    return Dashboard(folder, port=0 if asked is True else asked)
