"""The tool of verl's on the page and the environment that it becomes have the same schema, answers and rewards."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from hrl.environments.interface import Action, ToolCall
from hrl.environments.replies import read_step

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-verl.md"
BLOCKS = {
    name: code
    for code in re.findall(r"^```(?:python|yaml)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    if (name := re.match(r"# ([\w.]+)", code)) and (name := name[1])
}
ROW = {
    "prompt": [{"role": "user", "content": "What is 6 times 7?"}],
    "extra_info": {"tools_kwargs": {"check_answer": {"create_kwargs": {"ground_truth": "42"}}}},
}
SPOKEN = Action(
    "", tool_calls=(ToolCall("check_answer", {"answer": "41"}), ToolCall("check_answer", {"answer": " 42"}))
)


class BaseTool:
    """The part of verl 0.9's class that its subclasses rely on."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config, self.tool_schema = config, tool_schema

    async def create(self, instance_id: str | None = None, **_: Any) -> tuple[str, Any]:
        return instance_id or "made", SimpleNamespace(text=None)


def names_of(file: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": file}
    exec(compile(BLOCKS[file], file, "exec"), namespace)  # noqa: S102 (our own page)
    return namespace


@pytest.fixture
def of_verl(monkeypatch: pytest.MonkeyPatch) -> Any:
    modules = {"base_tool": {"BaseTool": BaseTool}, "schemas": {"ToolResponse": SimpleNamespace}}
    for name in ("verl", "verl.tools"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, members in modules.items():
        module = ModuleType(f"verl.tools.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    (told,) = yaml.safe_load(BLOCKS["tools.yaml"])["tools"]
    assert told["class_name"] == "verl_tool.CheckAnswer"
    return names_of("verl_tool.py")["CheckAnswer"](told["config"], told["tool_schema"])


def made() -> Any:
    environment = names_of("check_answer.py")["CheckAnswer"]()
    environment.reset(ROW)
    return environment


def test_before_and_after_show_the_policy_the_same_tool(of_verl: Any) -> None:
    function = made().tools["check_answer"].schema["function"]
    assert function["name"] == of_verl.tool_schema["function"]["name"]
    assert function["description"] == of_verl.tool_schema["function"]["description"]
    assert function["parameters"]["properties"] == of_verl.tool_schema["function"]["parameters"]["properties"]
    assert function["parameters"]["required"] == of_verl.tool_schema["function"]["parameters"]["required"]


def test_before_and_after_answer_and_pay_alike(of_verl: Any) -> None:
    async def before(parameters: Any) -> tuple[str, float]:
        created = ROW["extra_info"]["tools_kwargs"]["check_answer"]
        instance, _ = await of_verl.create(**created)
        response, reward, _ = await of_verl.execute(instance, parameters)
        await of_verl.release(instance)
        return response.text, reward

    said = [asyncio.run(before(call.arguments)) for call in SPOKEN.tool_calls]
    environment = made()
    result = read_step(asyncio.run(environment.step(SPOKEN)))
    assert [message["content"] for message in result.observation.messages] == [text for text, _ in said]
    assert result.reward == sum(reward for _, reward in said)
    answer = read_step(asyncio.run(environment.step(Action("It is 42."))))
    assert (answer.reward, answer.done) == (1.0, True)
