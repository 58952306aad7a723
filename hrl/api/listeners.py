"""What may be given as `callbacks`: objects with methods for the moments of a run."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from hrl.api.rows import UsageError
from hrl.nearest import did_you_mean
from hrl.trainer.callbacks import Callback

MOMENTS = {
    name: list(inspect.signature(method).parameters)[1:]
    for name, method in vars(Callback).items()
    if name.startswith("on_")
}
"""Moment → what its method is called with."""


def as_callbacks(given: Callback | Iterable[Callback] | None) -> list[Callback]:
    """Return what was given as callbacks, one alone too; each would be called at some moment of a run.

    Raises:
        UsageError: One would never be called, or can't be called with what a moment has.
    """
    if given is None:
        return []
    is_one = isinstance(given, str | type) or _moments_of(given) or not isinstance(given, Iterable)
    callbacks: list[Any] = [given] if is_one else list(given)  # type: ignore[arg-type]
    for index, callback in enumerate(callbacks):
        if (problem := _problem(callback)) is not None:
            raise UsageError(f"callbacks[{index}] {problem}")
    return callbacks


def _problem(callback: Any) -> str | None:
    """Return why an object is no callback, as the predicate of a sentence; None if it is one."""
    if isinstance(callback, type):
        return f"is the class {callback.__name__}: give an object of it, {callback.__name__}()."
    example = "Write a class with methods such as on_step_end(self, run, metrics), and give an object of it."
    if isinstance(callback, str):
        trackers = "Names of trackers go into config={'trainer.logger': ['console', …]}."
        return f"is the text {callback!r}, not an object with methods. {trackers}"
    if inspect.isroutine(callback):
        return f"is the function {callback.__name__}, which says no moment to call it at. {example}"
    name, mine = type(callback).__name__, _moments_of(callback)
    for moment in mine:
        if (problem := _call_problem(getattr(callback, moment), MOMENTS[moment])) is not None:
            return f"is a {name}, whose {moment} {problem}"
    for other in dir(callback):
        if other.startswith("on_") and other not in MOMENTS and callable(getattr(callback, other)):
            hint = did_you_mean(other, MOMENTS)
            if hint or isinstance(callback, Callback) or not mine:
                return f"is a {name}, whose {other} is no moment of a run. {hint or _all_moments()}"
    if not mine:
        return f"is a {name} without a method for a moment of a run. {_all_moments()} {example}"
    return None


def _moments_of(callback: Any) -> list[str]:
    """Return the moments that an object has methods of its own for."""
    inherited = {moment: getattr(Callback, moment) for moment in MOMENTS}
    found = {moment: getattr(callback, moment, None) for moment in MOMENTS}
    return [
        moment
        for moment, method in found.items()
        if method is not None and getattr(method, "__func__", method) is not inherited[moment]
    ]


def _call_problem(method: Any, given: list[str]) -> str | None:
    """Return why a method can't be called at its moment, as the predicate of a sentence; None if it can."""
    if not callable(method):
        return f"is {method!r}, not a method."
    if inspect.iscoroutinefunction(method):
        return "is async: a moment calls a plain method and waits for it."
    try:
        signature = inspect.signature(method)
    except ValueError:  # of C, which may not tell
        return None
    try:
        signature.bind(*given)
    except TypeError:
        return f"takes {signature}: it is called with ({', '.join(given)})."
    return None


def _all_moments() -> str:
    return f"There are {', '.join(MOMENTS)}."
