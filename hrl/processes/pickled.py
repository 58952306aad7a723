"""An object that the user's own session gives, on its way to the processes that use it."""

from __future__ import annotations

import base64
import functools
import inspect
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import cloudpickle


class NotPickledError(ValueError):
    """An object can't be sent to other processes; says why, and whoever catches it says what to do."""


@dataclass(frozen=True)
class PickledObject:
    """An object as text. What can be imported is sent as the names of its module and itself, any other by value.

    Attributes:
        name: Its name and module, for messages.
        pickled: The object, pickled, in base64.
        import_path: `sys.path` of the process that pickled it, which unpickling needs.
    """

    name: str
    pickled: str
    import_path: tuple[str, ...]

    @classmethod
    def of(cls, value: Any) -> Self:
        """Pickle an object: a class, a function, also one of a notebook or of the running script, or an instance.

        Raises:
            NotPickledError: It refers to something that can't be.
        """
        try:
            pickled = base64.b64encode(cloudpickle.dumps(value)).decode("ascii")
        except Exception as error:  # what the user's object refers to may raise anything when pickled
            raise NotPickledError(f"{type(error).__name__}: {error}") from error
        return cls(name_of(value), pickled, import_path())

    def load(self) -> Any:
        """Unpickle the object.

        Raises:
            ModuleNotFoundError: Its module can't be imported here.
        """
        extend_import_path(self.import_path)
        # What is unpickled here was pickled by `of` in the run's own process. It came in the arguments of an actor of
        # the run and over the socket that a pool opened to this process; never from a file, a download or the model.
        # Nothing is unpickled on the way back: results are JSON.
        return cloudpickle.loads(base64.b64decode(self.pickled))


def import_path() -> tuple[str, ...]:
    """Return where this process finds modules, for one that runs in another folder."""
    return tuple(entry or os.getcwd() for entry in sys.path)


def extend_import_path(entries: Iterable[str]) -> None:
    """Have this process find modules in further folders, after its own."""
    sys.path += [entry for entry in entries if entry not in sys.path]


def name_of(value: object) -> str:
    """Return what an object is called in messages: its name, or that of its class, and the module."""
    while isinstance(value, functools.partial):
        value = value.func
    named: Any = value if inspect.isclass(value) or inspect.isroutine(value) else type(value)
    return f"{named.__qualname__} of {getattr(named, '__module__', None) or 'an unknown module'}"
