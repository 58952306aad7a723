"""What a caller in Python hands to a run as objects, in the place of what a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hrl.config.outline import RunConfiguration
from hrl.config.section import Section

TRAIN_ROWS, VAL_ROWS = "python:train_rows", "python:val_rows"
"""What `config.yaml` and messages call rows that no file holds."""


@dataclass(frozen=True)
class Given:
    """Objects of the caller's; None leaves it to the configuration.

    Attributes:
        train_rows: Rows to train on, as the files of `data.train_files` would have them.
        val_rows: Rows to validate on; without them there is no validation beside `train_rows`.
        reward: The reward function, called as `compute_score` is; see `RewardSpec.of_callable` for how it travels.
    """

    train_rows: Sequence[Mapping[str, Any]] | None = None
    val_rows: Sequence[Mapping[str, Any]] | None = None
    reward: Callable[..., Any] | None = None

    def named_in(self, config: RunConfiguration) -> RunConfiguration:
        """Return a configuration that names these rows where it would name files.

        Without validation rows, training rows are validated on no others: those of the configuration belong to its own.
        """
        names: dict[str, list[str]] = {}
        if self.train_rows is not None:
            names = {"train_files": [TRAIN_ROWS], "val_files": []}
        if self.val_rows is not None:
            names["val_files"] = [VAL_ROWS]
        if not names:
            return config
        changes: dict[str, Section] = {"data": config.data.model_copy(update=names)}
        if self.val_rows is None:
            never = {"val_before_train": False, "val_after_train": False, "test_freq": -1}
            changes |= {"trainer": config.trainer.model_copy(update=never)}
        return config.model_copy(update=changes)
