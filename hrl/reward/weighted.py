"""Several reward functions as one: the weighted sum of their scores, with every score kept as a part."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from hrl.errors import ConfigError
from hrl.reward.function import TURN_SCORES, RewardFunctionError, is_async, names_taken, read_reward, unwrapped
from hrl.reward.library.base import FAILURE

if TYPE_CHECKING:
    from hrl.config.reward import RewardEntry

Function = Callable[..., Any]
Reward = Function | str | Mapping[str, Any]
"""A function; or one of the library by its name, or a file and a function as `my.py:brief`; or an entry of
`reward.functions`, such as `{"name": "regex", "pattern": "^yes"}`."""
Rewards = Reward | Sequence[Reward | tuple[Reward, float]]
"""A reward, or several, each alone or with its weight (1 by default)."""
Entry: TypeAlias = "RewardEntry | tuple[str, Function, float]"
"""An entry of `reward.functions`, or a function with the name of its score and its weight."""

BLAME = "blames_response"
"""The argument by which functions of hrl say that a response, and not the row, is to blame if they fail."""
_LAMBDA = "lambda"
_RIGHT = 1.0
_DECIDES = ("acc", "pred")
"""Parts that validation reads: whether a response is correct, and what it answers."""


def entries_of(rewards: Rewards) -> list[Entry]:
    """Return rewards as given from Python, one by one.

    Raises:
        RewardFunctionError: An entry is neither a reward nor one with its weight, or two have one name.
    """
    from hrl.config.reward import TAKEN_NAMES

    if callable(rewards) or isinstance(rewards, str | Mapping):
        rewards = [rewards]
    if isinstance(rewards, tuple) and len(rewards) == 2 and _is_weight(rewards[1]):
        # The value is not shown: an entry of reward.functions may hold a key.
        raise RewardFunctionError("the reward is a pair; put function and weight into a list: [(function, weight)]")
    if not isinstance(rewards, Sequence):
        raise RewardFunctionError(
            f"the reward is {rewards!r}, which can't be called; give a function, an object with `__call__`, the name "
            "of one, or a list of these"
        )
    entries: list[Entry] = []
    for position, entry in enumerate(rewards):
        reward, weight = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
        if weight is not None and not _is_weight(weight):
            raise _not_a_reward(position, entry)
        if weight is not None and not abs(weight) <= sys.float_info.max:  # NaN is not
            raise RewardFunctionError(f"reward {position} has the weight {weight}; give a finite number")
        if isinstance(reward, str | Mapping):
            entries.append(_named(position, reward, weight))
        elif callable(reward):
            entries.append((function_name(reward), reward, 1.0 if weight is None else float(weight)))
        else:
            raise _not_a_reward(position, entry)
    if not entries:
        raise RewardFunctionError("the list of rewards is empty")
    entries = _lambdas_numbered(entries)
    names = [entry[0] if isinstance(entry, tuple) else entry.part for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise RewardFunctionError(
                f"two rewards are named {name}; their scores could not be told apart. Give one of them another name "
                "(`def`, `__name__`), or a `label` if it is an entry of reward.functions"
            )
    for name in [name for name in names if name in TAKEN_NAMES and len(names) > 1]:
        raise RewardFunctionError(
            f"a reward of several is named {name}, {TAKEN_NAMES[name]}. Give it another name (`def`, `__name__`), or a "
            "`label` if it is an entry of reward.functions"
        )
    return entries


def function_name(function: Function) -> str:
    """Return what the score of a function is called: its name, for an object that of its class."""
    function = unwrapped(function)
    name = getattr(function, "__name__", type(function).__name__)
    return _LAMBDA if name == "<lambda>" else str(name)


def _lambdas_numbered(entries: Sequence[Entry]) -> list[Entry]:
    """Return entries of which no two lambdas have one name: `lambda`, `lambda_2`."""
    seen = 0
    numbered: list[Entry] = []
    for entry in entries:
        if isinstance(entry, tuple) and entry[0] == _LAMBDA:
            seen += 1
            entry = (f"{_LAMBDA}_{seen}" if seen > 1 else _LAMBDA, *entry[1:])
        numbered.append(entry)
    return numbered


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _not_a_reward(position: int, entry: object) -> RewardFunctionError:
    return RewardFunctionError(
        f"reward {position} is {entry!r}; give a function, the name of one, or a pair (function, weight)"
    )


def _named(position: int, reward: str | Mapping[str, Any], weight: float | None) -> RewardEntry:
    # The processes that score import this file and need no schema, whose import would be most of their start.
    from hrl.config.load import load_config
    from hrl.config.reward import spelt_out

    written = spelt_out(reward) | ({} if weight is None else {"weight": float(weight)})
    only_shown = written.get("weight") == 0 and written["weight"] is not False
    checked = written | {"weight": 1.0} if only_shown else written  # none may stand alone with a weight of 0
    try:
        functions = load_config({"reward": {"functions": [checked]}}).reward.functions
    except ConfigError as error:
        # The value is not repeated: it may hold a key.
        raise RewardFunctionError(f"reward {position} is no entry of reward.functions. {error}") from error
    assert functions is not None
    return functions[0].model_copy(update={"weight": 0.0}) if only_shown else functions[0]


def weighted_sum(functions: Mapping[str, tuple[Function, float]]) -> Function:
    """Return several functions, each with its weight, as one; it is async if one of them is."""
    return (AsyncWeightedSum if any(is_async(function) for function, _ in functions.values()) else WeightedSum)(
        functions
    )


class WeightedSum:
    """Called like any reward function; calls each of several with what it takes.

    Args:
        functions: Name → function and weight.
    """

    def __init__(self, functions: Mapping[str, tuple[Function, float]]) -> None:
        self.functions = dict(functions)
        self._taken = {name: names_taken(function) for name, (function, _) in self.functions.items()}
        self.__signature__ = _joint_signature([function for function, _ in self.functions.values()])

    def __call__(self, **sample: Any) -> dict[str, Any]:
        """Return the sum as `score`, and every function's score under its name."""
        return self._sum({name: self._call(name, sample) for name in self.functions})

    def _sum(self, returned: Mapping[str, Any]) -> dict[str, Any]:
        return summed(returned, {name: weight for name, (_, weight) in self.functions.items()})

    @property
    def max_concurrency(self) -> int | None:
        """The fewest calls at once that one of the functions allows; None if none of them says."""
        allowed = [getattr(function, "max_concurrency", None) for function, _ in self.functions.values()]
        return min((number for number in allowed if number is not None), default=None)

    def _call(self, name: str, sample: Mapping[str, Any]) -> Any:
        taken = self._taken[name]
        mine = {key: value for key, value in sample.items() if (key != BLAME if taken is None else key in taken)}
        return self.functions[name][0](**mine)


class AsyncWeightedSum(WeightedSum):
    """The same where some of the functions are async; these are awaited together."""

    async def __call__(self, **sample: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the sum as `score`, and every function's score under its name."""
        returned = {name: self._call(name, sample) for name in self.functions}
        awaited = [name for name, value in returned.items() if inspect.isawaitable(value)]
        values = await asyncio.gather(*(returned[name] for name in awaited))
        return self._sum(returned | dict(zip(awaited, values, strict=True)))


def summed(returned: Mapping[str, Any], weights: Mapping[str, float]) -> dict[str, Any]:
    """Return the weighted sum of rewards as `score`, and every one under its function's name.

    A function that returns None has no say in that sample; if all do, the sample is left out. It is left out as well
    where a function has failed (`FAILURE`), whatever the others say. Parts that a function returns beside its score are
    named `<function>/<part>`. The first `acc` and the first `pred` keep their names, since validation counts by them.
    Where no function says `acc`, it is whether the one that gave `pred` scored 1 or more: it has judged the answer, and
    the sum, to which format and penalties add, has not. A lone function's score is the sum, and says it itself.

    Scores of turns are added up turn by turn, with the same weights.

    Args:
        returned: What each function returned.
        weights: Weight of each.

    Raises:
        RewardFunctionError: One of them returned something that is no reward, or two have scores for another number of
            turns.
    """
    parts: dict[str, Any] = {}
    steps: dict[str, list[float]] = {}
    score: float | None = None
    of_answer = None
    has_failed = False
    for name, value in returned.items():
        try:
            parts[name], own = read_reward(value)
        except RewardFunctionError as error:
            raise RewardFunctionError(f"{name} {error}") from error
        if (of_turns := own.pop(TURN_SCORES, None)) is not None:
            own[TURN_SCORES] = sum(of_turns)
            if parts[name] is not None:
                steps[name] = of_turns
        if "pred" in own and "pred" not in parts:
            of_answer = None if parts[name] is None else parts[name] + sum(of_turns or ())
        for part, number in own.items():
            parts[part if part in _DECIDES and part not in parts else f"{name}/{part}"] = number
        if parts[name] is not None:
            score = (score or 0.0) + weights[name] * parts[name]
        has_failed = has_failed or (parts[name] is None and FAILURE in own)
    if "acc" not in parts and of_answer is not None and list(weights.values()) != [1.0]:
        parts["acc"] = float(of_answer >= _RIGHT)
    total = {TURN_SCORES: _steps_summed(steps, weights)} if steps else {}
    return {**parts, **total, "score": None if has_failed else score}


def _steps_summed(steps: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> list[float]:
    (first, scores), *others = steps.items()
    for name, of_turns in others:
        if len(of_turns) != len(scores):
            raise RewardFunctionError(
                f"{first} returned {len(scores)} {TURN_SCORES} and {name} {len(of_turns)}, of the same turns"
            )
    return [sum(weights[name] * of_turns[turn] for name, of_turns in steps.items()) for turn in range(len(scores))]


def _joint_signature(functions: Sequence[Function]) -> inspect.Signature:
    """Return what all of the functions take together, from which their callers see what to give."""
    joint: dict[str, inspect.Parameter] = {}
    takes_any = False
    for function in functions:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # written in C, without a signature
            takes_any = True
            continue
        for one in parameters:
            if one.kind is one.VAR_KEYWORD:
                takes_any = True
            elif one.kind is not one.VAR_POSITIONAL and not (one.name in joint and one.default is not one.empty):
                joint[one.name] = one.replace(kind=one.KEYWORD_ONLY, annotation=one.empty)
    rest = [inspect.Parameter("sample", inspect.Parameter.VAR_KEYWORD)] if takes_any else []
    return inspect.Signature([*joint.values(), *rest])
