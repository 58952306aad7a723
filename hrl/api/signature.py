"""What a trainer says about an argument that it does not take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from hrl.api.rows import UsageError
from hrl.config.load import nearest_keys
from hrl.config.run_kind import KINDS, PPO, SFT, RunKind
from hrl.nearest import nearest

P = ParamSpec("P")
R = TypeVar("R")
_OBJECTS = ("reward", "data", "val_data")
"""Arguments whose values need not be those of their keys."""
_TRAINERS = {"ppo": "hrl.PPO and hrl.GRPO take", "sft": "hrl.SFT, hrl.DPO and hrl.RewardModel take"}


def explains_its_arguments(init: Callable[P, R]) -> Callable[P, R]:
    """Return the `__init__` of a trainer that answers a wrong argument with the one that was probably meant.

    Args:
        init: Method of a class that has a `kind`.
    """
    signature = inspect.signature(init)
    taken = list(signature.parameters)[1:]
    unnamed = [name for name in taken if signature.parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        trainer: Any = args[0]
        name = type(trainer).__name__
        for argument in kwargs:
            if argument not in taken:
                raise UsageError(f"{name} takes no {argument}. {_hint(argument, taken, KINDS[trainer.kind])}")
        if len(args) - 1 > len(unnamed):
            raise UsageError(
                f"{name} takes {len(unnamed)} arguments without a name ({', '.join(unnamed)}), not {len(args) - 1}: "
                f"give the others by name, such as {taken[len(unnamed)]}=…"
            )
        for argument in unnamed[: len(args) - 1]:
            if argument in kwargs:
                raise UsageError(f"{name} has two values for {argument}: leave one of them out")
        return init(*args, **kwargs)

    return checked


def attribute_problem(trainer: Any, attribute: str, value: object) -> UsageError:
    """Return what to say where a trainer gets an attribute that nothing reads.

    Args:
        trainer: Has a `kind`.
        attribute: Its name.
        value: What it is set to.
    """
    kind, name = KINDS[trainer.kind], type(trainer).__name__
    taken = list(inspect.signature(type(trainer)).parameters)
    other = kind.spellings.arguments.get(attribute)
    if attribute == "config":
        hint = "Set its keys one by one, such as trainer.config.trainer.seed = 1, or give config=… when it is made."
    elif other is not None and attribute not in _OBJECTS:
        hint = f"Write trainer.config.{other.key} = {value!r}, or give {attribute}=… when it is made."
    elif attribute in taken:
        hint = f"Give it when the trainer is made: hrl.{name}({attribute}=…)."
    else:
        hint = _hint(attribute, taken, kind)
    return UsageError(f"{attribute} can't be set on a trainer, where nothing reads it. {hint}")


def _hint(argument: str, taken: list[str], kind: RunKind[Any]) -> str:
    """Return a sentence with the argument, or the key, that an unknown argument probably stands for."""
    arguments = kind.spellings.arguments
    if (synonym := kind.spellings.synonyms.get(argument)) is not None:
        name = next((name for name, other in arguments.items() if other.key == synonym.key), None)
        if name is None:
            return synonym.hint.replace(synonym.key, _as_config(synonym.key), 1)
        says_more = bool(synonym.but) and synonym.but != arguments[name].but
        return f"It is {name} here{f': {synonym.but}' if says_more else ''}."
    if close := nearest(argument, taken) or [one for one in taken if _differs_in_a_letter(one, argument)]:
        return f"Did you mean {' or '.join(close)}?"
    for other in (PPO, SFT):
        if argument in other.spellings.arguments:
            return f"{_TRAINERS[other.name]} it."
    if keys := nearest_keys(argument, {}, kind.schema):
        return f"Did you mean {' or '.join(map(_as_config, keys))}?"
    return (
        f"It takes {', '.join(taken)}; any other key goes into config, such as config={{'trainer.seed': 1}}. "
        "`hrl migrate FILE.py` translates a script of TRL."
    )


def _differs_in_a_letter(one: str, other: str) -> bool:
    return len(one) == len(other) and sum(a != b for a, b in zip(one, other, strict=True)) == 1


def _as_config(key: str) -> str:
    return f"config={{{key!r}: …}}"
