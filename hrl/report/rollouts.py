"""`hrl rollouts`: which samples of a run to show, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hrl.errors import RefusedError
from hrl.report.chat import samples_shown, tokens_shown
from hrl.report.run_folder import CONFIG, RolloutKind, existing_folder, read_config, rollouts_steps
from hrl.report.samples import Sample, read_samples

SORT_KEYS = {"score": "score", "length": "response_length", "advantage": "advantage"}
"""Sort key → name of the record's field."""


class NoSamplesError(RefusedError, ValueError):
    """There are no such samples; the message says which there are."""


def show_rollouts(
    folder: Path,
    console: Console,
    *,
    step: int | None = None,
    sort: str | None = None,
    limit: int = 10,
    validation: bool = False,
    tokens: bool = False,
) -> None:
    """Show samples of one step.

    Args:
        folder: The run folder.
        console: Where to write.
        step: The step; the last one by default.
        sort: A name in `SORT_KEYS`, largest first; by default the order of the batch, which keeps samples of a prompt
            together.
        limit: Number of samples to show.
        validation: Show samples of the validation after the step instead of its training samples.
        tokens: Show the tokens of each, those that are trained on told apart, instead of what was said.

    Raises:
        NoRunError: There is no such folder.
        NoSamplesError: The folder has no samples, none of this step, or none with the sort key.
    """
    kind: RolloutKind = "val" if validation else "train"
    folder = existing_folder(folder)
    step = _existing_step(folder, step, kind)
    records = read_samples(folder / "rollouts", step, kind)
    shown = _sorted(records, sort)[:limit]
    title = f"{'validation after step' if validation else 'step'} {step}: {len(shown)} of {len(records)} samples"
    labelled = [(str(number), record) for number, record in enumerate(shown, start=1)]
    show = tokens_shown if tokens else samples_shown
    console.print(show(labelled, f"{title}, by {sort}" if sort else title))


def _existing_step(folder: Path, step: int | None, kind: RolloutKind) -> int:
    steps = rollouts_steps(folder / "rollouts", kind)
    samples = "validation samples" if kind == "val" else "samples"
    if not steps:
        raise NoSamplesError(f"{folder} holds no {samples}: {_why_none(folder)}")
    if step is None:
        return steps[-1]
    if step not in steps:
        raise NoSamplesError(f"{folder} holds no {samples} of step {step}; it has those of {_ranges(steps)}")
    return step


def _why_none(folder: Path) -> str:
    config = read_config(folder) if (folder / CONFIG).exists() else {}
    if config and "actor_rollout_ref" not in config:
        return f"its run learns from given answers and draws none. `hrl report {folder}` shows its curves"
    return "a run of a policy writes them there, to rollouts/, from its first step or validation on"


def _sorted(records: Sequence[Sample], sort: str | None) -> Sequence[Sample]:
    if sort is None:
        return records
    key = SORT_KEYS[sort]
    if not any(key in record for record in records):
        others = " or ".join(name for name in SORT_KEYS if name != sort)
        raise NoSamplesError(f"these samples have no {sort}; sort by {others}")
    # Records without such a number come last.
    return sorted(records, key=lambda record: (record.get(key) is None, -(record.get(key) or 0.0)))


def _ranges(steps: Sequence[int]) -> str:
    """Format `[1, 2, 3, 7]` as `1-3, 7`."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
