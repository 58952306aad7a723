"""The guide to rewards: its code runs, its commands do what it says, its table is the catalogue's."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from hrl import cli
from hrl.config.compose import compose_cli
from hrl.config.load import load_config
from hrl.reward.library.catalogue import CATALOGUE

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
TEXT = PAGE.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def library_table() -> str:
    """The table that the page has to show."""
    lines = ["| name | pays for | score | arguments |", "| --- | --- | --- | --- |"]
    for entry in CATALOGUE.values():
        arguments = ", ".join(
            f"`{one.name}`" if one.is_required or (isinstance(one.default, str) and len(one.default) > 30)
            else f"`{one.name}={json.dumps(one.default)}`"
            for one in entry.arguments
        )  # fmt: skip
        scores = entry.scores.replace("|", "\\|")
        lines.append(f"| `{entry.name}` | {entry.rewards.rstrip('.')} | {scores} | {arguments or '–'} |")
    return "\n".join(lines)


def test_the_table_of_the_library_is_the_catalogues() -> None:
    found = TEXT.partition("<!-- library -->\n")[2].partition("\n<!-- /library -->")[0]
    assert found == library_table(), f"docs/rewards.md should have\n{library_table()}"


def test_every_python_block_runs() -> None:
    namespace: dict[str, object] = {"__name__": "rewards"}
    for code in blocks("python"):
        exec(compile(code, str(PAGE), "exec"), namespace)  # noqa: S102 (our own page)


@pytest.mark.parametrize("code", blocks("yaml"))
def test_every_yaml_block_is_a_configuration(code: str) -> None:
    assert load_config(yaml.safe_load(code)).reward.entries


def test_the_list_is_the_same_in_yaml_and_on_a_command_line() -> None:
    (line,) = [line for code in blocks("bash") for line in code.splitlines() if "[numeric" in line and "check" in line]
    in_yaml = next(yaml.safe_load(code) for code in blocks("yaml") if "numeric" in code)
    assert compose_cli(shlex.split(line)[2:]).reward.entries == load_config(in_yaml).reward.entries[:2]


@pytest.mark.parametrize(
    "line", [line for code in blocks("bash") for line in code.splitlines() if "hrl reward" in line]
)
def test_every_trial_of_the_page_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward.py").write_text(blocks("python")[0])
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 7 + 5?", "answer": "12"}\n')
    (tmp_path / "responses.jsonl").write_text('"It is 12."\n{"response": "13"}\n')
    assert cli.main(shlex.split(line)[1:]) == 0
