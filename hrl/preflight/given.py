"""Objects that a caller in Python gives to a run instead of files named in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hrl.config.outline import RunConfiguration
from hrl.config.section import Section

TRAIN_ROWS, VAL_ROWS = "python:train_rows", "python:val_rows"
"""The name of rows given as objects in `config.yaml` and messages."""


@dataclass(frozen=True)
class Given:
    """Objects given by the caller; for None the configuration applies.

    Attributes:
        train_rows: Rows to train on, in the format of rows in `data.train_files`.
        val_rows: Rows to validate on; if None, a run with `train_rows` does not validate.
        reward: The reward function, called like `compute_score`; see `RewardSpec.of_callable` for how it is sent.
    """

    train_rows: Sequence[Mapping[str, Any]] | None = None
    val_rows: Sequence[Mapping[str, Any]] | None = None
    reward: Callable[..., Any] | None = None

    def named_in(self, config: RunConfiguration) -> RunConfiguration:
        """Return a configuration with the names of these rows in place of files.

        If only training rows are given, the run does not validate: the configuration's validation rows belong to its
        own training rows.
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
