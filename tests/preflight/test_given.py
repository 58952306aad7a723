"""Rows that a caller has as objects take the place of files, and of validation files too."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from hrl.config.compose import compose_kind
from hrl.config.load import load_kind
from hrl.config.run_kind import KINDS
from hrl.errors import ConfigError, DatasetError
from hrl.preflight.findings import Findings
from hrl.preflight.given import Given
from hrl.preflight.reward_look import look_at_reward

ROWS = [{"prompt": "hi"}]


def test_given_rows_are_named_and_validate_on_given_rows_only() -> None:
    config = load_kind(KINDS["ppo"], {})
    of_function = Given(reward=len).named_in(config)
    assert (of_function.data, of_function.trainer) == (config.data, config.trainer)
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


class Lexicon:
    def __call__(self, response: str) -> float:
        return 1.0


def graded(response: str, most: int) -> float:
    return float(len(response) <= most)


def test_functions_given_as_objects_are_named_with_their_file_and_are_missed_in_a_run_without_them() -> None:
    here = Path(__file__).resolve()
    config = compose_kind(KINDS["ppo"], [])
    given = ["numeric", (partial(graded, most=3), 0.5), Lexicon(), lambda response: 1.0]
    named = load_kind(KINDS["ppo"], Given(reward=given).named_in(config))
    functions = named.reward.functions
    assert [(entry.part, entry.weight) for entry in functions] == [
        *(("numeric", 1.0), ("graded", 0.5)),
        *(("Lexicon", 1.0), ("lambda", 1.0)),
    ]
    paths = [entry.path for entry in functions]
    assert paths[:3] == [None, f"python:{__name__}:graded of {here}", f"python:{__name__}:Lexicon of {here}"]
    assert "<lambda>" in paths[3]
    assert Given(reward=given).named_in(named) == named, "the same run again, from its config.yaml"

    findings = Findings()
    look_at_reward(findings, named, Given(), None, None)
    (problem,) = findings.problems
    assert (problem.key, problem.hint) == (
        "reward.functions",
        "Give it again (hrl.GRPO(reward=…)), or name its file (my_reward.py:function).",
    )
    assert f"has python:{__name__}:graded of {here}: a function that an earlier run was given" in problem.what


def test_a_function_given_beside_others_that_are_named_is_refused_as_before() -> None:
    named = compose_kind(KINDS["ppo"], ["reward.functions=[numeric]"])
    assert Given(reward=Lexicon()).named_in(named) == named
    findings = Findings()
    look_at_reward(findings, named, Given(reward=Lexicon()), SimpleNamespace(known=(), columns=()), None)
    assert any("leave one of the two out" in problem.what for problem in findings.problems)
