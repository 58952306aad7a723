"""A reward function: where it comes from, and what it may return."""

from __future__ import annotations

import base64
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import cloudpickle

from hrl.data.user_file import UserFileError, load_user_file
from hrl.errors import HrlError
from hrl.processes.plain_data import from_plain, to_plain

if TYPE_CHECKING:
    from hrl.config.reward import RewardConfig

HANDED_OVER = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What every call of a reward function gets, by keyword."""

_ENV = "env:"
_LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127


class RewardFunctionError(HrlError, ValueError):
    """A reward function can't be loaded, or returned something that is no reward."""


@dataclass(frozen=True)
class RewardSpec:
    """Says which reward function to run; plain data, so that the process that runs it can load it.

    Attributes:
        path: A Python file that defines the function; `None` for a function that was given as an object, and for the
            built-in functions, which are chosen by data source.
        name: Of the function.
        kwargs: Handed to every call; a text `env:NAME` stands for the environment variable NAME.
        data_sources: The data sources to come, so that what their built-in scorers need is loaded beforehand.
        pickled: The function itself, where it was given as an object: a pickle in base64, see `of_callable`.
        import_path: Where modules are looked for while that is read, `sys.path` of the process that gave it.
    """

    path: str | None = None
    name: str = "compute_score"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    data_sources: tuple[str, ...] = ()
    pickled: str | None = None
    import_path: tuple[str, ...] = ()

    @classmethod
    def of_config(
        cls, reward: RewardConfig, data_sources: tuple[str, ...], function: Callable[..., Any] | None = None
    ) -> Self:
        """Return the reward function of the section `reward`, or one that the caller has as an object.

        Args:
            reward: The section; its `reward_kwargs` are handed to either.
            data_sources: Of the rows to come.
            function: Takes the place of the file; see `of_callable`.

        Raises:
            RewardFunctionError: Both a file and an object, or an object that can't be used.
        """
        custom = reward.custom_reward_function
        if function is not None:
            if custom.path is not None:
                raise RewardFunctionError(
                    f"the run was given a reward function as an object, and {custom.path} by "
                    "reward.custom_reward_function.path; leave one of the two out"
                )
            return replace(cls.of_callable(function, custom.reward_kwargs), data_sources=data_sources)
        # By its absolute path: the process that loads it need not run in this folder.
        path = None if custom.path is None else str(Path(custom.path).expanduser().resolve())
        return cls(path, custom.name, custom.reward_kwargs, data_sources)

    @classmethod
    def of_callable(cls, function: Callable[..., Any], kwargs: Mapping[str, Any] | None = None) -> Self:
        """Return a function given as an object, ready to travel to the processes that run it.

        One that its module can be asked for travels as the module's name and its own. Any other (a lambda, a function
        of a notebook or of the script that runs, an object with `__call__`) travels by value, with what it refers to.

        Args:
            function: Plain or async, called as `compute_score` is.
            kwargs: Handed to every call.

        Raises:
            RewardFunctionError: It can't be called as reward functions are, or can't be sent to another process.
        """
        name = getattr(function, "__qualname__", type(function).__qualname__)
        title = f"{name} of {getattr(function, '__module__', None) or 'an unknown module'}"
        _check_callable(function, name, title, kwargs or {})
        try:
            pickled = cloudpickle.dumps(function)
        except Exception as error:  # objects that the user's function refers to may raise anything when pickled
            raise RewardFunctionError(
                f"reward function {title} can't be sent to the processes that run it: {type(error).__name__}: {error}. "
                "Open clients, locks and files inside the function, or put it into a Python file and name that with "
                "reward.custom_reward_function.path"
            ) from error
        path = tuple(entry or os.getcwd() for entry in sys.path)
        return cls(None, title, kwargs or {}, pickled=base64.b64encode(pickled).decode("ascii"), import_path=path)

    @property
    def is_built_in(self) -> bool:
        """Whether each row's data source chooses the function."""
        return self.path is None and self.pickled is None

    @property
    def env(self) -> dict[str, str]:
        """The arguments that stand for environment variables, with the names of those variables."""
        texts = {name: value for name, value in self.kwargs.items() if isinstance(value, str)}
        return {name: text.removeprefix(_ENV) for name, text in texts.items() if text.startswith(_ENV)}

    def resolve(self, environ: Mapping[str, str]) -> Self:
        """Fill in the environment variables that `kwargs` name; only in the function's own process."""
        return replace(self, kwargs={**self.kwargs, **{name: environ[key] for name, key in self.env.items()}})

    def to_plain(self) -> dict[str, Any]:
        """Return the specification as JSON can hold it.

        Raises:
            ValueError: `kwargs` hold something that is no plain data.
        """
        kwargs = to_plain(self.kwargs, "reward.custom_reward_function.reward_kwargs")
        return to_plain(vars(self) | {"kwargs": {}}) | {"kwargs": kwargs}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return what `to_plain` was called on."""
        return cls(**from_plain(plain))

    @property
    def title(self) -> str:
        """What messages call the function: `reward function compute_score in my_reward.py`, or the built-in one."""
        if self.is_built_in:
            return "the built-in reward function"
        return f"reward function {self.name}" + (f" in {self.path}" if self.path is not None else "")


def load_reward_function(spec: RewardSpec) -> Callable[..., Any]:
    """Load the function that `spec` names. It is the user's own code and runs as such.

    Raises:
        RewardFunctionError: No such file, no such function, one that can't be called as it will be, or a data source
            that no built-in function knows. What the user's code itself raises is passed on.
    """
    if spec.pickled is not None:
        sys.path += [entry for entry in spec.import_path if entry not in sys.path]
        # The run's own process sent this; nothing of it was read from a disk or comes from the model.
        try:
            return cloudpickle.loads(base64.b64decode(spec.pickled))
        except ModuleNotFoundError as error:
            raise RewardFunctionError(
                f"{error} in the processes of reward functions. Put its folder on PYTHONPATH, or name the function's "
                "file with reward.custom_reward_function.path"
            ) from error
    if spec.path is None:
        from hrl.reward import score

        try:
            for data_source in spec.data_sources:
                score.find_scorer(data_source).load()  # so that the first sample does not pay for it
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
    _check_callable(function, spec.name, f"{spec.name} in {module.__file__}", spec.kwargs)
    return function


def _check_callable(function: Callable[..., Any], name: str, title: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse what can't be called as reward functions are, or gives no reward when it is."""
    if isinstance(function, type) and not issubclass(function, Real | Mapping):
        instance = f"{name.lower()} = {name}()"
        raise RewardFunctionError(
            f"{title} is a class, and what calling it makes is no reward: write `{instance}` below it, give the class "
            "`__call__`, and name the instance"
        )
    if (problem := signature_problem(function, kwargs)) is not None:
        raise RewardFunctionError(f"{title} {problem}")


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling it gives something to await: an async function, or an object whose `__call__` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type):
        return False
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def signature_problem(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return why a function can't be called as reward functions are, or None if it can; it is not called.

    Args:
        function: Any callable: a function, plain or async, a class, an instance with `__call__`, a partial.
        kwargs: What the configuration's `reward_kwargs` add to the four arguments.

    Returns:
        What is wrong, as the end of a sentence that begins with the function's name.
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
