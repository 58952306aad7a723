"""Everything a run shows and leaves, behind one object: console, metrics.jsonl, trackers, samples, report."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hrl.protocol import DataProto
from hrl.report.display import Display
from hrl.report.html_report import Outcome, write_html_report
from hrl.report.reward_curve import REWARD, Curve, write_reward_curve
from hrl.report.rollout_log import rollout_records
from hrl.report.run_folder import RunFolder, read_jsonl, rollouts_file, rollouts_steps
from hrl.report.tracking import Generation, Tracking
from hrl.single_controller.base import phase as worker_phase
from hrl.trainer.ppo.metrics import (
    answers_that_are_correct,
    answers_voted_on,
    compute_data_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
    compute_validation_metrics,
    count_left_out,
)
from hrl.trainer.ppo.sampler_mismatch import is_apart
from hrl.workers.engine.nonfinite import FOLDER as NONFINITE_FOLDER

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class RunReporter:
    """What a run shows and leaves. A context manager: leaving it, however the run ended, writes the report.

    Args:
        config: The whole configuration.
        folder: The run's folder, locked.
        console: Where the run is shown.
        tokenizer: Turns samples into text for people.
        num_devices: Processes of the run, for throughput per device.
    """

    curve: ClassVar[Curve] = REWARD

    def __init__(
        self,
        config: Any,
        folder: RunFolder,
        console: Display,
        tokenizer: PreTrainedTokenizerBase,
        num_devices: int,
    ) -> None:
        self.config = config
        self.folder = folder
        self.console = console
        self.tokenizer = tokenizer
        self.num_devices = num_devices
        self._timing: dict[str, float] = {}
        trainer = config.trainer
        resolved = config.model_dump(mode="json")
        folder.write_config(resolved)
        folder.write_environment()
        self._tracking = Tracking(
            trainer.project_name, trainer.experiment_name, trainer.logger, resolved, run_dir=folder.path
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._tracking.finish()
            self._close_with_report(Outcome.of(error))
        finally:
            self.folder.close()

    def _close_with_report(self, outcome: Outcome) -> None:
        """Show what changed and writes picture and report. A failure here is told and hides no failure of the run."""
        folder = self.folder
        try:
            self._show_before_and_after()
            files = [self._write_picture()] if _has_content(folder.metrics_file) else []
            files.append(write_html_report(folder.path, outcome, total_steps=self.console.total_steps or None))
        except (OSError, ValueError) as error:
            logger.warning("the report of the run could not be written", exc_info=error)
            return
        for file in files:
            self.console.note(f"{file.stem.replace('_', ' ')}: {file}")

    def _show_before_and_after(self) -> None:
        """The first validation, which an interrupted run may have made before it was resumed, beside the last one."""
        steps = rollouts_steps(self.folder.rollouts, "val")
        if len(steps) > 1:
            first, last = (read_jsonl(rollouts_file(self.folder.rollouts, s, "val")) for s in (steps[0], steps[-1]))
            self.console.before_and_after(first, last)

    def _write_picture(self) -> Path:
        picture = self.folder.path / self.curve.file_name
        return write_reward_curve(self.folder.metrics_file, picture, self.config.trainer.experiment_name, self.curve)

    # ------------------------------------------------------------------ while a step runs

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around everything of a step: shows its phases on a terminal while they run."""
        with self.console.step_phases(step):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase as `timing_s/<name>`, shows it, and names it in the errors of workers.

        The phase `step` is the sum of the others and only timed.
        """
        started = perf_counter()
        with ExitStack() as stack:
            if name != "step":
                stack.enter_context(worker_phase(name))
                stack.enter_context(self.console.phase(name))
            yield
        self._timing[name] = self._timing.get(name, 0.0) + perf_counter() - started

    # ------------------------------------------------------------------ when it is over

    def step_done(self, step: int, batch: DataProto, metrics: dict[str, float]) -> None:
        """Report a finished step: its line, its metrics, its samples."""
        metrics |= self.describe(batch)
        metrics |= compute_timing_metrics(batch, self._timing)
        metrics |= compute_throughput_metrics(batch, self._timing, self.num_devices)
        self._timing.clear()
        self._tell_of_skipped_steps(step, metrics)
        self.warn(metrics)
        self._tracking.log(metrics, step)
        self.console.step(step, metrics)
        if step == self.console.total_steps:  # in between, the step's line has the score
            self.console.validation(step, metrics)
        self.show_samples(step, batch)

    def describe(self, batch: DataProto) -> dict[str, float]:
        """Return the metrics of a step's batch."""
        return compute_data_metrics(batch, use_critic="values" in batch.batch.keys())

    def show_samples(self, step: int, batch: DataProto) -> None:
        """Write the samples of a step, and shows some of them every so many steps."""
        records = self._records(batch)
        self.folder.write_rollouts(step, records)
        every = self.config.trainer.log_rollouts_freq
        if every > 0 and step % every == 0:
            self.console.rollouts(step, records)

    def validation(self, step: int, batch: DataProto, kept: torch.Tensor | None = None) -> dict[str, float]:
        """Reduces a validation to `val/...` metrics and writes its samples.

        The metrics are part of their step's record; see `validation_done` for a validation outside of a step.

        Args:
            step: The step it follows.
            batch: Scored samples, B rows.
            kept: (B,) bool, which samples have a score; all by default. The others are only counted.
        """
        skipped: dict[str, float] = {}
        if kept is not None and not kept.all():
            skipped = count_left_out(batch.non_tensor_batch["data_source"].tolist(), kept.tolist())
            self.console.note(f"validation: the reward function left out {int((~kept).sum())} of {len(kept)} samples")
            batch = batch.select_idxs(kept)
        parts = batch.non_tensor_batch.get("reward_parts")
        metrics = compute_validation_metrics(
            batch.non_tensor_batch["data_source"].tolist(),
            batch.non_tensor_batch["uid"].tolist(),
            batch.batch["token_level_scores"].sum(-1).tolist(),
            answers_voted_on(parts),
            num_samples=self.config.actor_rollout_ref.rollout.val_kwargs.n,
            correct=answers_that_are_correct(parts),
        )
        records = self._records(batch)
        self.folder.write_rollouts(step, records, kind="val")
        shown = self.config.trainer.log_val_generations
        if shown:
            self.console.rollouts(step, records, kind="val")
            self._tracking.log_generations(
                [Generation(r["prompt"], r["response"], r["score"]) for r in records[:shown]], step
            )
        return metrics | skipped

    def validation_done(self, step: int, metrics: dict[str, float]) -> None:
        """Report a validation outside of a step; a record that `metrics.jsonl` has of the step takes it up."""
        self._tracking.log(metrics | {f"timing_s/{name}": seconds for name, seconds in self._timing.items()}, step)
        self._timing.clear()
        self.console.validation(step, metrics)

    def _records(self, batch: DataProto) -> list[dict[str, Any]]:
        width = batch.batch["prompts"].shape[1]
        mask = batch.batch["attention_mask"].bool()
        prompts = [ids[keep].tolist() for ids, keep in zip(batch.batch["prompts"], mask[:, :width], strict=True)]
        answers = [ids[keep].tolist() for ids, keep in zip(batch.batch["responses"], mask[:, width:], strict=True)]
        return rollout_records(
            batch,
            self.tokenizer.batch_decode(prompts),
            self.tokenizer.batch_decode(answers),
            batch.non_tensor_batch.get("reward_parts"),
        )

    def _tell_of_skipped_steps(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, count in metrics.items():
            if name.endswith("/skipped_steps") and count > 0:
                where = self.folder.path / NONFINITE_FOLDER / f"step_{step}_rank_*"
                self.console.note(
                    f"step {step}: {count:g} optimizer step(s) of {name.partition('/')[0]} not applied, the loss or "
                    f"gradient was not finite. The rows are in {where}"
                )

    def warn(self, metrics: Mapping[str, float]) -> None:
        """Tell of a step's numbers that ask for attention."""
        alarm = self.config.actor_rollout_ref.rollout.logprob_diff_alarm
        drift = metrics.get("rollout/logprob_diff_mean")
        if drift is None:
            self.console.note(
                "alarm: nobody knows how far sampler and trainer are apart: no sample of this step has a token to "
                "compare (empty answers, or all left out by the reward function). See docs/troubleshooting.md"
            )
        elif is_apart(drift, alarm):
            self.console.note(
                f"alarm: sampler and trainer disagree by {drift:.3f} per token on average, above "
                f"rollout.logprob_diff_alarm={alarm}. See docs/troubleshooting.md"
            )


def _has_content(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0
