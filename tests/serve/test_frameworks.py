"""Frameworks that speak only OpenAI's protocol play episodes, unmodified, in the processes of environments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.stage import Stage
from tests.serve.test_openai_client import require_sampled

FRAMEWORKS = Path(__file__).with_name("frameworks.py")
QUESTION = "What is 12 * 34?"


def solve(context: str) -> str:
    """Multiply, and then say what came of it, as each framework wants to be told."""
    said = context.rpartition(QUESTION)[2]
    if "408" not in said:
        return call("multiply", a=12, b=34)
    return call("final_answer", answer="408") if "final_answer" in context else "It is 408."


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage(f"{FRAMEWORKS}:agent", kwargs={"kind": "OpenAIAgents"}, step_timeout_s=60.0) as one:
        yield one


@pytest.mark.parametrize(("framework", "num_rows"), [("OpenAIAgents", 1), ("Smolagents", 2)])
def test_an_agent_of_a_framework_plays_an_episode(stage: Stage, framework: str, num_rows: int) -> None:
    """smolagents writes the calls in its history anew, as text: its second turn is a branch."""
    (episode,), engine = stage.play(framework, say=solve, question=QUESTION, limits=(20_000, 20_000))
    assert (episode.end, episode.error, episode.turn_rewards) == ("done", None, [None, 1.0])
    assert len(episode.rows) == num_rows
    require_sampled(list(episode.rows), engine)
    assert episode.num_tool_calls == (1 if framework == "OpenAIAgents" else 2) and not episode.num_tool_errors
    assert {sampling.temperature for _, _, sampling in engine.record} == {0.7}
