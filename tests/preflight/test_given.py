"""Rows that a caller has as objects take the place of files, and of validation files too."""

from __future__ import annotations

import pytest

from hrl.config.compose import compose_kind
from hrl.config.load import load_kind
from hrl.config.run_kind import KINDS
from hrl.errors import ConfigError, DatasetError
from hrl.preflight.given import Given

ROWS = [{"prompt": "hi"}]


def test_given_rows_are_named_and_validate_on_given_rows_only() -> None:
    config = load_kind(KINDS["ppo"], {})
    assert Given(reward=len).named_in(config) is config
    validated = Given(val_rows=ROWS).named_in(config)
    assert (validated.data.train_files, validated.data.val_files) == (config.data.train_files, ["python:val_rows"])
    alone = load_kind(KINDS["ppo"], Given(train_rows=ROWS).named_in(config))
    assert (alone.data.train_files, alone.data.val_files) == (["python:train_rows"], [])
    assert not alone.trainer.val_before_train
    both = load_kind(KINDS["ppo"], Given(ROWS, ROWS).named_in(config))
    assert (both.data.val_files, both.trainer.val_before_train) == (["python:val_rows"], True)


def test_validation_files_of_the_callers_own_stay_beside_given_training_rows() -> None:
    config = load_kind(KINDS["ppo"], {"data": {"val_files": ["held_out.parquet"]}, "trainer": {"test_freq": 5}})
    mixed = load_kind(KINDS["ppo"], Given(train_rows=ROWS).named_in(config))
    assert (mixed.data.train_files, mixed.data.val_files) == (["python:train_rows"], ["held_out.parquet"])
    assert (mixed.trainer.val_before_train, mixed.trainer.test_freq) == (True, 5)


def test_files_beside_rows_are_refused() -> None:
    for key, given in (("train_files", Given(train_rows=ROWS)), ("val_files", Given(val_rows=ROWS))):
        both = compose_kind(KINDS["ppo"], ["data.train_files=python:train_rows", f"data.{key}=rows.jsonl"])
        with pytest.raises(DatasetError, match=rf"data\.{key} is \['rows\.jsonl'\], and rows are given as objects too"):
            given.named_in(both)
    again = compose_kind(KINDS["ppo"], ["data.train_files=[python:train_rows]", "data.val_files=[python:val_rows]"])
    assert Given(ROWS, ROWS).named_in(again).data.val_files == ["python:val_rows"]


def test_a_test_freq_without_rows_to_validate_on_is_refused() -> None:
    config = load_kind(KINDS["ppo"], {"trainer": {"test_freq": 5}})
    with pytest.raises(ConfigError, match=r"trainer\.test_freq is 5, but data\.val_files is empty"):
        load_kind(KINDS["ppo"], Given(train_rows=ROWS).named_in(config))
    asked_for = compose_kind(KINDS["ppo"], ["trainer.test_freq=5"])
    with pytest.raises(ConfigError, match=r"trainer\.test_freq is 5"):
        load_kind(KINDS["ppo"], Given(train_rows=ROWS).named_in(asked_for))


def test_the_quickstarts_own_validation_leaves_with_its_rows() -> None:
    quickstart = compose_kind(KINDS["ppo"], [])
    assert quickstart.trainer.test_freq > 0
    alone = load_kind(KINDS["ppo"], Given(train_rows=ROWS).named_in(quickstart))
    assert (alone.data.val_files, alone.trainer.test_freq) == ([], -1)


def test_a_generator_of_rows_can_be_read_again() -> None:
    given = Given(train_rows=(row for row in ROWS))
    assert (given.train_rows, given.train_rows) == (ROWS, ROWS)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("rows.parquet", "train_rows is of type str; give a list of rows"),
        ({"prompt": ["a", "b"]}, "train_rows is of type dict; give a list of rows"),
        (5, "train_rows is of type int; give a list of rows"),
        (iter(["prompt", "data_source"]), r"train_rows, of type list_iterator, yields strings.*df\.to_dict"),
    ],
)
def test_what_is_no_iterable_of_rows_is_refused(rows: object, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        Given(train_rows=rows)  # type: ignore[arg-type]
