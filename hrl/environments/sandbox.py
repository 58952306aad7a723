"""The tool `python`: the policy's programs, run in a sandbox."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from hrl.environments.tool_functions import tool
from hrl.environments.tools import ToolEnvironment, ToolLimits
from hrl.processes.sandbox import TIME_S, ProgramResult, Sandbox, SandboxError, sandbox_limit

__all__ = ["ProgramResult", "PythonEnvironment", "Sandbox", "SandboxError", "python_tool", "sandbox_limit"]


class PythonEnvironment(ToolEnvironment):
    """A tool environment whose tool `python` runs a program of the policy's.

    Args:
        time_s, memory_mib, disk_mib, packages, trust, wait_s: Of `Sandbox`.

    Raises:
        SandboxError: Programs can't be run safely here, and `trust` is not set.
    """

    def __init__(
        self,
        time_s: float = TIME_S,
        memory_mib: int = 512,
        disk_mib: int = 16,
        packages: bool = False,
        trust: bool = False,
        wait_s: float = 60.0,
    ) -> None:
        self._sandbox = Sandbox(time_s, memory_mib, disk_mib, packages, trust, wait_s)
        self._sandbox.check()

    def set_up(self, functions: Sequence[Callable[..., Any]], limits: ToolLimits) -> None:
        """Take functions and what calls may take.

        Raises:
            SandboxError: A program could take longer than a call.
        """
        super().set_up(functions, limits)
        if self._sandbox.time_s >= limits.call_s:
            raise SandboxError(
                f"environment.kwargs.time_s is {self._sandbox.time_s:g} s, and must be less than "
                f"environment.tool_timeout_s={limits.call_s:g}, at which the policy is told that it took too long"
            )

    @tool
    async def python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Each program runs by itself: it sees no names and files of the one before. The value of its last line is
        printed, too. There is no network.

        Args:
            code: The program.
        """
        return (await self._sandbox.run_in_turn(code)).as_text()


def python_tool() -> Callable[[str], Awaitable[str]]:
    """Return the tool `python`, for `environment.tools`.

    Raises:
        SandboxError: Programs can't be run safely here.
    """
    sandbox = Sandbox()
    sandbox.check()

    async def python(code: str) -> str:
        return (await sandbox.run_in_turn(code)).as_text()

    python.__doc__ = PythonEnvironment.python.__doc__
    return python
