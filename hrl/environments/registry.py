"""The environments that have names, and what each needs; nothing of them is imported before it is used."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from hrl.environments.extras import install_line
from hrl.errors import RefusedError
from hrl.nearest import did_you_mean

_GAME = re.compile(r"[\w./-]{1,100}")
"""Names of games that a row may give: none with a module to import, `module:name`."""


class UnknownEnvironmentError(RefusedError, ValueError):
    """No environment has this name, or what it needs is not installed."""


class RowChoiceError(RefusedError, ValueError):
    """A row chooses an environment or an argument that is the configuration's to choose; says how it may."""


@dataclass(frozen=True)
class NamedEnvironment:
    """An environment that `environment.path` or a row's `env` can name.

    Attributes:
        target: `module:Class`; or the class itself.
        description: One line for `hrl env-test --list`.
        extra: Of hrl, with the packages to install for it; None if it comes with hrl.
        rows_may_name: Whether a row's `env` may name it; else only what the configuration lists.
        row_kwargs: Arguments that a row's `env_kwargs` may give, with the form that a text of them must have; None for
            all. Rows are data, and may be a stranger's: whatever names a command, an address, a module, a token, a
            file or a limit is not among them.
    """

    target: str | Callable[..., Any]
    description: str
    extra: str | None = None
    rows_may_name: bool = True
    row_kwargs: Mapping[str, re.Pattern[str] | None] | None = field(default_factory=dict)


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
        row_kwargs=dict.fromkeys(("attempts", "feedback", "discount")),
    ),
    "mcp": NamedEnvironment(
        "hrl.environments.mcp:McpEnvironment", "tools of an MCP server", extra="mcp", rows_may_name=False
    ),
    "textarena": NamedEnvironment(
        "hrl.environments.textarena:TextArenaEnvironment",
        "games of textarena for one player",
        extra="textarena",
        row_kwargs={"game": _GAME},
    ),
    "gymnasium": NamedEnvironment(
        "hrl.environments.gymnasium:GymnasiumEnvironment",
        "environments of gymnasium told in text",
        extra="gymnasium",
        row_kwargs={"id": _GAME, "actions": None, "prompt": None},
    ),
    "verifiers": NamedEnvironment(
        "hrl.environments.verifiers:VerifiersEnvironment",
        "environments of verifiers and its hub",
        extra="verifiers",
        rows_may_name=False,
    ),
    "openenv": NamedEnvironment(
        "hrl.environments.openenv:OpenEnvEnvironment",
        "an environment on a server of OpenEnv",
        extra="openenv",
        rows_may_name=False,
        row_kwargs={"prompt": None},
    ),
}
"""Name → environment."""
_OF_HRL = tuple(ENVIRONMENTS.values())
TOOLS: dict[str, NamedEnvironment] = {
    "python": NamedEnvironment("hrl.environments.sandbox:python_tool", "runs Python programs in a sandbox"),
}
"""Name → function that makes the tool."""


def register(name: str, target: Callable[..., Any], description: str = "") -> None:
    """Give an environment a name that rows can have in their column `env`.

    Call it in the file that `environment.path` names: the processes of environments load that first. A row may give it
    every argument that it takes, so none of them should name a command, an address or a file.

    Args:
        name: Replaces what had that name.
        target: The class.
        description: One line about it.
    """
    ENVIRONMENTS[name] = NamedEnvironment(target, description, row_kwargs=None)


def load_named(name: str) -> Callable[..., Any]:
    """Return the class of a name, importing it.

    Raises:
        UnknownEnvironmentError: No environment has the name, or a package that it needs is missing.
    """
    if name not in ENVIRONMENTS:
        hint = did_you_mean(name, ENVIRONMENTS, "A class of yours is named by its file: my_env.py:Class.")
        raise UnknownEnvironmentError(f"there is no environment {name!r}; there are {', '.join(ENVIRONMENTS)}. {hint}")
    return _target(f"the environment {name!r}", ENVIRONMENTS[name])


def named_by_rows(listed: Collection[str] = ()) -> list[str]:
    """Return what a row's `env` may name.

    Args:
        listed: Names in `environment.row_environments`.
    """
    return [name for name, known in ENVIRONMENTS.items() if known.rows_may_name or name in listed]


def check_row_choice(name: str, listed: Collection[str]) -> None:
    """Refuse a row that names an environment which the configuration does not list, though it must.

    Args:
        name: The row's `env`.
        listed: Names in `environment.row_environments`.

    Raises:
        RowChoiceError: The row must not name it.
    """
    if name in ENVIRONMENTS and name not in named_by_rows(listed):
        raise RowChoiceError(
            f"the row has env {name!r}, which starts programs, imports packages or asks a server, so that a row "
            "may name it only where the configuration does, with all its arguments: "
            f"environment.row_environments.{name}={{…}}"
        )


def check_row_kwargs(made: Any, title: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of a row's that are the configuration's to give.

    What rows may give belongs to the constructor: it holds for a class of the user's, too, that has none of its own.

    Args:
        made: The class, or a function that makes environments.
        title: What it is called in messages.
        kwargs: The row's `env_kwargs`.

    Raises:
        RowChoiceError: There is one that a row may not give, or its text is no name.
    """
    allowed = _row_kwargs_of(made)
    if allowed is None:
        return
    for name, value in kwargs.items():
        if name not in allowed:
            known = ", ".join(allowed) or "nothing"
            raise RowChoiceError(
                f"the row has env_kwargs.{name}, and a row may give {title} {known}: give {name} in "
                "environment.kwargs, or for an environment that rows name in environment.row_environments; or let a "
                "class of yours take it (environment.path=my_env.py:Class)"
            )
        form = allowed[name]
        if form is not None and not (isinstance(value, str) and form.fullmatch(value)):
            raise RowChoiceError(
                f"the row has env_kwargs.{name} {value!r:.80}, and a row may give {title} a plain name there: letters, "
                "digits, -, _, . and /"
            )


def _row_kwargs_of(made: Any) -> Mapping[str, re.Pattern[str] | None] | None:
    """Return what rows may give to whoever wrote the constructor; None for all."""
    while isinstance(made, functools.partial):
        made = made.func
    if not isinstance(made, type):
        return None
    maker = next(base for base in made.__mro__ if "__init__" in vars(base))
    target = f"{maker.__module__}:{maker.__qualname__}"
    return next((known.row_kwargs for known in _OF_HRL if known.target == target), None)


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
        way_out = install_line(known.extra) if known.extra else "install it"
        raise UnknownEnvironmentError(f"{title} needs {error.name}: {way_out}") from error
    return target
