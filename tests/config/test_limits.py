"""What no key can hold is refused under its key, and a file that stands for more values than there is memory unread."""

from __future__ import annotations

from pathlib import Path

import pytest

from hrl.config import ConfigError, compose_cli, load_config
from hrl.config.limits import DEEPEST, MOST_VALUES, check_aliases, usable

ROWS = {"data": {"train_files": ["rows.jsonl"]}}


def nested(levels: int, kind: type) -> object:
    value: object = "x"
    for _ in range(levels):
        value = [value] if kind is list else {"a": value}
    return value


def problems_of(call, *arguments) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (10**5000, "holds an integer of more than 64 bits"),
        ([{"a": -(2**64)}], "holds an integer of more than 64 bits"),
        (nested(DEEPEST, list), "is nested more than 50 levels deep"),
        (nested(3000, dict), "is nested more than 50 levels deep"),
        ("a\0b", "holds a NUL character"),
        ({"\0": 1}, "holds a NUL character"),
        ("\ud800", "holds bytes that are not UTF-8, or half a character"),
        ([0] * (MOST_VALUES + 1), "holds more than 100,000 values"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("section", ["trainer", "no_such_section"])
def test_a_value_that_nothing_can_hold_is_refused_under_its_key(value, what, section):
    found = problems_of(load_config, {**ROWS, section: {"experiment_name": value}})
    assert any(problem.startswith(section) and what in problem for problem in found)


def test_what_is_just_small_enough_is_left_to_the_keys():
    problems: list = []
    values = {"a": 2**64 - 1, "b": nested(DEEPEST - 1, list), "c": ["ünï"] * 1000}
    assert usable(values, problems) == values and not problems


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("trainer.seed=" + "9" * 5000, "trainer.seed holds a number of thousands of digits. Quote it if it is text."),
        ("trainer.seed=" + "9" * 400, "trainer.seed holds an integer of more than 64 bits. No key needs one as large."),
        ("data.map=" + "{a:" * 60 + "1" + "}" * 60, "data.map is nested more than 50 levels deep."),
        ("data.map=" + "{a:" * 900 + "1" + "}" * 900, "data.map is nested too deep to be read."),
        ("recipe=null", "recipe has no choice None."),
        (
            "recipe=dpo",
            "recipe has no choice 'dpo'. It is a program of its own: python -m hrl.trainer.main_dpo --help.",
        ),
        ("recipe=[grpo]", "recipe has no choice ['grpo']."),
        ("trainer.seed:=1", "trainer.seed: can't read '1'"),
        ("a=\udcff", "a=\\udcff holds bytes that are not UTF-8, or half a character. Write the text in UTF-8."),
    ],
    ids=lambda text: text[:16],
)
def test_arguments_that_hydra_fails_on_are_problems_of_their_keys(argument, problem):
    (found,) = problems_of(compose_cli, ["data.train_files=rows.jsonl", argument])
    assert found.startswith(problem)


def written(folder: Path, content: bytes) -> list[str]:
    (folder / "mine.yaml").write_bytes(content)
    return problems_of(compose_cli, ["--config-path", str(folder), "--config-name", "mine"])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xe4: 1", "can't decode byte 0xe4"),
        (b"defaults: recipe", "defaults must be a list"),
        (b"defaults:\n - \n", "Unsupported type in defaults"),
        (b"1.5", "Invalid loaded object type: float"),
        (b"a: " + b"9" * 5000, "Exceeds the limit"),
        (b'{"a":' * 3000, "maximum recursion depth"),
        (b"a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
    ids=lambda value: value[:12].decode(errors="replace") if isinstance(value, bytes) else None,
)
def test_a_file_that_hydra_fails_on_is_named_with_why(tmp_path, content, why):
    (problem,) = (found for found in written(tmp_path, content) if found.startswith("mine.yaml"))
    assert problem.startswith("mine.yaml can't be composed: ") and why in problem


def bomb(levels: int) -> bytes:
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, levels))]
    return "\n".join(lines).encode()


@pytest.mark.parametrize("content", [bomb(40), b"a: &a [*a]", b"a: &a {b: *a}"], ids=["laughs", "itself", "below"])
def test_aliases_that_stand_for_more_than_there_is_memory_are_refused_unread(tmp_path, content):
    assert any(
        problem.startswith(f"{tmp_path}/mine.yaml has aliases (*name) that stand for more than 100,000 values")
        for problem in written(tmp_path, content)
    )


def test_ordinary_aliases_are_taken(tmp_path):
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "mine.yaml").write_bytes(bomb(8))
    assert not check_aliases(tmp_path)
    (tmp_path / "group" / "other.yaml").write_bytes(bomb(40))
    assert [problem.key for problem in check_aliases(tmp_path)] == [f"{tmp_path}/group/other.yaml"]


@pytest.mark.parametrize("folder", ["x" * 5000, "/proc", "/dev/null"], ids=lambda text: text[:6])
@pytest.mark.parametrize("option", ["--config-path", "--config-dir"])
def test_a_folder_that_can_not_be_looked_into_is_a_problem_and_no_traceback(option, folder):
    arguments = [option, folder, "data.train_files=rows.jsonl", "trainer.sede=1"]
    assert any("trainer.sede" in problem or option in problem for problem in problems_of(compose_cli, *[arguments]))
