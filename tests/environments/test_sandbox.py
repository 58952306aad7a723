"""The tool `python`: what the policy is told, and who waits for whom."""

import asyncio
import threading

import pytest

from hrl.environments.interface import Action, ToolCall
from hrl.environments.loading import EnvironmentLoadError, EnvironmentMaker, EnvironmentSpec
from hrl.environments.sandbox import PythonEnvironment
from hrl.environments.tools import ToolLimits
from hrl.processes import sandbox
from hrl.processes.sandbox import ProgramResult, SandboxError, sandbox_limit
from hrl.processes.waiting import Places

pytestmark = pytest.mark.skipif(sandbox_limit() is not None, reason=f"no sandbox here: {sandbox_limit()}")


def asked(program):
    return Action("", tool_calls=(ToolCall("python", {"code": program}, "call_0_0"),))


def test_the_tool_runs_programs_of_the_policy():
    environment = PythonEnvironment(time_s=20)
    (schema,) = [one.schema for one in environment.tools.values()]
    assert schema["function"]["name"] == "python"
    assert schema["function"]["parameters"]["properties"]["code"] == {"type": "string", "description": "The program."}
    call = ToolCall("python", {"code": "print(6 * 7)"}, "call_0_0")
    result = asyncio.run(environment.step(Action("", tool_calls=(call,))))
    assert [message["content"] for message in result.observation] == ["42"]
    assert result.metrics["tool_errors"] == 0


def test_the_tool_is_named_in_the_configuration():
    spec = EnvironmentSpec.from_plain(EnvironmentSpec.of("tools", tools=["python"]).to_plain())
    environment = EnvironmentMaker(spec).make()
    assert environment.tools["python"].schema == PythonEnvironment().tools["python"].schema
    assert asyncio.run(environment.tools["python"].function("1 + 1")) == "2"
    with pytest.raises(EnvironmentLoadError, match="'pyton'.*Did you mean python"):
        EnvironmentSpec.of("tools", tools=["pyton"])


class Slow:
    """Programs that take no processor, and end when they are told to or given up."""

    def __init__(self, monkeypatch):
        self.begun, self.end = [], threading.Event()
        monkeypatch.setattr(sandbox.Sandbox, "_show", self.show)
        monkeypatch.setattr(sandbox, "PLACES", Places(1))

    def show(self, program, given_up):
        self.begun.append(program)
        while program == "slow" and not self.end.wait(0.01) and not given_up.is_set():
            pass
        return ProgramResult(f"{program} is done", "done", 0.0)


def tool_environment(timeout_s, **kwargs):
    environment = PythonEnvironment(time_s=timeout_s / 2, **kwargs)
    environment.set_up([], ToolLimits(timeout_s))
    return environment


async def answer(environment, program):
    return (await environment.step(asked(program))).observation[0]["content"]


def test_the_deadline_of_a_call_begins_when_its_program_does(monkeypatch):
    slow = Slow(monkeypatch)

    async def play():
        others = asyncio.create_task(answer(tool_environment(60), "slow"))
        await asyncio.sleep(0)
        mine = asyncio.create_task(answer(tool_environment(0.2), "quick"))
        done, _ = await asyncio.wait({mine}, timeout=0.7)
        assert not done and slow.begun == ["slow"]
        slow.end.set()
        return await asyncio.gather(others, mine)

    assert asyncio.run(play()) == ["slow is done", "quick is done"]


def test_waiting_is_bounded_and_a_call_that_was_given_up_is_not_run(monkeypatch):
    slow = Slow(monkeypatch)

    async def play():
        others = asyncio.create_task(answer(tool_environment(60), "slow"))
        await asyncio.sleep(0)
        told = await answer(tool_environment(60, wait_s=0.1), "busy")
        gone = asyncio.create_task(answer(tool_environment(60), "given up"))
        await asyncio.sleep(0.01)
        gone.cancel()
        last = asyncio.create_task(answer(tool_environment(60), "quick"))
        await asyncio.sleep(0.05)
        others.cancel()  # ends its program, and leaves its place
        assert await last == "quick is done"
        return told

    assert "SandboxBusyError: the program was not run: for 0.1 s (wait_s of the sandbox)" in asyncio.run(play())
    assert slow.begun == ["slow", "quick"]


def test_a_program_may_not_take_longer_than_its_call():
    with pytest.raises(
        SandboxError, match=r"environment\.kwargs\.time_s is 10 s, .* less than environment\.tool_timeout_s=10"
    ):
        PythonEnvironment().set_up([], ToolLimits(10))
