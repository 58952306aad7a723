"""Reward functions: where one comes from, how it is called, and what it may return."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any, ClassVar, Self

from hrl.errors import RefusedError
from hrl.nearest import nearest
from hrl.processes.pickled import NotPickledError, PickledObject, name_of
from hrl.user_file import UserFileError, load_user_file, member_of

RESPONSE = ("response", "solution_str")
"""What the response's text is called: plainly, and as in verl."""
PICTURES = "pictures"
HANDED_OVER = ("data_source", *RESPONSE, "answer", "ground_truth", "extra_info", "turns", "conversation", PICTURES)
"""What a reward function may take of every sample, beside the columns of its row. Without columns of these names,
`answer` is the ground truth, `turns` what the policy wrote in each turn, `conversation` the whole chat, and `pictures`
the files of the pictures that the prompt shows, as bytes; these go only to a function that names them."""
TURN_SCORES = "turn_scores"
"""What turns are worth one by one: an entry of the dict that a reward function returns."""

_NAMES_OF_TRL = {
    "completions": "one `response` at a time",
    "completion": "`response`",
    "prompts": "one `prompt` at a time",
    "completion_ids": "the text `response`",
    "completions_ids": "the text `response`",
}
"""What TRL hands over, and what is handed over here instead."""
_MOST_PARTS, _LONGEST_NAME = 1000, 200
_LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127


class RewardFunctionError(RefusedError, ValueError):
    """A reward function can't be loaded, or returned something that isn't a reward."""


@dataclass(frozen=True)
class BuiltIn:
    """The built-in functions, of which each row's data source chooses one.

    Attributes:
        data_sources: Data sources of the rows; their scorers are loaded before the first sample.
        deadline_s: Seconds for all runs of an answer that is a program.
    """

    data_sources: tuple[str, ...] = ()
    deadline_s: float = 27.0
    title: ClassVar[str] = "the built-in reward function"
    is_ours: ClassVar[bool] = True

    def load(self, kwargs: Mapping[str, Any], columns: Collection[str] = ()) -> Callable[..., Any]:
        """Return the function that looks a sample's data source up, with the scorers of `data_sources` loaded.

        Raises:
            RewardFunctionError: No built-in function knows a data source, or its package can't be imported.
        """
        from hrl.reward.library.answer import Answer
        from hrl.reward.library.code import Programs
        from hrl.reward.score import PROGRAMS, find_scorer
        from hrl.reward.scorers.programs import Trial

        try:
            for data_source in self.data_sources:
                find_scorer(data_source).load()  # keeps the loading time out of the first sample's deadline
        except (ValueError, ImportError) as error:
            raise RewardFunctionError(str(error)) from error
        if set(PROGRAMS).isdisjoint(self.data_sources):
            return Answer()
        return Programs(Trial(partial=True, deadline_s=self.deadline_s))

    def wrong(self, data_source: str) -> Any:
        """Return the reward of a response that could not be scored: that of a wrong answer."""
        from hrl.reward.library.answer import wrong_answer
        from hrl.reward.score import find_scorer

        return wrong_answer(find_scorer(data_source))


@dataclass(frozen=True)
class LibraryFunction:
    """A function of the library.

    Attributes:
        name: Its name in the catalogue.
        arguments: What it is made with.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    is_ours: ClassVar[bool] = True

    @property
    def title(self) -> str:
        """The function's name in messages."""
        return f"reward function {self.name}"

    def load(self, kwargs: Mapping[str, Any], columns: Collection[str] = ()) -> Callable[..., Any]:
        """Make the function, which imports what it needs.

        Raises:
            RewardFunctionError: It does not take the arguments, or a package is missing.
        """
        from hrl.reward.library.catalogue import make

        try:
            return make(self.name, self.arguments)
        except (ValueError, ImportError) as error:
            raise RewardFunctionError(f"{self.title} {error}") from error

    def wrong(self, data_source: str) -> Any:
        """Return the reward of a response that could not be scored."""
        from hrl.reward.library.catalogue import CATALOGUE

        return CATALOGUE[self.name].wrong


@dataclass(frozen=True)
class UserFile:
    """A function in a Python file of the user's.

    Attributes:
        path: The file.
        name: Name of the function in it.
    """

    path: str
    name: str = "compute_score"
    is_ours: ClassVar[bool] = False

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
        try:
            function = member_of(module, self.name, "function")
        except UserFileError as error:
            raise RewardFunctionError(str(error)) from error
        if not callable(function):
            raise RewardFunctionError(
                f"{self.name} in {module.__file__} is a {type(function).__name__}, which can't be called"
            )
        _check_callable(function, self.name, f"{self.name} in {module.__file__}", kwargs, columns)
        return function

    def wrong(self, data_source: str) -> Any:
        """Return the reward of a response that could not be scored: nothing is known of a function of the user's."""
        return 0.0


@dataclass(frozen=True)
class PickledFunction(PickledObject):
    """A function that the caller of a run gave as an object, as its processes get it."""

    is_ours: ClassVar[bool] = False

    @classmethod
    def of(
        cls, function: Callable[..., Any], kwargs: Mapping[str, Any] | None = None, columns: Collection[str] = ()
    ) -> Self:
        """Pickle a function.

        Args:
            function: Plain or async, called like `compute_score`.
            kwargs: Passed to every call.
            columns: Columns of the rows.

        Raises:
            RewardFunctionError: It can't be called as reward functions are, or can't be sent to another process.
        """
        title = name_of(function)
        if not callable(function):
            raise RewardFunctionError(
                f"the reward given as an object is {function!r}, which can't be called: give the function itself, or "
                "name its file with reward.custom_reward_function.path"
            )
        _check_callable(function, title.partition(" of ")[0], title, kwargs or {}, columns)
        try:
            return super().of(function)
        except NotPickledError as error:
            raise RewardFunctionError(
                f"reward function {title} can't be sent to the processes that run it: {error}. Open clients, locks and "
                "files inside the function, or put it into a Python file and name that with "
                "reward.custom_reward_function.path"
            ) from error

    @property
    def title(self) -> str:
        """The function's name in messages."""
        return f"reward function {self.name}"

    def load(self, kwargs: Mapping[str, Any] | None = None, columns: Collection[str] = ()) -> Callable[..., Any]:
        """Unpickle the function.

        Raises:
            RewardFunctionError: Its module can't be imported here.
        """
        try:
            return super().load()
        except ModuleNotFoundError as error:
            raise RewardFunctionError(
                f"{error} in the processes of reward functions. Put its folder on PYTHONPATH, or name the function's "
                "file with reward.custom_reward_function.path"
            ) from error

    def wrong(self, data_source: str) -> Any:
        """Return the reward of a response that could not be scored: nothing is known of a function of the user's."""
        return 0.0


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


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside of `functools.partial`s."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether `function` is async, or an object with an async `__call__`."""
    function = unwrapped(function)
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


def takes_pictures(function: Callable[..., Any]) -> bool:
    """Return whether a function names `pictures`; `**columns` alone does not, since they are large."""
    try:
        return PICTURES in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False  # written in C, without a signature


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
    if taken is None and any(one.kind is one.VAR_POSITIONAL for one in parameters) and len(parameters) == 2:
        return (
            "is *args, **kwargs, so that nothing says what it takes, and it would be given everything. If a decorator "
            "has wrapped it, put @functools.wraps(function) above the wrapper; else write def name(response, **columns)"
        )
    by_position = [one.name for one in parameters if one.kind is one.POSITIONAL_ONLY]
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    unfilled = [one.name for one in named if one.default is one.empty and one.name not in (*offered, *kwargs)]
    unexpected = [] if taken is None else [name for name in kwargs if name not in taken]
    problems = []
    if unfilled:
        problems.append(
            f"needs {', '.join(unfilled)}, which nothing gives{_meant(unfilled, offered)}: name a column, or add it to "
            "reward_kwargs"
        )
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


def _meant(unfilled: Sequence[str], offered: Sequence[str]) -> str:
    """Return what is meant by names that nothing gives, in brackets; empty where nobody knows."""
    said = [f"{_NAMES_OF_TRL[name]} for TRL's {name}" for name in unfilled if name in _NAMES_OF_TRL]
    near = {name: nearest(name, offered) for name in unfilled if name not in _NAMES_OF_TRL}
    said += [f"did you mean {found[0]}?" for found in near.values() if found]
    return f" ({'; '.join(said)})" if said else ""


def read_reward(value: object) -> tuple[float | None, dict[str, Any]]:
    """Read the return value of a reward function as (score, parts).

    `None` leaves the sample out. A number is the score. A dict has the score under `"score"`; its other entries are
    parts: numbers become metrics, and text is kept in the saved samples. `"turn_scores"` is a list of a number for each
    turn, beside which a score may be missing.

    Raises:
        RewardFunctionError: Any other value, or a number that isn't finite in float32, in which rewards are computed.
    """
    if value is None:
        return None, {}
    if not isinstance(value, Mapping):
        return _finite(value, "returned"), {}
    if len(value) > _MOST_PARTS:
        raise RewardFunctionError(
            f"returned a dict of {len(value):,} entries, and each would be a metric: return at most {_MOST_PARTS}"
        )
    if "score" not in value and value.get(TURN_SCORES) is None:
        raise RewardFunctionError(f"returned a dict without the key 'score'; it has {sorted(map(_name, value))}")
    given = value.get("score", 0.0)
    score = None if given is None else _finite(given, "returned as 'score'")
    parts = {_name(name): _part(name, part) for name, part in value.items() if name not in ("score", TURN_SCORES)}
    return score, parts if value.get(TURN_SCORES) is None else parts | {TURN_SCORES: _steps(value[TURN_SCORES])}


def _name(name: object) -> str:
    """Return the name of a part, which becomes that of a metric.

    Raises:
        RewardFunctionError: It can't be one.
    """
    text = str(name)
    if len(text) > _LONGEST_NAME or not text.isprintable() or not text.strip():
        shown = ascii(text[:_LONGEST_NAME])
        raise RewardFunctionError(
            f"returned a dict with the key {shown}, which can't name a metric: a name is printable, and has at most "
            f"{_LONGEST_NAME} characters"
        )
    return text


def _part(name: object, value: object) -> float | str | None:
    if value is None or isinstance(value, str):
        return value
    return _finite(value, f"returned as {str(name)!r}")


def _steps(value: Any) -> list[float]:
    """Return the scores of turns.

    Raises:
        RewardFunctionError: They are no list of finite numbers.
    """
    listed = value.tolist() if len(getattr(value, "shape", ())) == 1 else value  # an array of numpy or torch
    if not isinstance(listed, list | tuple):
        raise RewardFunctionError(
            f"returned as {TURN_SCORES!r} {_short(value)}, a {type(value).__name__}, where a list of a number for each "
            "turn is expected"
        )
    return [_finite(one, f"returned for turn {turn} of {TURN_SCORES!r}") for turn, one in enumerate(listed)]


def check_turn_scores(scores: Sequence[float], num_turns: int) -> None:
    """Refuse another number of scores than there are turns.

    Raises:
        RewardFunctionError: There are more or fewer.
    """
    if len(scores) != num_turns:
        raise RewardFunctionError(
            f"returned {len(scores)} {TURN_SCORES} where the sample has {num_turns} of the policy's turns: return one "
            "for each of `turns`, 0 where a turn is worth nothing"
        )


def _finite(value: object, how: str) -> float:
    if getattr(value, "shape", None) == ():  # a scalar of numpy or torch
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, Real | Decimal):
        raise RewardFunctionError(
            f"{how} {_short(value)}, a {type(value).__name__}, where a number is expected{_why(value)}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf  # type: ignore[operator]  # a `Real` may be compared
    except ValueError:  # a signalling NaN of `decimal`
        number = math.nan
    if not abs(number) <= _LARGEST_FLOAT32:  # also true for NaN
        where = " in float32, in which rewards are computed" if math.isfinite(number) else ""
        raise RewardFunctionError(f"{how} {number}, which is not finite{where}")
    return number


def _why(value: object) -> str:
    """Return what was probably meant by a value that is no number."""
    if isinstance(value, list | tuple) or getattr(value, "shape", ()) != ():
        return ": a function scores one response, and is called once for each"
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return ": write `return` in place of `yield`"
    return ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
