"""`hrl rollouts`: the samples of a run in the terminal, while it runs or long after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from hrl.errors import HrlError
from hrl.report.console import samples_table
from hrl.report.rollout_log import Sample
from hrl.report.run_folder import RolloutKind, read_jsonl, rollouts_file, rollouts_steps

#: What samples can be sorted by, and the column of a record that says it.
SORT_KEYS = {"score": "score", "length": "response_length", "advantage": "advantage"}


class BrowseError(HrlError, ValueError):
    """There are no such samples. The message says which there are."""


def show_rollouts(
    folder: Path,
    console: Console,
    *,
    step: int | None = None,
    sort: str | None = None,
    limit: int = 10,
    validation: bool = False,
) -> None:
    """List samples of one step.

    Args:
        folder: The run folder.
        console: Where to write.
        step: The step; the last one by default.
        sort: A name of `SORT_KEYS`, the largest first; by default samples stand in the order of the batch, those of
            one prompt together.
        limit: How many to show.
        validation: Samples of the validation after the step, in place of its training samples.

    Raises:
        BrowseError: The folder holds no samples, not those of the step, or not what to sort by.
    """
    kind: RolloutKind = "val" if validation else "train"
    step = _existing_step(folder, step, kind)
    records = read_jsonl(rollouts_file(folder / "rollouts", step, kind))
    shown = _sorted(records, sort)[:limit]
    title = f"{'validation after step' if validation else 'step'} {step}: {len(shown)} of {len(records)} samples"
    labelled = [(str(number), record) for number, record in enumerate(shown, start=1)]
    console.print(samples_table(labelled, f"{title}, by {sort}" if sort else title))


def _existing_step(folder: Path, step: int | None, kind: RolloutKind) -> int:
    if not folder.is_dir():
        raise BrowseError(f"there is no folder {folder}")
    steps = rollouts_steps(folder / "rollouts", kind)
    samples = "validation samples" if kind == "val" else "samples"
    if not steps:
        raise BrowseError(f"{folder} holds no {samples}: a run folder has them in rollouts/ after its first step")
    if step is None:
        return steps[-1]
    if step not in steps:
        raise BrowseError(f"{folder} holds no {samples} of step {step}; it holds those of {_ranges(steps)}")
    return step


def _sorted(records: Sequence[Sample], sort: str | None) -> Sequence[Sample]:
    if sort is None:
        return records
    key = SORT_KEYS[sort]
    if not any(key in record for record in records):
        others = " or ".join(name for name in SORT_KEYS if name != sort)
        raise BrowseError(f"these samples have no {sort}; sort them by {others}")
    return sorted(records, key=_largest_first(key))


def _largest_first(key: str) -> Callable[[Sample], tuple[bool, float]]:
    """Orders by `key`, records without such a number last."""
    return lambda record: (record.get(key) is None, -(record.get(key) or 0.0))


def _ranges(steps: Sequence[int]) -> str:
    """`[1, 2, 3, 7]` as `1-3, 7`."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
