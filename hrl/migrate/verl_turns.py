"""Turns in a line of verl's: a flag and files of YAML say that there are any, in hrl an environment that is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override

from hrl.config.compose import read_override
from hrl.config.override import as_override
from hrl.config.section import ROLLOUT
from hrl.config.spellings import ENVIRONMENT, Spellings
from hrl.migrate.line import Migrated, Remark

_TOOLS, _MOST_TURNS, _LONGEST = "environment.tools", "environment.max_turns", "environment.max_observation_tokens"
_TURNS, _AGENT = f"{ROLLOUT}.multi_turn", f"{ROLLOUT}.agent"
_LOOP, _LENGTH = f"{_AGENT}.default_agent_loop", f"{_TURNS}.max_tool_response_length"
_FUNCTIONS = [f"{_TURNS}.function_tool_path", "data.function_tool_path"]
_ASK_FOR_TOOLS = [f"{_TURNS}.enable", f"{_TURNS}.tool_config_path", "data.tool_config_path", *_FUNCTIONS, _LOOP]
_ASK_FOR_A_CLASS = [f"{_TURNS}.interaction_config_path", f"{_AGENT}.agent_loop_config_path"]
_OF_HRL = {"single_turn_agent": False, "tool_agent": True}
"""verl's own agent loops → whether they call tools."""
_CHARACTERS = 4
"""Characters that are about a token."""
_YOUR_CLASS, _YOUR_TOOLS, _YOUR_FUNCTION = "YOUR_ENVIRONMENT.py:Class", "YOUR_TOOLS.py", "YOUR_FUNCTION"
_OF_ROWS = "agent_name, extra_info.tools_kwargs, extra_info.interaction_kwargs"


class _Word(NamedTuple):
    written: str
    value: Any


def take_turns(into: Migrated, spellings: Spellings) -> None:
    """Name the environment of a line whose prompts have several turns; take limits of turns away where they have one.

    Args:
        into: The line; its arguments are still those of verl.
        spellings: Other names of keys.
    """
    given = {
        spellings.present_name(override.key_or_group): _Word(word, override.value())
        for word in into.arguments
        if isinstance(override := read_override(word), Override)
    }
    if ENVIRONMENT not in given:
        named = _environment(given)
        into.arguments += [f"{key}={as_override(value)}" for key, value in named.items()]
        for key, value in named.items():
            into.lost += _placeholder(key, value)
        if not named:
            idle = [each.written for key, each in given.items() if key == _MOST_TURNS]
            into.arguments = [word for word in into.arguments if word not in idle]
            into.needless += [Remark(word, "every prompt of this line has one answer") for word in idle]
            return
    _lengths(given, into)
    if _MOST_TURNS not in given and f"{_TURNS}.max_user_turns" not in given:
        into.differs.append(Remark(_MOST_TURNS, "is 8 unless it is set; verl has no limit of its own"))
    why = "columns of rows, which `reset` is given whole; a row's `env` names its environment, and agent_name nothing"
    into.differs.append(Remark(_OF_ROWS, why))


def _environment(given: Mapping[str, _Word]) -> dict[str, Any]:
    """Return the environment that the line takes for granted, with places for the user's own names."""
    loop = str(given[_LOOP].value) if _is_set(given, [_LOOP]) else None
    if _is_set(given, _ASK_FOR_A_CLASS) or (loop is not None and loop not in _OF_HRL):
        return {ENVIRONMENT: _YOUR_CLASS}
    asked = [key for key in _ASK_FOR_TOOLS if _is_set(given, [key])]
    if not asked or (loop is not None and asked == [_LOOP] and not _OF_HRL[loop]):
        return {}
    files = [str(given[key].value) for key in _FUNCTIONS if _is_set(given, [key])]
    return {ENVIRONMENT: "tools"} | (
        {} if _TOOLS in given else {_TOOLS: [f"{(files or [_YOUR_TOOLS])[0]}:{_YOUR_FUNCTION}"]}
    )


def _is_set(given: Mapping[str, _Word], keys: list[str]) -> bool:
    return any(given[key].value not in (None, False) for key in keys if key in given)


def _placeholder(key: str, value: Any) -> list[Remark]:
    """Return what is to be put in the place of a name, if it stands for one."""
    if key == ENVIRONMENT and value == _YOUR_CLASS:
        why = f"was not in the line, which plays several turns: put your class in place of {value}"
        return [Remark(key, f"{why}; `hrl env-test` tries it")]
    if key == _TOOLS:
        why = f"was not in the line, which calls tools: put your functions in place of {value[0]}"
        return [Remark(key, f"{why}, or a class in environment.path=my_env.py:Class; `hrl env-test` tries them")]
    return []


def _lengths(given: Mapping[str, _Word], into: Migrated) -> None:
    """Take the longest answer of a tool, in characters, for one in tokens."""
    length = given.get(_LENGTH)
    if length is None or type(length.value) is not int or length.value <= 0:
        return
    into.arguments.remove(length.written)
    if _LONGEST not in given:
        tokens = -(-length.value // _CHARACTERS)
        into.arguments.append(f"{_LONGEST}={tokens}")
        why = f"{_LONGEST}={tokens} counts tokens, of which each is about {_CHARACTERS} characters"
        into.differs.append(Remark(length.written, why))
    else:
        into.needless.append(Remark(length.written, f"{_LONGEST} is set, and counts tokens"))
