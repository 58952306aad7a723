"""Arguments of an environment's constructor: which it takes, and as which types."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args, get_origin

from hrl.environments.tool_functions import type_of
from hrl.errors import RefusedError
from hrl.nearest import did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel

KEY = "environment.kwargs"
_MODULES = re.compile(r"\b(?:hrl_user_\w+|typing|collections\.abc|builtins)\.")
"""Names of modules before types that nobody wrote, or that everybody knows."""
_ONCE = (Iterable, Iterator)
"""What pydantic would read while it is gone through, and a constructor may go through twice."""


class EnvironmentArgumentError(RefusedError, ValueError):
    """A constructor does not take an argument; names its key."""


def check_names(made: Callable[..., Any], kwargs: Mapping[str, Any], title: str, key: str = KEY) -> None:
    """Refuse arguments that a constructor does not take, and those that it lacks.

    Args:
        made: A class, or a function that makes environments.
        kwargs: Its arguments.
        title: What it is called in the message.
        key: Where they were given.

    Raises:
        EnvironmentArgumentError: One is unknown, or missing.
    """
    signature = _signature(made)
    if signature is None:
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        parameters = signature.parameters
        unknown = [name for name in kwargs if name not in parameters or parameters[name].kind is _POSITIONAL]
        needed = [one for one in parameters.values() if one.default is one.empty and one.kind in _NAMED]
        missing = [one.name for one in needed if one.name not in kwargs]
        what = [f"{key}.{name} is no argument of it" for name in unknown]
        what += [f"{key}.{name} is missing" for name in missing]
        hints = " ".join(filter(None, (did_you_mean(name, parameters) for name in unknown)))
        raise EnvironmentArgumentError(
            f"{title} can't be made: {'; '.join(what) or error}. {hints}".rstrip() + f" It takes {in_words(signature)}"
        ) from error


def read_arguments(made: Callable[..., Any], kwargs: Mapping[str, Any], title: str, key: str = KEY) -> dict[str, Any]:
    """Return arguments as the types of the parameters: a dict for a dataclass or a pydantic model becomes one.

    What has no type, or one that pydantic does not know, stays as it is.

    Args:
        made: A class, or a function that makes environments.
        kwargs: Its arguments.
        title: What it is called in the message.
        key: Where they were given.

    Raises:
        EnvironmentArgumentError: A value does not fit.
    """
    read = dict(kwargs)
    if not isinstance(made, Hashable):
        return read
    types = _types(made)
    unlike = [name for name in kwargs if name in types and type(kwargs[name]) is not types[name]]
    if not unlike:
        return read  # and pydantic is not imported for it
    from pydantic import ValidationError

    readers = _readers(made)
    for name in unlike:
        if name not in readers:
            continue
        try:
            read[name] = readers[name](value=kwargs[name]).value  # type: ignore[attr-defined]
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            inner = ".".join(str(one) for one in first["loc"][1:] if isinstance(one, int) or one.isidentifier())
            said = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
            raise EnvironmentArgumentError(
                f"{title} can't be made: {key}.{name} is {_shown(kwargs[name])}, where "
                f"{_type_in_words(inspect.signature(made).parameters[name].annotation)} is expected "
                f"({f'{inner}: ' if inner else ''}{said})"
            ) from error
    return read


def in_words(signature: inspect.Signature, leave_out: int = 0) -> str:
    """Return the parameters of a signature as their author wrote them.

    Args:
        signature: Of a function or class.
        leave_out: How many of the first are left out.
    """
    shown: list[str] = []
    for one in [*signature.parameters.values()][leave_out:]:
        stars = "*" * (one.kind is one.VAR_POSITIONAL) + "**" * (one.kind is one.VAR_KEYWORD)
        typed = "" if one.annotation is one.empty else f": {_type_in_words(one.annotation)}"
        default = "" if one.default is one.empty else f" = {one.default!r}" if typed else f"={one.default!r}"
        if one.kind is one.KEYWORD_ONLY and "*" not in "".join(shown):
            shown.append("*")
        shown.append(f"{stars}{one.name}{typed}{_MODULES.sub('', default)}")
    return f"({', '.join(shown)})"


_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _shown(value: object) -> str:
    """Return a value for a message; one that came out of an environment variable may be a secret."""
    variable = next((name for name, held in os.environ.items() if held and held == value), None)
    return f"{value!r:.80}" if variable is None else f"what the environment variable {variable} has"


def _type_in_words(annotation: object) -> str:
    return _MODULES.sub("", annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def _signature(made: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(made)
    except (TypeError, ValueError):
        return None  # written in C, without a signature


@functools.lru_cache(maxsize=256)
def _types(made: Callable[..., Any]) -> dict[str, Any]:
    """Return name → type of the parameters whose types are known; texts are looked up where they were written."""
    signature = _signature(made)
    names = _names_around(made)
    types: dict[str, Any] = {}
    for one in () if signature is None else signature.parameters.values():
        annotation = one.annotation
        if annotation is one.empty or one.kind not in _NAMED:
            continue
        if isinstance(annotation, str):
            try:
                annotation = type_of(annotation, names)
            # An import for the type checker alone, say: the text names nothing here, and may fail in any way.
            except Exception:  # noqa: BLE001
                continue
        types[one.name] = annotation
    return types


def _names_around(made: Any) -> dict[str, Any]:
    """Return the names that a constructor or function sees."""
    while isinstance(made, functools.partial):
        made = made.func
    if isinstance(made, type):
        maker = next(base for base in made.__mro__ if "__init__" in vars(base))
        return dict(vars(sys.modules.get(maker.__module__, sys)))
    return dict(getattr(inspect.unwrap(made), "__globals__", {}))


@functools.lru_cache(maxsize=256)
def _readers(made: Callable[..., Any]) -> dict[str, type[BaseModel]]:
    """Return name → what reads the argument, for those whose types can be read."""
    from pydantic import ConfigDict, PydanticUserError, create_model

    readers: dict[str, type[BaseModel]] = {}
    for name, annotation in _types(made).items():
        if get_origin(annotation) in _ONCE or any(get_origin(part) in _ONCE for part in get_args(annotation)):
            continue
        try:
            readers[name] = create_model(
                name, __config__=ConfigDict(coerce_numbers_to_str=True), value=(annotation, ...)
            )
        except (PydanticUserError, TypeError, ValueError, NameError):
            continue  # no plain data has such a type
    return readers
