"""The order of the training rows, and a position in it for checkpoints.

The order is a pure function of (seed, epoch), with weighted sources too. The `fingerprint` saved with a
position reveals a resumed run that has other rows or another order.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
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
        """Return the order of one epoch, int64 `(num_rows,)`."""
        return _pass_over(self.num_rows, self.seed, epoch) if self.shuffle else np.arange(self.num_rows)

    def next(self, position: Position, batch_size: int) -> tuple[list[int], Position]:
        """Return the rows of the next batch and the position after it.

        Raises:
            ValueError: The batch is larger than the data set, or the position is beyond its end.
        """
        self.check(position, batch_size)
        if position.offset + batch_size > self.num_rows:
            position = Position(position.epoch + 1, 0)
        end = position.offset + batch_size
        rows = epoch_of(self, position.epoch)[position.offset : end]
        return rows.tolist(), Position(position.epoch, end)

    def ahead(self, position: Position, batch_size: int, batches: int) -> np.ndarray:
        """Return whether each row is in one of the next `batches` batches: bool `(num_rows,)`.

        Raises:
            ValueError: As `next` does.
        """
        self.check(position, batch_size)
        found = np.zeros(self.num_rows, dtype=bool)
        while batches > 0 and not found.all():
            fitting = min(batches, (self.num_rows - position.offset) // batch_size)
            end = position.offset + fitting * batch_size
            found[epoch_of(self, position.epoch)[position.offset : end]] = True
            batches, position = batches - fitting, Position(position.epoch + 1, 0)
        return found

    def check(self, position: Position, batch_size: int) -> None:
        """Refuse a batch or a position that the rows don't have.

        Raises:
            ValueError: The batch is larger than the data set, or the position is beyond its end.
        """
        if not 1 <= batch_size <= self.num_rows:
            raise ValueError(f"a batch of {batch_size} rows can't be drawn from a data set of {self.num_rows} rows")
        if position.offset > self.num_rows:
            raise ValueError(f"{position} lies beyond the data set's {self.num_rows} rows: it belongs to other data")


@dataclass(frozen=True)
class MixedOrder(EpochOrder):
    """Rows of several sources, each with its share of the prompts.

    A source with the weight w gives w of the sum of all weights: of the `num_rows` prompts of an epoch, and of each
    batch, to one prompt. It goes through its own rows again and again, in another order each time, so that a small
    source with a large weight is seen more often. Its place in its rows follows from (epoch, offset), so a resumed run
    goes on exactly.

    Attributes:
        sizes: Rows of each source, which follow each other in the data set.
        weights: Weight of each source.
    """

    sizes: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """Prompts of each source in an epoch: the shares of `num_rows`, rounded so that they add up."""
        return tuple(whole_shares(self.num_rows, self.weights))

    @property
    def ends(self) -> np.ndarray:
        """The row after the last one of each source, int64."""
        return np.cumsum(self.sizes)

    def share(self, source: int) -> float:
        """Return the share of the prompts that a source gives."""
        return self.weights[source] / sum(self.weights)

    def epoch(self, epoch: int) -> np.ndarray:
        """Return the order of one epoch, int64 `(num_rows,)`; sources take turns as their shares demand."""
        rows, places, start = [], [], 0
        for source, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            rows.append(start + self._drawn(source, size, epoch * count, count))
            places.append((np.arange(count) + 0.5) / max(count, 1))
            start += size
        return np.concatenate(rows)[np.argsort(np.concatenate(places), kind="stable")]

    def _drawn(self, source: int, size: int, start: int, count: int) -> np.ndarray:
        """Return `count` rows of a source from its `start`-th prompt on, int64."""
        if not self.shuffle:
            return np.arange(start, start + count) % size
        first = start // size
        passes = np.arange(first, (start + count - 1) // size + 1) if count else np.arange(0)
        return _passes_over(size, self.seed, passes, source + 1).reshape(-1)[start - first * size :][:count]


def whole_shares(total: int, weights: Sequence[float]) -> list[int]:
    """Return the shares of a whole number in proportion to weights, rounded so that they add up to it."""
    exact = np.array(weights) / sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    for source in np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]:
        counts[source] += 1
    return [int(count) for count in counts]


@lru_cache(maxsize=2)
def epoch_of(order: EpochOrder, epoch: int) -> np.ndarray:
    """Return `order.epoch(epoch)`, kept for the next batch of the same epoch: it takes a sort of all rows."""
    rows = order.epoch(epoch)
    rows.setflags(write=False)
    return rows


def _pass_over(num_rows: int, seed: int, which: int) -> np.ndarray:
    """Return the row numbers in the random order of one pass, int64 `(num_rows,)`."""
    return _passes_over(num_rows, seed, np.array([which]))[0]


def _passes_over(num_rows: int, seed: int, passes: np.ndarray, source: int = 0) -> np.ndarray:
    """Return the row numbers in a random order for each of some passes, int64 `(passes, num_rows)`.

    Rows are sorted by a hash of (seed, pass, source, row) instead of a library's generator, so that the order doesn't
    depend on the version of numpy.
    """
    stream = _mix(_mix(np.array([seed], dtype=np.uint64)) ^ passes.astype(np.uint64))
    if source:
        stream = _mix(stream ^ _mix(np.array([source], dtype=np.uint64)))
    return np.argsort(_mix(np.arange(num_rows, dtype=np.uint64) ^ stream[:, None]), axis=1, kind="stable")


def uniform(num_rows: int, seed: int, which: int) -> np.ndarray:
    """Return a number between 0 and 1 for each row, by a hash of (seed, which, row), float64 `(num_rows,)`."""
    stream = _mix(_mix(np.array([seed], dtype=np.uint64)) ^ np.uint64(which) ^ np.uint64(1 << 63))
    return (_mix(np.arange(num_rows, dtype=np.uint64) ^ stream) >> np.uint64(11)).astype(np.float64) / 2**53 + 2**-54


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's output function (Steele, Lea and Flood 2014): a bijection of uint64 that scatters its bits."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def fingerprint(
    order: EpochOrder, tokens: Iterable[np.ndarray], beside: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return everything that the row at a position and what is learnt from it depend on, for a checkpoint.

    Args:
        order: Order of the rows.
        tokens: Token ids of the rows, `(T,)` each, in their stored order.
        beside: What each row has beside its tokens, plain values by name.

    Returns:
        Plain data. `rows`, their number; `shuffle`; `seed`, None without shuffling; `tokens`, a digest of the ids;
        `columns`, a digest of each name's values; `mix`, sizes and weights of sources with shares.
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
        "columns": _digests_by_name(beside),
        **({"mix": [[*order.sizes], [*order.weights]]} if isinstance(order, MixedOrder) else {}),
    }


def _digests_by_name(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    digests: dict[str, hashlib.blake2b] = defaultdict(partial(hashlib.blake2b, digest_size=_DIGEST_BYTES))
    for index, row in enumerate(rows):
        for name, value in row.items():
            digests[name].update(f"{index} {value!r}\n".encode(errors="surrogatepass"))
    return {name: digest.hexdigest() for name, digest in digests.items()}


def digest_of(values: Iterable[Any]) -> str:
    """Return a digest of plain values, such as the right answers of rows."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for value in values:
        digest.update(f"{value!r}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Return the differences between two fingerprints, one phrase each; empty for the same rows in the same order.

    What the saved one lacks, which an older version of hrl has made, is not compared.
    """
    if present == saved:
        return []
    found = []
    if saved.get("rows") != present["rows"]:
        found.append(f"{present['rows']} rows, were {saved.get('rows')}")
    elif saved.get("tokens") != present["tokens"]:
        found.append("the rows hold other tokens (files and their order, filters, chat template, tokenizer, lengths)")
    else:
        if "answers" in saved and saved["answers"] != present.get("answers"):
            found.append("the right answers of the rows are others")
        now = present["columns"]
        was = saved.get("columns", now)
        if others := sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name)):
            found.append(f"the rows differ in {', '.join(others)}")
    if saved.get("mix") != present.get("mix"):
        found.append("the weights of its sources are others")
    changed = [name for name in ("shuffle", "seed") if saved.get(name) != present[name]]
    found += [f"data.{name}={present[name]}, was {saved.get(name)}" for name in changed[:1]]  # one entails the other
    return found
