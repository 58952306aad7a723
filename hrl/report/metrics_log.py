"""`metrics.jsonl`: one JSON object per step, in the order of the steps, also of a run that was resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hrl.report.run_folder import json_line, read_jsonl, write_text, writing_to


class MetricsLog:
    """The log of a run, open for writing. A record is in the file when `write` returns.

    Args:
        path: The file; records that it holds already are continued.

    Raises:
        ValueError: A line of the file is no JSON; names file and line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        records = read_jsonl(path) if path.exists() else []
        self._last_step = records[-1]["step"] if records else -1
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open for the whole run)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write what is known of a step. If the step has a record, it takes the metrics up; newer numbers replace.

        So a run that was finished and only validates again leaves no second record of its last step.

        Raises:
            ValueError: A later step has been written.
            RunFolderError: The file can't be written.
        """
        if step < self._last_step:
            raise ValueError(f"{self.path} is at step {self._last_step}, so that step {step} can't be written any more")
        with writing_to(self.path.parent):
            if step == self._last_step:
                self._amend_last(metrics)
            else:
                self._file.write(json_line({"step": step, **metrics}))
                self._file.flush()
        self._last_step = step

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _amend_last(self, metrics: Mapping[str, float]) -> None:
        records = read_jsonl(self.path)
        records[-1] |= metrics
        self._file.close()
        write_text(self.path, "".join(map(json_line, records)))
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
