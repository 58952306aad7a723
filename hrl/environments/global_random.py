"""Games that draw from the generators of the whole process, as if each were alone in it."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()


class OwnRandom:
    """The state of `random`, and of numpy's generator where numpy is imported, as one episode has it.

    Args:
        seed: What the episode's state is made of.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: tuple[Any, Any] | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Give the process the episode's generators; other episodes wait."""
        with _lock:
            numpy = sys.modules.get("numpy")
            others = (random.getstate(), numpy.random.get_state() if numpy is not None else None)
            if self._state is None:
                random.seed(self._seed)
                if numpy is not None:
                    numpy.random.seed(self._seed % 2**32)
            else:
                _set(self._state, numpy)
            try:
                yield
            finally:
                self._state = (random.getstate(), numpy.random.get_state() if numpy is not None else None)
                _set(others, numpy)


def _set(state: tuple[Any, Any], numpy: Any) -> None:
    random.setstate(state[0])
    if numpy is not None and state[1] is not None:
        numpy.random.set_state(state[1])


def game_seed(row: Mapping[str, Any], seed: int) -> int:
    """Return the seed of an episode's game: the row's, so that a row is the same game at every step, else `seed`.

    Args:
        row: Of the data set; those of `bundled:games` have `extra_info.game_seed`.
        seed: Of the episode's `reset`.
    """
    info = row.get("extra_info")
    given = info.get("game_seed") if isinstance(info, Mapping) else None
    return seed if given is None else int(given)
