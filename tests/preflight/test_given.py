"""Rows that a caller has as objects take the place of files, and of validation files too."""

from __future__ import annotations

from hrl.config.load import load_kind
from hrl.config.run_kind import KINDS
from hrl.preflight.given import Given

ROWS = [{"prompt": "hi"}]


def test_given_rows_are_named_and_validate_on_given_rows_only() -> None:
    config = load_kind(KINDS["ppo"], {})
    assert Given(reward=len).named_in(config) is config
    validated = Given(val_rows=ROWS).named_in(config)
    assert (validated.data.train_files, validated.data.val_files) == (config.data.train_files, ["python:val_rows"])
    alone = load_kind(KINDS["ppo"], Given(train_rows=ROWS).named_in(config))
    assert (alone.data.train_files, alone.data.val_files) == (["python:train_rows"], [])
    assert not alone.trainer.val_before_train and not alone.trainer.val_after_train
    both = load_kind(KINDS["ppo"], Given(ROWS, ROWS).named_in(config))
    assert (both.data.val_files, both.trainer.val_before_train) == (["python:val_rows"], True)
