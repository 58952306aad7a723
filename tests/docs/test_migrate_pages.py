"""What the pages for those who come from elsewhere show of `hrl migrate` is what it writes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hrl import cli
from hrl.migrate import trl_rewards

DOCS = Path(__file__).parents[2] / "docs"
_SHOWN = re.compile(r"^```text\n\$ ((?:[^\n]*\\\n)*[^\n]*hrl migrate[^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["from-trl.md", "coming-from-verl.md", "from-openrlhf.md"])
def test_the_command_shows_what_it_writes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ((command, shown),) = _SHOWN.findall((DOCS / name).read_text())
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == "echo"
    (tmp_path / "line").write_text(words[1])
    monkeypatch.setattr("sys.stdin", (tmp_path / "line").open())
    assert cli.main(words[words.index("hrl") + 1 :]) == 0
    assert capsys.readouterr().out == shown


def test_every_reward_of_trl_is_on_its_page() -> None:
    page = (DOCS / "from-trl.md").read_text()
    assert [name for name in trl_rewards.FUNCTIONS if f"`{name}" not in page] == []
