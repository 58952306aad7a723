"""`hrl rollouts`: which samples of a run to show, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hrl.errors import RefusedError
from hrl.report.chat import samples_shown, tokens_shown
from hrl.report.conversation import is_episode
from hrl.report.run_folder import CONFIG, RolloutKind, existing_folder, read_config, rollouts_steps
from hrl.report.samples import Sample, on_one_line, read_sample_file, read_samples

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
    ends: Sequence[str] = (),
    limit: int = 10,
    validation: bool = False,
    tokens: bool = False,
) -> None:
    """Show samples of one step.

    Args:
        folder: The run folder, or that of an evaluation; or a file of samples in one of them.
        console: Where to write.
        step: The step; the last one by default.
        sort: A name in `SORT_KEYS`, largest first; by default the order of the batch, which keeps samples of a prompt
            together.
        ends: Why the samples ended that are shown, as `end` of an episode or `finish_reason` of a response; empty shows
            all.
        limit: Number of samples to show.
        validation: Show samples of the validation after the step instead of its training samples; so they are where
            there are no others, as of an evaluation.
        tokens: Show the tokens of each, those that are trained on told apart, instead of what was said.

    Raises:
        NoRunError: There is no such folder.
        NoSamplesError: The folder has no samples, none of this step, none that ended so, or none with the sort key.
    """
    if folder.is_file():
        records, origin = read_sample_file(folder), str(folder)
    else:
        folder = existing_folder(folder)
        rollouts = folder / "rollouts"
        validation = validation or (not rollouts_steps(rollouts) and bool(rollouts_steps(rollouts, "val")))
        kind: RolloutKind = "val" if validation else "train"
        step = _existing_step(folder, step, kind)
        records = read_samples(rollouts, step, kind)
        origin = f"{'validation after step' if validation else 'step'} {step}"
    found = [record for record in records if not ends or _end(record) in ends]
    if not found:
        raise NoSamplesError(f"none of these samples ended by {' or '.join(ends)}; they ended by {_counted(records)}")
    shown = _sorted(found, sort)[:limit]
    title = f"{origin}: {len(shown)} of {len(records)} samples"
    title += f", by {sort}" if sort else ""
    if any(map(is_episode, records)):
        title += f"; they ended by {_counted(records)}"
    labelled = [(str(number), record) for number, record in enumerate(shown, start=1)]
    show = tokens_shown if tokens else samples_shown
    console.print(show(labelled, title))


def _end(record: Sample) -> str:
    return str(record.get("end") if is_episode(record) else record.get("finish_reason"))


def _counted(records: Sequence[Sample]) -> str:
    """Return how the samples ended, with how many each way, the most frequent first."""
    return ", ".join(f"{on_one_line(end, 20)} ({number})" for end, number in Counter(map(_end, records)).most_common())


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
