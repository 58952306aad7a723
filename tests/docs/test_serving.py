"""The page on serving: its programs run as they stand there; its tables have the parameters that there are."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from hrl.serve.asked import MAX_CHOICES, ChatAsked, CompletionAsked
from hrl.serve.server import HttpLimits
from tests.serve.doors import KEY, opened
from tests.serve.stage import Stage
from tests.serve.test_frameworks import QUESTION, solve
from tests.serve.test_openai_client import require_sampled

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
TEXT = PAGE.read_text()
FILES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))


def test_the_client_of_the_page_is_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        async with opened(lambda _: "7", model="smollm2-135m-instruct") as door:
            monkeypatch.setenv("OPENAI_BASE_URL", door.server.base_url)
            monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}:my-agent")
            await asyncio.to_thread(exec, compile(FILES["ask.py"], "ask.py", "exec"), {"__name__": "ask"})
            assert len(door.calls("my-agent")) == 2

    asyncio.run(run())
    assert re.fullmatch(r"7 \[\d+, \d+\] \[-[\d.]+, -[\d.]+\]\n7", capsys.readouterr().out)


def test_the_agent_of_the_page_plays_an_episode(tmp_path: Path) -> None:
    frameworks = "import sys\nsys.path.append(sys.prefix + '/agents')\n"
    (tmp_path / "solver.py").write_text(frameworks + FILES["solver.py"])
    with Stage(f"{tmp_path / 'solver.py'}:Solver", step_timeout_s=60.0) as stage:
        (episode,), engine = stage.play(say=solve, question=QUESTION, limits=(20_000, 20_000), answer="408")
    assert (episode.end, episode.error, episode.turn_rewards) == ("done", None, [None, 1.0])
    require_sampled(list(episode.rows), engine)


def test_the_table_has_every_parameter() -> None:
    table = TEXT.partition("| parameter | here |")[2].partition("\n\n")[0]
    named = {name.partition(".")[0] for name in re.findall(r"`([a-z_.]+)`", table)}
    parameters = {*ChatAsked.model_fields, *CompletionAsked.model_fields} - {"model", "messages", "prompt"}
    assert parameters <= named
    assert f"up to {MAX_CHOICES} choices" in table


def test_the_limits_of_the_page_are_those_of_the_server() -> None:
    limits = HttpLimits()
    assert f"(`--body-mib`, {limits.body_bytes >> 20})" in TEXT
    assert f"at most {limits.connections:,} of" in " ".join(TEXT.split())
    assert f"A comment every {limits.still_there_s:g} s" in TEXT
