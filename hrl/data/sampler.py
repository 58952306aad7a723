"""Which prompts come next: `data.sampler`.

Without a sampler every prompt comes once per epoch, in the order of the data set. A sampler chooses by what it has
seen: each scored batch is shown to it. What it remembers is saved in checkpoints, so that a resumed run goes on with
the same prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from inspect import Parameter, signature
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from hrl.data.order import MixedOrder, Position, uniform
from hrl.errors import DatasetError
from hrl.nearest import did_you_mean
from hrl.user_file import UserFileError, load_user_file

if TYPE_CHECKING:
    from hrl.data.dataset import RLHFDataset
    from hrl.protocol import DataProto


class SamplerError(DatasetError):
    """A sampler can't be loaded, or chose what can't be trained on."""


class PromptSampler:
    """Chooses the prompts of each step; subclass it and name the class with `data.sampler=my_sampler.py:MyClass`.

    This class chooses by the order of the data set. Override what is to be different: `choose`, `update` and, where it
    remembers something, `state_dict` and `load_state_dict`.

    Args:
        dataset: The training prompts: `len(dataset)`, and `dataset.rows[i].columns`, the columns of row `i`.
        seed: `data.seed`.
        options: The other entries of `data.sampler`.
    """

    def __init__(self, dataset: RLHFDataset, seed: int, **options: Any) -> None:
        if options:
            known = [
                one.name for one in signature(type(self)).parameters.values() if one.kind is Parameter.KEYWORD_ONLY
            ]
            name = next(iter(options))
            raise SamplerError(f"{type(self).__name__} has no option {name!r}. {did_you_mean(name, known)}".rstrip())
        self.dataset = dataset
        self.seed = seed

    def choose(self, position: Position, size: int) -> tuple[list[int], Position]:
        """Return the rows of the next batch and the position after it; all different, but of sources with weights.

        The result must follow from the arguments, the seed and what `state_dict` holds alone, or a resumed run would go
        on with other prompts.

        Args:
            position: How far the run has come, in rows of the data set: `position.epoch` and `position.offset`.
            size: Rows of the batch.
        """
        return self.dataset.draw(position, size)

    def update(self, indices: np.ndarray, scores: np.ndarray, solved: np.ndarray) -> None:
        """Take note of a scored batch.

        Args:
            indices: Row of the data set that each sample answers, int64 (B,).
            scores: Score of each sample by the reward function, float64 (B,).
            solved: Whether each sample is correct (its `acc` is 1, or else its score at least 1), bool (B,).
        """

    def metrics(self) -> dict[str, float]:
        """Return metrics of the step, under their full names."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what it remembers, as plain JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def observe(self, batch: DataProto, scores: np.ndarray, solved: np.ndarray) -> None:
        """Take note of a scored batch, all of it; calls `update`."""
        self.update(np.array(batch.non_tensor_batch["index"].tolist(), dtype=np.int64), scores, solved)

    def random(self, position: Position) -> np.ndarray:
        """Return a random number between 0 and 1 for each row, float64 (N,); the same for the same position."""
        return uniform(len(self.dataset), self.seed, self.drawn(position))

    def drawn(self, position: Position) -> int:
        """Return how many prompts were drawn before a position."""
        return position.epoch * len(self.dataset) + position.offset

    def after(self, position: Position, size: int) -> Position:
        """Return the position after a batch, for samplers that do not go through the data set in order."""
        return Position(*divmod(self.drawn(position) + size, len(self.dataset)))


class PassRateSampler(PromptSampler):
    """Prefers prompts that are sometimes solved.

    The samples of a prompt that is always or never solved all have the same advantage, 0, and teach nothing. Each
    prompt is drawn with a probability in proportion to `floor + (1 - floor) · 4 p (1 - p)`, where p is its running pass
    rate; a prompt that was not drawn yet counts as p = 0.5, so that new ones come first. Weighted sources keep their
    shares of each batch; a source whose share is larger than its rows gives all of them, and some twice.

    Args:
        dataset, seed: See `PromptSampler`.
        floor: Weight of a prompt with pass rate 0 or 1, relative to one with 0.5: how often is looked whether it has
            changed.
        decay: Weight of the old pass rate against the new one.
    """

    def __init__(
        self, dataset: RLHFDataset, seed: int, *, floor: float = 0.1, decay: float = 0.5, **options: Any
    ) -> None:
        super().__init__(dataset, seed, **options)
        for name, value, low in (("floor", floor, "more than 0"), ("decay", decay, "at least 0")):
            if not isinstance(value, int | float) or not 0 <= value <= 1 or (name == "floor" and value == 0):
                raise SamplerError(f"{name} of pass_rate is {value!r}, expected a number {low} and at most 1")
        self.floor, self.decay = float(floor), float(decay)
        self.rates = np.full(len(dataset), np.nan)

    def choose(self, position: Position, size: int) -> tuple[list[int], Position]:
        """Draw rows without replacement, by their weights (Efraimidis and Spirakis 2006)."""
        rates = np.nan_to_num(self.rates, nan=0.5)
        weights = self.floor + (1 - self.floor) * 4 * rates * (1 - rates)
        best_first = np.argsort(-np.log(self.random(position)) / weights, kind="stable")
        order = self.dataset.order
        if not isinstance(order, MixedOrder):
            return best_first[:size].tolist(), self.after(position, size)
        turns = source_of(order, order.next(position, size)[0])
        by_source = source_of(order, best_first)
        best_of = {source: cycle(best_first[by_source == source].tolist()) for source in np.unique(turns)}
        return [next(best_of[source]) for source in turns], self.after(position, size)

    def update(self, indices: np.ndarray, scores: np.ndarray, solved: np.ndarray) -> None:
        """Move the pass rate of each prompt towards that of its samples."""
        for index in np.unique(indices):
            rate, before = float(solved[indices == index].mean()), self.rates[index]
            self.rates[index] = rate if np.isnan(before) else self.decay * before + (1 - self.decay) * rate

    def metrics(self) -> dict[str, float]:
        """Return the mean running pass rate, and the shares of prompts never and always solved, of those seen."""
        seen = self.rates[~np.isnan(self.rates)]
        if not len(seen):
            return {}
        return {
            "data/pass_rate/mean": float(seen.mean()),
            "data/pass_rate/never_solved": float((seen == 0).mean()),
            "data/pass_rate/always_solved": float((seen == 1).mean()),
            "data/pass_rate/seen": len(seen) / len(self.rates),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the pass rates of the prompts seen so far."""
        seen = np.flatnonzero(~np.isnan(self.rates))
        return {"rows": seen.tolist(), "rates": self.rates[seen].tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the pass rates."""
        self.rates[:] = np.nan
        self.rates[state["rows"]] = state["rates"]


def source_of(order: MixedOrder, rows: Any) -> np.ndarray:
    """Return the number of the source of each of some rows, int64 (N,)."""
    return np.searchsorted(order.ends, rows, side="right")


class IteratedSampler(PromptSampler):
    """A sampler of verl: made of data set and `data` section, iterated for row numbers, told of each scored batch.

    The last rows of an iteration that don't fill a batch are dropped. A resumed run goes on exactly if the sampler has
    `state_dict` and `load_state_dict`; else as many rows as were taken from it are taken again.
    """

    def __init__(self, dataset: RLHFDataset, seed: int, *, made: Any) -> None:
        super().__init__(dataset, seed)
        self._made = made
        self._rows: Iterator[Any] = iter(())
        self._drawn = 0

    def choose(self, position: Position, size: int) -> tuple[list[int], Position]:
        """Take the next rows, from a new iteration where one ends."""
        for _ in range(2):
            chosen = [int(row) for row in islice(self._rows, size)]
            self._drawn += len(chosen)
            if len(chosen) == size:
                return chosen, self.after(position, size)
            self._rows = iter(self._made)
            self._drawn = 0
        raise SamplerError(f"{type(self._made).__name__} yields fewer rows than a batch of {size} has")

    def observe(self, batch: DataProto, scores: np.ndarray, solved: np.ndarray) -> None:
        """Hand the batch on to `update`, where the sampler has one."""
        if hasattr(self._made, "update"):
            self._made.update(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return how many rows of this iteration were drawn, and the sampler's own state."""
        own = {"own": self._made.state_dict()} if hasattr(self._made, "state_dict") else {}
        return {"drawn": self._drawn, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sampler's own state, or draw what was drawn."""
        if "own" in state and hasattr(self._made, "load_state_dict"):
            self._made.load_state_dict(state["own"])
            self._rows = iter(self._made)
        else:
            self._rows = iter(self._made)
            deque(islice(self._rows, state["drawn"]), maxlen=0)
        self._drawn = state["drawn"]


SAMPLERS: dict[str, type[PromptSampler]] = {"pass_rate": PassRateSampler}
"""Name in `data.sampler` → sampler."""


def load_sampler(settings: Mapping[str, Any], dataset: RLHFDataset, seed: int, section: Any = None) -> PromptSampler:
    """Return the sampler that `data.sampler` names.

    Args:
        settings: `name` of a built-in one or `<file>.py:<class>`; or `path` and `name`, or verl's `class_path` and
            `class_name`; the rest are options.
        dataset: The training prompts.
        seed: `data.seed`.
        section: The section `data`, for a sampler of verl.

    Raises:
        SamplerError: There is none of the name, it refuses an option, or the rows are streamed.
    """
    options = dict(settings)
    path = options.pop("path", None) or options.pop("class_path", None)
    name = options.pop("name", None) or options.pop("class_name", None)
    options.pop("class_path", None), options.pop("class_name", None)
    if path is None and isinstance(name, str) and ".py:" in name:
        path, _, name = name.rpartition(":")
    if getattr(dataset, "is_streamed", False):
        raise SamplerError("a sampler needs all rows, and a streamed source has them on disk: leave out streaming")
    if path is None:
        if name not in SAMPLERS:
            hint = did_you_mean(str(name), SAMPLERS, f"There is {', '.join(SAMPLERS)}, or <file>.py:<class>.")
            raise SamplerError(f"there is no sampler {name!r}. {hint}")
        return SAMPLERS[name](dataset, seed, **options)
    made = _class_in(str(path), str(name))
    try:
        if issubclass(made, PromptSampler):
            return made(dataset, seed, **options)
        return IteratedSampler(dataset, seed, made=made(data_source=dataset, data_config=section, **options))
    except SamplerError:
        raise
    except Exception as error:  # the user's own code, which may raise anything
        raise SamplerError(f"{name} of {path} can't be made: {type(error).__name__}: {error}") from error


def _class_in(path: str, name: str) -> type[Any]:
    try:
        module = load_user_file(path)
    except UserFileError as error:
        raise SamplerError(str(error)) from error
    except Exception as error:  # the user's own code, which may raise anything
        raise SamplerError(f"{path} raises {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type) or not (issubclass(found, PromptSampler) or hasattr(found, "__iter__")):
        classes = [
            other
            for other, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, PromptSampler) and value is not PromptSampler
        ]
        hint = did_you_mean(name, classes, f"It has {', '.join(classes) or 'none'}.")
        raise SamplerError(f"{path} defines no subclass of hrl.data.sampler.PromptSampler named {name!r}. {hint}")
    return found


def check_choice(sampler: PromptSampler, chosen: list[int], size: int, num_rows: int) -> None:
    """Refuse a choice that is no batch.

    With weighted sources a row may come twice: a source whose share is larger than its rows repeats them.

    Raises:
        SamplerError: Another number of rows, a row twice, or a row that is not there.
    """
    who = f"sampler {type(sampler).__name__}"
    may_repeat = isinstance(getattr(sampler.dataset, "order", None), MixedOrder)
    if len(chosen) != size or (len(set(chosen)) != size and not may_repeat):
        raise SamplerError(f"{who} chose {len(set(chosen))} different rows of {len(chosen)}, where a batch has {size}")
    outside = [row for row in chosen if not 0 <= row < num_rows]
    if outside:
        raise SamplerError(f"{who} chose row {outside[0]}, and there are {num_rows} rows")
