"""The guide to environments: its classes play, and give what the page says of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hrl import cli
from hrl.environments.interface import Action
from hrl.environments.replies import read_observation, read_step
from hrl.environments.tools import tool_of
from tests.docs.command_lines import command_lines

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
#: File that a block is said to stand in → its code.
FILES = {match[1]: code for code in BLOCKS if (match := re.match(r"# (\w+\.py)\n", code))}


def names_of(file: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": file}
    exec(compile(FILES[file], file, "exec"), namespace)  # noqa: S102 (our own page)
    return namespace


@pytest.fixture
def of_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page, where a reader types its lines."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("of_a_reader")
@pytest.mark.parametrize("code", BLOCKS)
def test_every_block_runs(code: str) -> None:
    exec(compile(code, str(PAGE), "exec"), {"__name__": "environments"})  # noqa: S102 (our own page)


def test_the_guessing_game_pays_by_turn_and_depends_on_its_seed_alone() -> None:
    made = names_of("guess.py")["Guess"]
    games = [made(), made()]
    assert all(read_observation(game.reset({}, seed=3)).messages for game in games)
    assert games[0].secret == games[1].secret
    wrong = read_step(games[0].step(Action(f"Maybe {games[0].secret - 1}?")))
    assert (wrong.reward, wrong.done) == (-0.1, False) and "larger" in str(wrong.observation)
    right = read_step(games[0].step(Action(str(games[0].secret))))
    assert (right.reward, right.done, right.metrics) == (1.0, True, {"won": 1.0})


def test_the_spelling_game_reads_its_row_and_its_arguments() -> None:
    game = names_of("spell.py")["Spell"](penalty=0.5)
    first = read_observation(game.reset({"prompt": [{"role": "user", "content": "Spell ox."}], "answer": "ox"}))
    assert len(first.messages or ()) == 2
    results = [read_step(game.step(Action(text))) for text in ("O", "y")]
    assert [(result.reward, result.done) for result in results] == [(1.0, False), (-0.5, True)]


def test_brief_answers_are_paid_by_token() -> None:
    game = names_of("brief.py")["Brief"](free=2, price=0.5)
    game.reset({"prompt": "6 * 7?", "answer": "42"})
    for text, rewards in (("It is 42", (0.0, 0.0, -0.5, 0.5)), ("It is 43", (0.0, 0.0, -0.5, -0.5))):
        result = read_step(game.step(Action(text, token_ids=(5, 6, 7, 8))), num_tokens=4)
        assert (result.reward, result.done) == (rewards, True)


@pytest.mark.usefixtures("of_a_reader")
@pytest.mark.parametrize(
    "words", [words for words in command_lines(PAGE) if words[1] == "env-test" and "--engine" not in words]
)
def test_what_the_page_tries_fits(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(words[1:]) == 0
    out = capsys.readouterr().out
    if "--say" not in words:
        is_written = " ".join(out.replace(f"{Path.cwd()}/", "").split())  # the path of the test's folder is longer
        (shown,) = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        its_own = [line for line in shown.splitlines() if line != "…" and "the slowest call" not in line]
        assert [line for line in its_own if " ".join(line.split()) not in is_written] == []
    for check in ("replies", "masks", "rewards", "repeats", "close"):
        assert f"✓  {check}" in out
    assert "--say" in words or "the episodes' sums are 0.9, 0.3, 0.8" in out, "as on the page"


def test_the_tools_have_schemas_from_their_hints_and_docstrings() -> None:
    schema = tool_of(names_of("calculator.py")["multiply"]).schema["function"]
    assert schema["parameters"]["required"] == ["a", "b"] and "Multiply" in schema["description"]
    notes = names_of("notes.py")["Notes"]()
    notes.reset({"prompt": "Remember it."})
    assert list(notes.tools) == ["write_down"]
    notes.notes.append("42")
    assert [notes.answered(Action(text)) for text in ("It is 42.", "No idea.")] == [1.0, 0.0]
