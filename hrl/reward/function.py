"""A reward function: where it comes from, and what it may return."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Self

from hrl.data.user_file import UserFileError, load_user_file
from hrl.errors import HrlError
from hrl.processes import child

HANDED_OVER = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What every call of a reward function gets, by keyword."""

_ENV = "env:"
_LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127


class RewardFunctionError(HrlError, ValueError):
    """A reward function can't be loaded, or returned something that is no reward."""


@dataclass(frozen=True)
class RewardSpec:
    """Names a reward function; plain data, so that a process can load it itself and no function is ever pickled.

    Attributes:
        path: A Python file; `None` for the built-in functions, which are chosen by data source.
        name: Of the function in that file.
        kwargs: Handed to every call; a text `env:NAME` stands for the environment variable NAME.
        data_sources: The data sources to come, so that what their built-in scorers need is loaded beforehand.
    """

    path: str | None = None
    name: str = "compute_score"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    data_sources: tuple[str, ...] = ()

    @property
    def env(self) -> dict[str, str]:
        """The arguments that are environment variables, with the names of these."""
        texts = {name: value for name, value in self.kwargs.items() if isinstance(value, str)}
        return {name: text.removeprefix(_ENV) for name, text in texts.items() if text.startswith(_ENV)}

    def resolve(self, environ: Mapping[str, str]) -> Self:
        """With the values of the environment variables that `kwargs` name; only in the function's own process."""
        return replace(self, kwargs={**self.kwargs, **{name: environ[key] for name, key in self.env.items()}})

    def to_plain(self) -> dict[str, Any]:
        """As JSON can hold it.

        Raises:
            ValueError: `kwargs` hold something that is no plain data.
        """
        kwargs = child.to_plain(self.kwargs, "reward.custom_reward_function.reward_kwargs")
        return vars(self) | {"kwargs": kwargs, "data_sources": list(self.data_sources)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return what `to_plain` was called on."""
        return cls(plain["path"], plain["name"], child.from_plain(plain["kwargs"]), tuple(plain["data_sources"]))

    @property
    def title(self) -> str:
        """For messages: `compute_score in my_reward.py`, or the built-in one."""
        return "the built-in reward function" if self.path is None else f"reward function {self.name} in {self.path}"


def load_reward_function(spec: RewardSpec) -> Callable[..., Any]:
    """Load the function that `spec` names. The file is the user's own code and runs as such.

    Raises:
        RewardFunctionError: No such file, no such function, one that can't be called as it will be, or a data source
            that no built-in function knows.
    """
    if spec.path is None:
        from hrl.reward import score

        try:
            for data_source in spec.data_sources:
                score.warm_up(data_source)
        except (ValueError, ImportError) as error:
            raise RewardFunctionError(str(error)) from error
        return score.compute_score
    try:
        module = load_user_file(spec.path)
    except UserFileError as error:
        raise RewardFunctionError(f"reward function file {error}") from error
    function = getattr(module, spec.name, None)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise RewardFunctionError(
            f"{module.__file__} has no function {spec.name!r}; it has: {', '.join(functions) or 'none'}"
        )
    if isinstance(function, type) and not issubclass(function, Real | Mapping):
        instance = f"{spec.name.lower()} = {spec.name}()"
        raise RewardFunctionError(
            f"{spec.name} in {module.__file__} is a class, and what calling it makes is no reward: write `{instance}` "
            "below it, give the class `__call__`, and name the instance"
        )
    if (problem := signature_problem(function, spec.kwargs)) is not None:
        raise RewardFunctionError(f"{spec.name} in {module.__file__} {problem}")
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling it gives something to await: an async function, or an object whose `__call__` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type):
        return False
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def signature_problem(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why a function can't be called as reward functions are, or None if it can; it is not called.

    Args:
        function: Any callable: a function, plain or async, a class, an instance with `__call__`, a partial.
        kwargs: What the configuration's `reward_kwargs` add to the four arguments.

    Returns:
        What stands in the way, to follow the function's name in a message.
    """
    twice = sorted(set(HANDED_OVER) & set(kwargs))
    if twice:
        return f"gets {', '.join(twice)} with every sample; take it out of reward_kwargs"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None  # written in C, and silent about it
    handed_over = [*HANDED_OVER, *kwargs]
    parameters = signature.parameters
    by_position = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_ONLY]
    named = {name for name, one in parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = {name for name, one in parameters.items() if one.default is one.empty and one.kind not in optional}
    problems = []
    if unexpected := [name for name in handed_over if name not in named and not takes_any]:
        problems.append(f"does not take {', '.join(unexpected)}")
    if unfilled := [name for name in parameters if name in required - set(handed_over) and name not in by_position]:
        problems.append(f"needs {', '.join(unfilled)}, which nothing gives: add it to reward_kwargs, or a default")
    if by_position:
        problems.append(f"takes {', '.join(by_position)} by position only")
    if not problems:
        return None
    return (
        f"{' and '.join(problems)}. It is called as {getattr(function, '__name__', 'function')}"
        f"({', '.join(f'{name}=…' for name in handed_over)}), and is {signature}. A function may take fewer of these "
        "where it also takes **kwargs"
    )


def read_reward(value: object) -> tuple[float | None, dict[str, Any]]:
    """Return what a reward function returned, as (score, parts).

    `None` means that the sample shall be left out. A number is the score. A dict has the score under `"score"`; its
    other entries are parts: numbers become columns of the metrics, text is kept for the reader.

    Raises:
        RewardFunctionError: Anything else, or a number that isn't finite in float32, in which rewards are computed.
    """
    if value is None:
        return None, {}
    if not isinstance(value, Mapping):
        return _finite(value, "returned"), {}
    if "score" not in value:
        raise RewardFunctionError(f"returned a dict without the key 'score'; it has {sorted(map(str, value))}")
    score = None if value["score"] is None else _finite(value["score"], "returned as 'score'")
    return score, {str(name): _part(name, part) for name, part in value.items() if name != "score"}


def _part(name: object, value: object) -> float | str | None:
    if value is None or isinstance(value, str):
        return value
    return _finite(value, f"returned as {str(name)!r}")


def _finite(value: object, how: str) -> float:
    if not isinstance(value, Real):
        raise RewardFunctionError(f"{how} {_short(value)}, a {type(value).__name__}, where a number is expected")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardFunctionError(f"{how} {number}, which is not finite")
    if abs(number) > _LARGEST_FLOAT32:
        raise RewardFunctionError(f"{how} {number}, which is not finite in float32, in which rewards are computed")
    return number


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
