"""The pulse of a rank: a thread says every few seconds that Python still runs there, and where its main thread is.

A call that is not over by its deadline has often been held up by a single rank, while the others wait for that one in a
collective; all of them are late alike. A rank whose pulse has stopped is the one: it is stopped on another machine, or
stuck in C code that keeps the interpreter. Otherwise the places tell them apart. Beats go through the key-value store
of the cluster, which every node reaches.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv

logger = logging.getLogger(__name__)

BEAT_S = 3.0
SILENT_S = 180.0
"""Without a beat for so long, a rank is held to be stuck. Loading a library from a cold network file system keeps the
interpreter for a minute or so; what computes lets go of it."""
_NAMESPACE = b"hrl_pulse"
_READ_TIMEOUT_S = 5.0
_HRL = f"{Path(__file__).parents[1]}{os.sep}"
_COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}"
_MOST_PLACES = 4
_MOST_RANKS = 8


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself.

    Attributes:
        number: Of the beat; one more each time.
        place: Where its main thread is.
        in_collective: Whether it waits for other ranks there.
        peak_gib: The most memory that its process has held.
    """

    number: int
    place: str
    in_collective: bool
    peak_gib: float


# ---- on the rank -----------------------------------------------------------------------------------------------


def begin_pulse(key: str, interval_s: float = BEAT_S) -> None:
    """Let this process have a pulse, from a thread that ends with it.

    Args:
        key: Name of the rank, which no other rank of the cluster has.
        interval_s: Between two beats.
    """
    main = threading.main_thread().ident
    threading.Thread(target=_beat, args=(key, main, interval_s), name="pulse", daemon=True).start()


def _beat(key: str, main: int | None, interval_s: float) -> None:
    number = 0
    while True:
        number += 1
        place, in_collective = place_of(sys._current_frames().get(main or 0))
        # In KiB on Linux, in bytes on macOS.
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "linux" else 2**30)
        beat = json.dumps([number, place, in_collective, round(peak_gib, 2)])
        try:
            internal_kv._internal_kv_put(key, beat, namespace=_NAMESPACE)
        except (RayError, AttributeError, RuntimeError) as error:
            if not ray.is_initialized():  # the cluster ends, and this process with it
                logger.debug("no pulse any more: %s", error)
                return
            # The store is busy. Without a further beat, this rank would be taken for the one that is stuck.
            logger.warning("beat %d of this rank could not be left, the next is tried: %s", number, error)
        time.sleep(interval_s)


def place_of(frame: FrameType | None) -> tuple[str, bool]:
    """Return where a thread is: the innermost function, and that of hrl which led there; and whether it's a collective.

    Args:
        frame: The thread's innermost frame.
    """
    if frame is None:
        return "nowhere", False
    innermost, outer = frame, frame
    while outer.f_back is not None and not outer.f_code.co_filename.startswith(_HRL):
        outer = outer.f_back
    place = _name(innermost)
    if outer is not innermost and outer.f_code.co_filename.startswith(_HRL):
        place = f"{place}, called by {_name(outer)}"
    return place, _COLLECTIVES in innermost.f_code.co_filename


def _name(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({Path(*path.parts[-2:])}:{frame.f_lineno})"


# ---- on the driver ---------------------------------------------------------------------------------------------


class Pulses:
    """The pulses of a group's ranks, as its driver sees them.

    Args:
        keys: Each rank's name for its beats.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        self._last: dict[int, Beat] = {}
        self._silent_s: dict[int, float] = defaultdict(float)
        self._looked: float | None = None

    def look(self, ranks: Iterable[int], most_s: float) -> None:
        """Read the ranks' beats.

        Args:
            ranks: Those that are waited for.
            most_s: Longest time that a single look may add to a silence: while the driver itself stood still, beats
                came and went unseen.
        """
        now = time.monotonic()
        passed_s = 0.0 if self._looked is None else min(now - self._looked, most_s)
        self._looked = now
        for rank in ranks:
            try:
                beat = self._read(rank)
            except RayError as error:  # its service is busy; if it is gone, whoever asks will notice
                logger.debug("the pulse of rank %d could not be read: %s", rank, error)
                return
            if beat is None or beat != self._last.get(rank):
                self._silent_s[rank] = 0.0
            else:
                self._silent_s[rank] += passed_s
            if beat is not None:
                self._last[rank] = beat

    def _read(self, rank: int) -> Beat | None:
        client = internal_kv.internal_kv_get_gcs_client()
        value = client.internal_kv_get(self._keys[rank].encode(), _NAMESPACE, timeout=_READ_TIMEOUT_S)
        return None if value is None else Beat(*json.loads(value))

    def silent(self, ranks: Iterable[int]) -> list[int]:
        """Return which of these ranks have not been heard of for `SILENT_S`."""
        return sorted(rank for rank in ranks if self._silent_s[rank] >= SILENT_S)

    def whereabouts(self, ranks: Iterable[int]) -> str:
        """Return a sentence on where ranks were at their last beat; those not in a collective first."""
        return whereabouts({rank: self._last[rank] for rank in ranks if rank in self._last})

    def last(self, rank: int) -> Beat | None:
        """Return a rank's last beat that was seen."""
        return self._last.get(rank)

    def forget(self) -> None:
        """Remove the beats from the cluster."""
        if internal_kv.internal_kv_get_gcs_client() is None or not ray.is_initialized():
            return
        for key in self._keys:
            internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


def whereabouts(beats: Mapping[int, Beat]) -> str:
    """Return where ranks were, those that the others wait for first; empty if nothing is known."""
    places: dict[tuple[bool, str], list[int]] = defaultdict(list)
    for rank, beat in sorted(beats.items()):
        places[beat.in_collective, beat.place].append(rank)
    words = []
    for (in_collective, place), ranks in sorted(places.items())[:_MOST_PLACES]:
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:_MOST_RANKS]))}"
        more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
        words.append(f"{who}{more} {'waiting for other ranks in' if in_collective else 'in'} {place}")
    return "; ".join(words)
