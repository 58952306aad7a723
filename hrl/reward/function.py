"""A reward function: where it comes from, and what it may return."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from hrl.data.user_file import UserFileError, load_user_file


class RewardFunctionError(ValueError):
    """A reward function can't be loaded, or returned something that is no reward."""


@dataclass(frozen=True)
class RewardSpec:
    """Names a reward function; plain data, so that a process can load it itself and no function is ever pickled.

    Attributes:
        path: a Python file; `None` for the built-in functions, which are chosen by data source.
        name: of the function in that file.
        kwargs: handed to every call.
        data_sources: the data sources to come, so that what their built-in scorers need is loaded beforehand.
    """

    path: str | None = None
    name: str = "compute_score"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    data_sources: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """For messages: `compute_score in my_reward.py`, or the built-in one."""
        return "the built-in reward function" if self.path is None else f"reward function {self.name} in {self.path}"


def load_reward_function(spec: RewardSpec) -> Callable[..., Any]:
    """Loads the function that `spec` names. The file is the user's own code and runs as such.

    Raises:
        RewardFunctionError: no such file, no such function, or a data source that no built-in function knows.
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
    return function


def read_reward(value: object) -> tuple[float | None, dict[str, Any]]:
    """What a reward function returned, as (score, parts).

    `None` means that the sample shall be left out. A number is the score. A dict has the score under `"score"`; its
    other entries are parts: numbers become columns of the metrics, text is kept for the reader.

    Raises:
        RewardFunctionError: anything else, or a number that isn't finite.
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
    return number


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
