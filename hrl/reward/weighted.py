"""Several reward functions as one: the weighted sum of their scores, with every score kept as a part."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hrl.reward.function import RewardFunctionError, is_async, names_taken, read_reward

Function = Callable[..., Any]
Rewards = Function | Sequence[Function | tuple[Function, float]]
"""A reward function, or several, each alone or with its weight (1 by default)."""


def as_one(rewards: Rewards) -> Function:
    """Return several reward functions as one; a single one as it is.

    Raises:
        RewardFunctionError: An entry is neither a function nor a function with its weight, or two have one name.
    """
    if callable(rewards):
        return rewards
    functions: dict[str, tuple[Function, float]] = {}
    for position, entry in enumerate(rewards):
        function, weight = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, 1.0)
        if not callable(function) or isinstance(weight, bool) or not isinstance(weight, int | float):
            raise RewardFunctionError(f"reward {position} is {entry!r}; give a function, or a pair (function, weight)")
        name = getattr(function, "__name__", type(function).__name__)
        if name in functions:
            raise RewardFunctionError(f"two rewards are named {name}; their scores could not be told apart")
        functions[name] = (function, float(weight))
    if not functions:
        raise RewardFunctionError("the list of rewards is empty")
    return (AsyncWeightedSum if any(is_async(function) for function, _ in functions.values()) else WeightedSum)(
        functions
    )


class WeightedSum:
    """Called like any reward function; calls each of several with what it takes.

    A function that returns None has no say in that sample; if all do, the sample is left out. Parts that a function
    returns beside its score are named `<function>/<part>`.

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

    def _call(self, name: str, sample: Mapping[str, Any]) -> Any:
        taken = self._taken[name]
        mine = sample if taken is None else {key: value for key, value in sample.items() if key in taken}
        return self.functions[name][0](**mine)

    def _sum(self, returned: Mapping[str, Any]) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        score: float | None = None
        for name, value in returned.items():
            try:
                parts[name], own = read_reward(value)
            except RewardFunctionError as error:
                raise RewardFunctionError(f"{name} {error}") from error
            parts |= {f"{name}/{part}": number for part, number in own.items()}
            if parts[name] is not None:
                score = (score or 0.0) + self.functions[name][1] * parts[name]
        return {"score": score, **parts}


class AsyncWeightedSum(WeightedSum):
    """The same where some of the functions are async; these are awaited one after the other."""

    async def __call__(self, **sample: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the sum as `score`, and every function's score under its name."""
        returned = {}
        for name in self.functions:
            value = self._call(name, sample)
            returned[name] = await value if inspect.isawaitable(value) else value
        return self._sum(returned)


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
