"""The environments that have names, and what each needs; nothing of them is imported before it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hrl.errors import RefusedError
from hrl.nearest import did_you_mean


class UnknownEnvironmentError(RefusedError, ValueError):
    """No environment has this name, or what it needs is not installed."""


@dataclass(frozen=True)
class NamedEnvironment:
    """An environment that `environment.path` or a row's `env` can name.

    Attributes:
        target: `module:Class`; or the class itself.
        description: One line for `hrl env-test --list`.
        extra: What to install for it, as in `pip install hrl[extra]`; None if it comes with hrl.
    """

    target: str | Callable[..., Any]
    description: str
    extra: str | None = None


ENVIRONMENTS: dict[str, NamedEnvironment] = {
    "single_turn": NamedEnvironment(
        "hrl.environments.single_turn:SingleTurn", "one answer to the prompt; the reward functions say what it is worth"
    ),
    "tools": NamedEnvironment(
        "hrl.environments.tools:ToolEnvironment", "functions of environment.tools to call, until an answer has no call"
    ),
    "python": NamedEnvironment(
        "hrl.environments.sandbox:PythonEnvironment", "a tool that runs Python programs in a sandbox, with its limits"
    ),
    "retry": NamedEnvironment(
        "hrl.environments.retry:RetryEnvironment",
        "the row's question, asked again until the answer is right",
    ),
    "mcp": NamedEnvironment("hrl.environments.mcp:McpEnvironment", "tools of an MCP server", extra="mcp"),
    "textarena": NamedEnvironment(
        "hrl.environments.textarena:TextArenaEnvironment", "games of textarena for one player", extra="textarena"
    ),
    "gymnasium": NamedEnvironment(
        "hrl.environments.gymnasium:GymnasiumEnvironment", "environments of gymnasium told in text", extra="gymnasium"
    ),
    "verifiers": NamedEnvironment(
        "hrl.environments.verifiers:VerifiersEnvironment", "environments of verifiers and its hub", extra="verifiers"
    ),
    "openenv": NamedEnvironment(
        "hrl.environments.openenv:OpenEnvEnvironment", "an environment on a server of OpenEnv", extra="openenv"
    ),
}
"""Name → environment."""
TOOLS: dict[str, NamedEnvironment] = {
    "python": NamedEnvironment("hrl.environments.sandbox:python_tool", "runs Python programs in a sandbox"),
}
"""Name → function that makes the tool."""


def register(name: str, target: Callable[..., Any], description: str = "") -> None:
    """Give an environment a name that rows can have in their column `env`.

    Call it in the file that `environment.path` names: the processes of environments load that first.

    Args:
        name: Replaces what had that name.
        target: The class.
        description: One line about it.
    """
    ENVIRONMENTS[name] = NamedEnvironment(target, description)


def load_named(name: str) -> Callable[..., Any]:
    """Return the class of a name, importing it.

    Raises:
        UnknownEnvironmentError: No environment has the name, or a package that it needs is missing.
    """
    if name not in ENVIRONMENTS:
        hint = did_you_mean(name, ENVIRONMENTS, "A class of yours is named by its file: my_env.py:Class.")
        raise UnknownEnvironmentError(f"there is no environment {name!r}; there are {', '.join(ENVIRONMENTS)}. {hint}")
    return _target(f"the environment {name!r}", ENVIRONMENTS[name])


def check_tool_name(name: str) -> None:
    """Refuse a name that no tool has.

    Raises:
        UnknownEnvironmentError: It is none.
    """
    if name not in TOOLS:
        hint = did_you_mean(name, TOOLS, "A function of yours is named by its file: my_tools.py:function.")
        raise UnknownEnvironmentError(f"there is no tool {name!r}; there is {', '.join(TOOLS)}. {hint}")


def load_named_tool(name: str) -> Callable[..., Any]:
    """Return the tool of a name.

    Raises:
        UnknownEnvironmentError: No tool has the name.
        HrlError: It can't be used on this machine.
    """
    check_tool_name(name)
    made: Callable[..., Any] = _target(f"the tool {name!r}", TOOLS[name])()
    return made


def _target(title: str, known: NamedEnvironment) -> Callable[..., Any]:
    if not isinstance(known.target, str):
        return known.target
    module, _, attribute = known.target.partition(":")
    try:
        target: Callable[..., Any] = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        way_out = f"pip install 'hrl[{known.extra}]'" if known.extra else "install it"
        raise UnknownEnvironmentError(f"{title} needs {error.name}: {way_out}") from error
    return target
