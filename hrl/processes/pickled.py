"""An object that the user's own session gives, on its way to the processes that use it."""

from __future__ import annotations

import base64
import os
import sys
from dataclasses import dataclass
from typing import Any, Self

import cloudpickle


@dataclass(frozen=True)
class PickledObject:
    """An object as text. What can be imported is sent as the names of its module and itself, any other by value.

    Attributes:
        pickled: The object, pickled, in base64.
        import_path: `sys.path` of the process that pickled it, which unpickling needs.
    """

    pickled: str
    import_path: tuple[str, ...]

    @classmethod
    def of(cls, value: object) -> Self:
        """Pickle an object; what it refers to may raise anything."""
        pickled = base64.b64encode(cloudpickle.dumps(value)).decode("ascii")
        return cls(pickled, tuple(entry or os.getcwd() for entry in sys.path))

    def load(self) -> Any:
        """Unpickle the object.

        Raises:
            ModuleNotFoundError: Its module can't be imported here.
        """
        sys.path += [entry for entry in self.import_path if entry not in sys.path]
        # What is unpickled here was pickled by `of` in the run's own process. It came in the arguments of an actor of
        # the run and over the socket that a pool opened to this process; never from a file, a download or the model.
        # Nothing is unpickled on the way back: results are JSON.
        return cloudpickle.loads(base64.b64decode(self.pickled))
