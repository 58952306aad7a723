"""Agents of frameworks that speak OpenAI's protocol and know nothing of hrl; environments of the tests.

The frameworks lie where `make install-dev` puts them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from hrl.environments.agent import AgentEnvironment, ClientSettings

FOLDER = str(Path(sys.prefix) / "agents")
if FOLDER not in sys.path:
    sys.path.append(FOLDER)


def agent(kind: str) -> AgentEnvironment:
    """Make one."""
    made: AgentEnvironment = globals()[kind]()
    return made


class OpenAIAgents(AgentEnvironment):
    """An agent of openai-agents with a tool; 1 for the right answer."""

    async def run(self, row: Mapping[str, Any], client: ClientSettings) -> float:
        from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

        set_tracing_disabled(True)

        def multiply(a: int, b: int) -> int:
            """Multiply two numbers."""
            return a * b

        async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as ask:
            model = OpenAIChatCompletionsModel(client.model, ask)
            solver = Agent(name="solver", instructions="Use the tool.", tools=[function_tool(multiply)], model=model)
            result = await Runner.run(solver, row["prompt"][-1]["content"])
        return float("408" in str(result.final_output))


class Smolagents(AgentEnvironment):
    """A tool-calling agent of smolagents, which forces calls unless it is told otherwise; 1 for the right answer."""

    def run(self, row: Mapping[str, Any], client: ClientSettings) -> float:
        from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool

        def multiply(a: int, b: int) -> int:
            """Multiply two numbers.

            Args:
                a: One.
                b: The other.
            """
            return a * b

        model = OpenAIServerModel(client.model, api_base=client.base_url, api_key=client.api_key, tool_choice="auto")
        solver = ToolCallingAgent(tools=[tool(multiply)], model=model, max_steps=3, verbosity_level=LogLevel.OFF)
        return float("408" in str(solver.run(row["prompt"][-1]["content"])))
