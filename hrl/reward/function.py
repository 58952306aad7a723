"""Reward functions: where they come from and what they may return."""

from __future__ import annotations

import base64
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import cloudpickle

from hrl.data.user_file import UserFileError, load_user_file
from hrl.errors import HrlError
from hrl.processes.plain_data import from_plain, to_plain

if TYPE_CHECKING:
    from hrl.config.reward import RewardConfig

RESPONSE = ("response", "solution_str")
"""What the response's text is called: plainly, and as in verl."""
HANDED_OVER = ("data_source", *RESPONSE, "answer", "ground_truth", "extra_info")
"""What a reward function may take of every sample, beside the columns of its row. Without a column `answer` that is the
ground truth."""

_ENV = "env:"
_LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127


class RewardFunctionError(HrlError, ValueError):
    """A reward function can't be loaded, or returned something that isn't a reward."""


@dataclass(frozen=True)
class BuiltIn:
    """The built-in functions, of which each row's data source chooses one.

    Attributes:
        data_sources: Data sources of the rows; their scorers are loaded before the first sample.
    """

    data_sources: tuple[str, ...] = ()
    title: ClassVar[str] = "the built-in reward function"

    def load(self, kwargs: Mapping[str, Any], columns: Collection[str] = ()) -> Callable[..., Any]:
        """Return the function that looks a sample's data source up, with the scorers of `data_sources` loaded.

        Raises:
            RewardFunctionError: No built-in function knows a data source, or its package can't be imported.
        """
        from hrl.reward import score

        try:
            for data_source in self.data_sources:
                score.find_scorer(data_source).load()  # keeps the loading time out of the first sample's deadline
        except (ValueError, ImportError) as error:
            raise RewardFunctionError(str(error)) from error
        return score.compute_score


@dataclass(frozen=True)
class UserFile:
    """A function in a Python file of the user's.

    Attributes:
        path: The file.
        name: Name of the function in it.
    """

    path: str
    name: str = "compute_score"

    @property
    def title(self) -> str:
        """The function's name in messages."""
        return f"reward function {self.name} in {self.path}"

    def load(self, kwargs: Mapping[str, Any], columns: Collection[str] = ()) -> Callable[..., Any]:
        """Run the file, which is the user's own code, and return the function.

        Raises:
            RewardFunctionError: There is no such file or function, or it can't be called as reward functions are.
                Exceptions of the user's code are passed on.
        """
        try:
            module = load_user_file(self.path)
        except UserFileError as error:
            raise RewardFunctionError(f"reward function file {error}") from error
        function = getattr(module, self.name, None)
        if not callable(function):
            functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise RewardFunctionError(
                f"{module.__file__} has no function {self.name!r}; it has: {', '.join(functions) or 'none'}"
            )
        _check_callable(function, self.name, f"{self.name} in {module.__file__}", kwargs, columns)
        return function


@dataclass(frozen=True)
class PickledFunction:
    """A function that the caller of a run gave as an object, as its processes get it.

    Attributes:
        name: Its name and module, for messages.
        pickled: The function, pickled, in base64.
        import_path: `sys.path` of the process that pickled it, which unpickling needs.
    """

    name: str
    pickled: str
    import_path: tuple[str, ...]

    @classmethod
    def of(
        cls, function: Callable[..., Any], kwargs: Mapping[str, Any] | None = None, columns: Collection[str] = ()
    ) -> Self:
        """Pickle a function.

        A function that can be imported is sent as the names of its module and itself. Any other (a lambda, a function
        from a notebook or from the running script, an object with `__call__`) is sent by value, with what it refers to.

        Args:
            function: Plain or async, called like `compute_score`.
            kwargs: Passed to every call.
            columns: Columns of the rows.

        Raises:
            RewardFunctionError: It can't be called as reward functions are, or can't be sent to another process.
        """
        name = getattr(function, "__qualname__", type(function).__qualname__)
        title = f"{name} of {getattr(function, '__module__', None) or 'an unknown module'}"
        if not callable(function):
            raise RewardFunctionError(
                f"the reward given as an object is {function!r}, which can't be called: give the function itself, or "
                "name its file with reward.custom_reward_function.path"
            )
        _check_callable(function, name, title, kwargs or {}, columns)
        try:
            pickled = cloudpickle.dumps(function)
        except Exception as error:  # objects that the user's function refers to may raise anything when pickled
            raise RewardFunctionError(
                f"reward function {title} can't be sent to the processes that run it: {type(error).__name__}: {error}. "
                "Open clients, locks and files inside the function, or put it into a Python file and name that with "
                "reward.custom_reward_function.path"
            ) from error
        return cls(title, base64.b64encode(pickled).decode("ascii"), tuple(entry or os.getcwd() for entry in sys.path))

    @property
    def title(self) -> str:
        """The function's name in messages."""
        return f"reward function {self.name}"

    def load(self, kwargs: Mapping[str, Any], columns: Collection[str] = ()) -> Callable[..., Any]:
        """Unpickle the function.

        Raises:
            RewardFunctionError: Its module can't be imported here.
        """
        sys.path += [entry for entry in self.import_path if entry not in sys.path]
        try:
            # What is unpickled here was pickled by `of` in the run's own process. It came in the arguments of the
            # reward actor and over the socket that the pool opened to this process; never from a file, a download or
            # the model. Nothing is unpickled on the way back: results are JSON.
            return cloudpickle.loads(base64.b64decode(self.pickled))
        except ModuleNotFoundError as error:
            raise RewardFunctionError(
                f"{error} in the processes of reward functions. Put its folder on PYTHONPATH, or name the function's "
                "file with reward.custom_reward_function.path"
            ) from error


_SOURCES = {source.__name__: source for source in (BuiltIn, UserFile, PickledFunction)}


@dataclass(frozen=True)
class RewardSpec:
    """The reward function to run, as plain data that its processes can read.

    Attributes:
        source: Where the function comes from.
        kwargs: Passed to every call; a text `env:NAME` stands for the environment variable NAME.
        columns: Columns of the rows, which the function may take by name.
    """

    source: BuiltIn | UserFile | PickledFunction
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = ()

    @classmethod
    def of_config(
        cls,
        reward: RewardConfig,
        data_sources: tuple[str, ...],
        function: Callable[..., Any] | None = None,
        columns: tuple[str, ...] = (),
    ) -> Self:
        """Return the reward function of the section `reward`, or one that the caller gives as an object.

        Args:
            reward: The section; its `reward_kwargs` are passed in both cases.
            data_sources: Data sources of the rows.
            function: Used instead of a file; see `PickledFunction.of`.
            columns: Columns of the rows.

        Raises:
            RewardFunctionError: Both a file and an object, or an object that can't be used.
        """
        custom = reward.custom_reward_function
        source: BuiltIn | UserFile | PickledFunction = BuiltIn(data_sources)
        if function is not None and custom.path is not None:
            raise RewardFunctionError(
                f"the run was given a reward function as an object, and {custom.path} by "
                "reward.custom_reward_function.path; leave one of the two out"
            )
        if function is not None:
            source = PickledFunction.of(function, custom.reward_kwargs, columns)
        elif custom.path is not None:
            # By its absolute path: the process that loads it need not run in this folder.
            source = UserFile(str(Path(custom.path).expanduser().resolve()), custom.name)
        return cls(source, custom.reward_kwargs, columns)

    @property
    def env(self) -> dict[str, str]:
        """Argument → environment variable, for the arguments that stand for one."""
        texts = {name: value for name, value in self.kwargs.items() if isinstance(value, str)}
        return {name: text.removeprefix(_ENV) for name, text in texts.items() if text.startswith(_ENV)}

    def resolve(self, environ: Mapping[str, str]) -> Self:
        """Fill in the environment variables that `kwargs` name; called only in the function's own process."""
        return replace(self, kwargs={**self.kwargs, **{name: environ[key] for name, key in self.env.items()}})

    def to_plain(self) -> dict[str, Any]:
        """Return the specification as a dict for JSON.

        Raises:
            ValueError: `kwargs` has something other than plain data.
        """
        kwargs = to_plain(self.kwargs, "reward.custom_reward_function.reward_kwargs")
        source = to_plain(vars(self.source))
        return {
            "kind": type(self.source).__name__,
            "source": source,
            "kwargs": kwargs,
            "columns": list(self.columns),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the specification from the dict of `to_plain`."""
        source = _SOURCES[plain["kind"]](**from_plain(plain["source"]))
        return cls(source, from_plain(plain["kwargs"]), tuple(plain["columns"]))


def _check_callable(
    function: Callable[..., Any], name: str, title: str, kwargs: Mapping[str, Any], columns: Collection[str]
) -> None:
    """Refuse anything that can't be called as reward functions are, and classes, whose call doesn't give a reward."""
    if isinstance(function, type) and not issubclass(function, Real | Mapping):
        instance = f"{name.lower()} = {name}()"
        raise RewardFunctionError(
            f"{title} is a class, and calling it makes an object, not a reward: write `{instance}` below it, give the "
            "class `__call__`, and name the instance"
        )
    if (problem := signature_problem(function, kwargs, columns)) is not None:
        raise RewardFunctionError(f"{title} {problem}")


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether `function` is async, or an object with an async `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type):
        return False
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def names_taken(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of what a function takes by keyword; None if it takes anything."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None  # written in C, without a signature
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return frozenset(one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))


def signature_problem(
    function: Callable[..., Any], kwargs: Mapping[str, Any], columns: Collection[str] = ()
) -> str | None:
    """Return why a function can't be called as reward functions are, or None if it can; does not call it.

    A function is given what it names, and with `**kwargs` everything.

    Args:
        function: Any callable: a function, plain or async, a class, an instance with `__call__`, a partial.
        kwargs: The configuration's `reward_kwargs`, passed to every call.
        columns: Columns of the rows.

    Returns:
        The problem, as the end of a sentence that begins with the function's name.
    """
    offered = [*dict.fromkeys([*HANDED_OVER, *columns])]
    twice = sorted(set(offered) & set(kwargs))
    if twice:
        return f"gets {', '.join(twice)} with every sample; take it out of reward_kwargs"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None  # written in C, without a signature
    parameters, taken = signature.parameters.values(), names_taken(function)
    by_position = [one.name for one in parameters if one.kind is one.POSITIONAL_ONLY]
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    unfilled = [one.name for one in named if one.default is one.empty and one.name not in (*offered, *kwargs)]
    unexpected = [] if taken is None else [name for name in kwargs if name not in taken]
    problems = []
    if unfilled:
        problems.append(f"needs {', '.join(unfilled)}, which nothing gives: name a column, or add it to reward_kwargs")
    if unexpected:
        problems.append(f"does not take {', '.join(unexpected)} of reward_kwargs")
    if by_position:
        problems.append(f"takes {', '.join(by_position)} by position only")
    if not problems and taken is not None and taken.isdisjoint(RESPONSE):
        problems.append(f"takes neither {' nor '.join(RESPONSE)}, so it would score every response alike")
    if not problems:
        return None
    return (
        f"{' and '.join(problems)}. It is {getattr(function, '__name__', 'function')}{signature}, and may take any of "
        f"{', '.join([*offered, *kwargs])} by name, or **kwargs"
    )


def read_reward(value: object) -> tuple[float | None, dict[str, Any]]:
    """Read the return value of a reward function as (score, parts).

    `None` leaves the sample out. A number is the score. A dict has the score under `"score"`; its other entries are
    parts: numbers become metrics, and text is kept in the saved samples.

    Raises:
        RewardFunctionError: Any other value, or a number that isn't finite in float32, in which rewards are computed.
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
    if getattr(value, "shape", None) == ():  # a scalar of numpy or torch
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, Real):
        raise RewardFunctionError(f"{how} {_short(value)}, a {type(value).__name__}, where a number is expected")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= _LARGEST_FLOAT32:  # also true for NaN
        where = " in float32, in which rewards are computed" if math.isfinite(number) else ""
        raise RewardFunctionError(f"{how} {number}, which is not finite{where}")
    return number


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
