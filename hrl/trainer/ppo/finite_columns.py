"""A step's columns are looked at phase by phase: a batch with a number that is not finite teaches nothing.

One NaN may spread to every row once advantages are normalised over the batch, and an infinite ratio is clipped to a
finite one that teaches the opposite of what was meant. So the first column that has such a number keeps the whole batch
from critic and policy, whether or not it would show in a loss. Its rows are kept in two files of
`<run folder>/nonfinite`, `step_N.<phase>.json` and `step_N.<phase>.safetensors`, which are like those of a mini-batch
that was not applied, see `hrl.workers.engine.nonfinite`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from hrl.errors import NonFiniteError
from hrl.metrics import Metric, StepMetrics
from hrl.protocol import DataProto
from hrl.trainer.phases import StepEnd
from hrl.workers.engine.nonfinite import FOLDER, MAX_DUMPS, MAX_IN_A_ROW, unpadded, write_dump

logger = logging.getLogger(__name__)

#: Rows of a batch that are kept: those that are broken, and others of their prompts.
MAX_ROWS = 64
#: Columns that are looked at later than after the phase that made them, because scores are needed first.
_MADE_IN = {"rollout_log_probs": "gen"}


class NonFiniteBatchError(NonFiniteError):
    """A column of a step's batch has a number that is not finite; several steps in a row end the run."""


@dataclass(frozen=True)
class BrokenColumn:
    """The first column of a step that is not finite.

    Attributes:
        phase: After which it was seen.
        name: Of the column.
        rows: Its rows with such a number.
        position: Of the first such number in the first of these rows, in response tokens; None for a column of rows.
        value: That number.
        count: How many there are.
    """

    phase: str
    name: str
    rows: list[int]
    position: int | None
    value: float
    count: int

    def told(self, batch: DataProto) -> str:
        """Return which number it is."""
        row = self.rows[0]
        others, token = batch.non_tensor_batch, "" if self.position is None else f", response token {self.position}"
        sample = f", sample {others['sample_index'][row]}" if "sample_index" in others else ""
        return f"{self.name} is {self.value} in row {row} (uid {others['uid'][row]}{sample}{token})"


class LeftOutError(StepEnd):
    """Ends the phases of a step before it learns; not an error of the run.

    Attributes:
        batch: With the columns that it has so far.
        broken: The column.
    """

    def __init__(self, batch: DataProto, broken: BrokenColumn) -> None:
        super().__init__(broken.name)
        self.batch = batch
        self.broken = broken


class FiniteColumns:
    """Looks at the columns of every step.

    Args:
        run_folder: Of the run.
        note: Tells the user.

    Attributes:
        left_out: Whether the present step's batch teaches nothing.
        in_a_row: How many batches taught nothing since the last one that did; a run that resumes counts on.
    """

    def __init__(self, run_folder: Path, note: Callable[[str], None]) -> None:
        self._folder = run_folder / FOLDER
        self._note = note
        self.in_a_row = 0
        self._seen: dict[str, Tensor] = {}
        self.left_out = False

    def begin(self) -> None:
        """Forget the columns of the step before."""
        self._seen.clear()
        self.left_out = False

    def look(self, batch: DataProto, phase: str) -> None:
        """Look at the columns that have come since the last look; numbers that nothing is learnt from may be anything.

        Args:
            batch: With `response_mask (B, R)`.
            phase: Which has just ended.

        Raises:
            LeftOutError: One is not finite.
        """
        mask = batch.batch["response_mask"].bool()
        for name, column in batch.batch.items():
            if self._seen.get(name) is column or not column.is_floating_point():
                continue
            self._seen[name] = column
            # A finite sum has finite terms, and is quicker to tell.
            if (
                not torch.isfinite(column.sum())
                and (broken := _broken(name, column, mask, _MADE_IN.get(name, phase))) is not None
            ):
                raise LeftOutError(batch, broken)

    def learnt(self, metrics: StepMetrics) -> None:
        """Note that a batch without a broken column was learnt from."""
        self.in_a_row = 0
        metrics.observe({"nonfinite/batches": Metric.total(0)})

    def leave_out(self, left_out: LeftOutError, step: int, metrics: StepMetrics) -> DataProto:
        """Count, keep and tell of a batch that teaches nothing, and return it.

        Raises:
            NonFiniteBatchError: It is the last of `MAX_IN_A_ROW`.
        """
        batch, broken = left_out.batch, left_out.broken
        assert batch is not None, "it was looked at"
        self.in_a_row += 1
        self.left_out = True
        metrics.observe({"nonfinite/batches": Metric.total(1), "nonfinite/numbers": Metric.total(broken.count)})
        kept = self._keep(batch, broken, step)
        where = "" if kept is None else f". Its rows are in {kept}"
        told = f"after phase {broken.phase}, {broken.told(batch)}"
        if self.in_a_row >= MAX_IN_A_ROW:
            self._end(f"{told}; {broken.count} number(s) of this column are not finite{where}")
        self._note(f"step {step}: nothing is learnt from this batch ({self.in_a_row} in a row): {told}{where}")
        return batch

    def _end(self, what: str) -> NoReturn:
        raise NonFiniteBatchError(
            f"{self.in_a_row} steps in a row had a batch with numbers that are not finite: {what}. A column of "
            "log-probs or values points to the weights of that model, or to its dtype; rewards to the KL penalty's size"
        )

    def _keep(self, batch: DataProto, broken: BrokenColumn, step: int) -> Path | None:
        name = f"step_{step}.{broken.phase}"
        if len([file for file in self._folder.glob("step_*.json") if "_rank_" not in file.name]) >= MAX_DUMPS:
            logger.warning("%s is not kept: there are many batches in %s already", name, self._folder)
            return None
        uids = batch.non_tensor_batch["uid"]
        first = broken.rows[:MAX_ROWS]
        group = [row for row in np.flatnonzero(np.isin(uids, uids[first])).tolist() if row not in set(first)]
        rows = [*first, *group][:MAX_ROWS]
        described = {
            "step": step,
            "phase": broken.phase,
            "column": broken.name,
            "first": {"row": broken.rows[0], "position": broken.position, "value": broken.value},
            "numbers": broken.count,
            "broken_rows": len(broken.rows),
            "rows": rows,
            "uids": [*uids[rows]],
            "meta_info": batch.meta_info,
        }
        return write_dump(self._folder, name, unpadded(batch, [tuple(rows)]), described)


def _broken(name: str, column: Tensor, mask: Tensor, phase: str) -> BrokenColumn | None:
    """Return what is broken of a column, among the numbers that count; None where nothing is."""
    per_token = column.shape[:2] == mask.shape
    counted = mask if per_token else mask.any(-1)
    bad = ~torch.isfinite(column)
    if bad.dim() > counted.dim():
        bad = bad.flatten(counted.dim()).any(-1)
    bad &= counted
    if not bad.any():
        return None
    rows = bad.nonzero()[:, 0].unique().tolist()
    position = int(bad[rows[0]].nonzero()[0]) if per_token else None
    value = column[rows[0]] if position is None else column[rows[0], position]
    value = value.flatten()[~torch.isfinite(value.flatten())]
    return BrokenColumn(phase, name, rows, position, float(value[0]), int(bad.sum()))
