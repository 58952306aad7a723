"""The page of promises names tests that there are and commands that work."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

from hrl import cli
from tests.docs.command_lines import command_lines, run_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "first-hour.md"
PROMISES = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]
#: Commands that are over in a moment.
CHEAP = {"tasks", "reward", "migrate", "rollouts"}


def functions_of(module: Path) -> set[str]:
    return {node.name for node in ast.parse(module.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_promises_are_counted() -> None:
    assert [int(promise.split(".")[0]) for promise in PROMISES] == [*range(1, 20)]
    assert "Nineteen promises" in PAGE.read_text()


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.splitlines()[0])
def test_a_promise_is_shown_by_a_command_and_held_by_tests_that_there_are(promise: str) -> None:
    assert "```console\n$ " in promise
    named = re.findall(r"^- `(tests/[\w/]+\.py)::(\w+)`$", promise, re.MULTILINE)
    assert named
    assert not [name for file, name in named if name not in functions_of(ROOT / file)]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of somebody who has rows, responses, a reward and a run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward.py").write_text(
        "def compute_score(response, answer):\n    return float(answer in response)\n"
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "What is 7 + 5?", "answer": "12"}) + "\n")
    (tmp_path / "responses.jsonl").write_text('"It is 12."\n"13"\n')
    run = tmp_path / "outputs" / "hrl" / "quickstart"
    (run / "rollouts").mkdir(parents=True)
    sample = {"prompt": "What is 7 + 5?", "response": "12", "score": 1.0, "advantage": 0.0, "response_tokens": 1}
    (run / "rollouts" / "step_1.jsonl").write_text(json.dumps(sample) + "\n")
    return tmp_path


def cheap_lines() -> list[list[str]]:
    lines = [words for words in command_lines(PAGE) if words[0] == "hrl"]
    return [words for words in lines if words[1] in CHEAP or "--config-only" in words]


@pytest.mark.parametrize("words", cheap_lines(), ids=" ".join)
def test_what_a_moment_takes_is_run(words: list[str], reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if words[1] == "migrate":
        ((_, said),) = [line for line in command_lines(PAGE) if line[0] == "echo"]
        (reader / "line").write_text(said)
        monkeypatch.setattr("sys.stdin", (reader / "line").open())
    wrong = run_of(words) is not None  # the line whose names are misspelt
    assert cli.main(words[1:]) == (2 if wrong else 0), shlex.join(words)


def test_scripts_and_commands_stand_in_shell_blocks() -> None:
    scripts = [words[1] for words in command_lines(PAGE) if words[0] == "python"]
    assert len(scripts) == 2
    assert all((ROOT / script).exists() for script in scripts)
    assert len(cheap_lines()) == 5
