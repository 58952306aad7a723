"""The order of the training rows, and a position in it for checkpoints.

The order is a pure function of (seed, epoch). The `fingerprint` saved with a position reveals a resumed run that has
other rows or another order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Position:
    """Where the next batch starts: `offset` rows into the order of `epoch`, by default at the very beginning."""

    epoch: int = 0
    offset: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the position as plain data for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Position:
        """Return the position from the dict of `to_dict`.

        Raises:
            ValueError: The keys are others, or a value is not a natural number.
        """
        natural = all(isinstance(value, int) and value >= 0 for value in state.values())
        if set(state) != {"epoch", "offset"} or not natural:
            raise ValueError(f"a data position holds epoch and offset, both natural numbers, got {dict(state)}")
        return cls(state["epoch"], state["offset"])


@dataclass(frozen=True)
class EpochOrder:
    """Row numbers batch by batch, epoch by epoch.

    The last rows of an epoch that don't fill a batch are skipped; with `shuffle` they are different rows every epoch.

    Attributes:
        num_rows: Number of rows in the data set.
        seed: Seed of the shuffling.
        shuffle: Whether epochs are shuffled; otherwise each one counts from 0 to `num_rows` - 1.
    """

    num_rows: int
    seed: int
    shuffle: bool = True

    def epoch(self, epoch: int) -> np.ndarray:
        """Return the order of one epoch, int64 `(num_rows,)`.

        Rows are sorted by a hash of (seed, epoch, row) instead of a library's generator, so that the order doesn't
        depend on the version of numpy.
        """
        rows = np.arange(self.num_rows, dtype=np.uint64)
        if not self.shuffle:
            return rows.astype(np.int64)
        stream = _mix(_mix(np.array([self.seed], dtype=np.uint64)) ^ np.uint64(epoch))
        return np.argsort(_mix(rows ^ stream), kind="stable")

    def next(self, position: Position, batch_size: int) -> tuple[list[int], Position]:
        """Return the rows of the next batch and the position after it.

        Raises:
            ValueError: The batch is larger than the data set, or the position is beyond its end.
        """
        self._check(position, batch_size)
        if position.offset + batch_size > self.num_rows:
            position = Position(position.epoch + 1, 0)
        end = position.offset + batch_size
        rows = self.epoch(position.epoch)[position.offset : end]
        return rows.tolist(), Position(position.epoch, end)

    def ahead(self, position: Position, batch_size: int, batches: int) -> np.ndarray:
        """Return whether each row is in one of the next `batches` batches: bool `(num_rows,)`.

        Raises:
            ValueError: As `next` does.
        """
        self._check(position, batch_size)
        found = np.zeros(self.num_rows, dtype=bool)
        while batches > 0 and not found.all():
            fitting = min(batches, (self.num_rows - position.offset) // batch_size)
            end = position.offset + fitting * batch_size
            found[self.epoch(position.epoch)[position.offset : end]] = True
            batches, position = batches - fitting, Position(position.epoch + 1, 0)
        return found

    def _check(self, position: Position, batch_size: int) -> None:
        if not 1 <= batch_size <= self.num_rows:
            raise ValueError(f"a batch of {batch_size} rows can't be drawn from a data set of {self.num_rows} rows")
        if position.offset > self.num_rows:
            raise ValueError(f"{position} lies beyond the data set's {self.num_rows} rows: it belongs to other data")


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's output function (Steele, Lea and Flood 2014): a bijection of uint64 that scatters its bits."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def fingerprint(order: EpochOrder, tokens: Iterable[np.ndarray]) -> dict[str, Any]:
    """Return everything that the row at a position depends on, as plain data for a checkpoint.

    Args:
        order: Order of the rows.
        tokens: Token ids of the rows, `(T,)` each, in their stored order.

    Returns:
        `rows`, their number; `shuffle`; `seed`, None without shuffling; `tokens`, a digest of the ids.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for ids in tokens:
        digest.update(len(ids).to_bytes(4, "little"))  # reveals ids that moved from one row to the next
        digest.update(np.asarray(ids, dtype="<i4").tobytes())
    return {
        "rows": order.num_rows,
        "shuffle": order.shuffle,
        "seed": order.seed if order.shuffle else None,
        "tokens": digest.hexdigest(),
    }


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Return the differences between two fingerprints, one phrase each; empty for the same rows in the same order."""
    if present == saved:
        return []
    found = []
    if saved.get("rows") != present["rows"]:
        found.append(f"{present['rows']} rows, were {saved.get('rows')}")
    elif saved.get("tokens") != present["tokens"]:
        found.append("the rows hold other tokens (files and their order, filters, chat template, tokenizer, lengths)")
    changed = [name for name in ("shuffle", "seed") if saved.get(name) != present[name]]
    found += [f"data.{name}={present[name]}, was {saved.get(name)}" for name in changed[:1]]  # one entails the other
    return found
