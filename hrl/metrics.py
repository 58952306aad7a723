"""How the numbers of micro-batches, ranks and phases become one: a metric's kind says how it is merged."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, SupportsFloat, get_args

if TYPE_CHECKING:
    from torch import Tensor  # not imported: the rewards' process has no use for torch

#: `torch.quantile` takes no more numbers than this.
QUANTILE_LIMIT = 1 << 24

MetricKind = Literal["mean", "sum", "max", "last"]


@dataclass(frozen=True)
class Metric:
    """One observation, or several already merged.

    The kind belongs to the number and not to its name, so that a mean over micro-batches, ranks and steps is the mean
    over all tokens (or rows), however they were cut.

    Attributes:
        kind: How two observations are merged.
        value: The sum for `"mean"` and `"sum"`, otherwise the number itself.
        count: For `"mean"`, the number of summed values; 0 if nothing was observed.
    """

    kind: MetricKind
    value: float
    count: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(MetricKind):
            raise ValueError(f"unknown metric kind {self.kind!r}; known: {', '.join(get_args(MetricKind))}")
        if not 0 <= self.count < math.inf:
            raise ValueError(f"a metric's count must be finite and not negative, got {self.count}")

    @classmethod
    def mean(cls, sum: SupportsFloat, count: SupportsFloat) -> Metric:
        """Return the mean of `count` things that add up to `sum`."""
        return cls("mean", float(sum), float(count))

    @classmethod
    def total(cls, value: SupportsFloat) -> Metric:
        """Return a number that adds up, such as tokens or skipped steps."""
        return cls("sum", float(value))

    @classmethod
    def max(cls, value: SupportsFloat) -> Metric:
        """Return a number whose maximum is kept."""
        return cls("max", float(value))

    @classmethod
    def last(cls, value: SupportsFloat) -> Metric:
        """Return a number whose latest value is kept, such as a learning rate."""
        return cls("last", float(value))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was observed: a mean with count 0."""
        return self.kind == "mean" and self.count == 0

    def merge(self, later: Metric) -> Metric:
        """Return both observations as one.

        Raises:
            ValueError: The two are of different kinds.
        """
        if later.kind != self.kind:
            raise ValueError(f"mixes kinds: {self.kind}, {later.kind}")
        return Metric(self.kind, _MERGE[self.kind](self.value, later.value), self.count + later.count)

    def result(self) -> float:
        """Return the reduced number.

        Raises:
            ValueError: It is a mean of nothing (`is_empty`).
        """
        if self.is_empty:
            raise ValueError("the mean of nothing has no value; leave the metric out (see Metric.is_empty)")
        return self.value / self.count if self.kind == "mean" else self.value


def _max(a: float, b: float) -> float:
    # NaN wins, so that a failed observation stays visible.
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


_MERGE: dict[str, Callable[[float, float], float]] = {
    "mean": lambda a, b: a + b,
    "sum": lambda a, b: a + b,
    "max": _max,
    "last": lambda a, b: b,
}


def source_and_metric(name: str, names: Iterable[str]) -> tuple[str, str]:
    """Return the source of a validation's metric, and the rest of its name.

    Names of sources and of a reward's parts may have slashes; only a source has a number of prompts, `val/<source>/n`.

    Args:
        name: `val/<source>/<metric>`, or `val/<source>/<part>/<metric>` of a part of the reward.
        names: All metrics of that validation.

    Returns:
        E.g. `("gsm8k", "mean@1")`, `("gsm8k", "format/mean@1")`, and without a source `("", "rollout/empty_responses")`
        for a counter of all of them; up to the last slash if no source is known.
    """
    plain = name.removeprefix("val/")
    sources = [one[4:-2] for one in names if one.startswith("val/") and one.endswith("/n")]
    found = max(
        (source for source in sources if plain.startswith(f"{source}/")),
        key=len,
        default="" if sources else plain.rpartition("/")[0],
    )
    return found, plain.removeprefix(f"{found}/")


class SpreadNames(NamedTuple):
    """Names of the mean, the 99th percentile and the maximum of a collection of numbers."""

    mean: str
    p99: str
    max: str


class Meter:
    """Collects what an update measures on the device, micro-batch by micro-batch, and fetches it once.

    Fetching a number blocks until the device has computed it.

    Args:
        world_size: Ranks that measure the same update.
        num_mini_batches: Its optimizer steps.
    """

    def __init__(self, world_size: int = 1, num_mini_batches: int = 1) -> None:
        self.world_size = world_size
        self._num_mini_batches = num_mini_batches
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._spreads: dict[SpreadNames, list[Tensor]] = {}

    def add(self, name: str, total: Tensor, count: Tensor | float) -> None:
        """Add to a mean over tokens or rows."""
        total = total.detach()
        old = self._sums.get(name)
        # A plain number is filled in on the device, not copied to it.
        count = total.new_full((), float(count)) if isinstance(count, int | float) else count.to(total)
        self._sums[name] = (total, count) if old is None else (old[0] + total, old[1] + count)

    def add_all(self, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add (sum, count) pairs by name."""
        for name, (total, count) in metrics.items():
            self.add(name, total, count)

    def add_share(self, name: str, share: Tensor) -> None:
        """Add a share of a mini-batch's loss: summed over micro-batches and ranks, averaged over mini-batches."""
        self.add(name, share, 0)
        total, _ = self._sums[name]
        self._sums[name] = (total, total.new_full((), self._num_mini_batches / self.world_size))

    def add_spread(self, names: SpreadNames, numbers: Tensor) -> None:
        """Collect numbers `(n,)` whose spread is reported."""
        self._spreads.setdefault(names, []).append(numbers)

    def collected(self) -> dict[str, Tensor]:
        """Return what is there so far: sums, and the numbers `(n,)` of a spread under the name of its mean."""
        import torch

        spreads = {names.mean: torch.cat(parts) for names, parts in self._spreads.items()}
        return {name: total for name, (total, _) in self._sums.items()} | spreads

    def metrics(self) -> dict[str, Metric]:
        """Return everything by name, after one wait."""
        import torch

        parts = [torch.stack(pair).double() for pair in self._sums.values()]
        spreads = {names: torch.cat(numbers).double() for names, numbers in self._spreads.items()}
        spreads = {names: numbers for names, numbers in spreads.items() if numbers.numel() > 0}
        for numbers in spreads.values():
            p99 = torch.quantile(numbers[:QUANTILE_LIMIT], 0.99)
            parts.append(torch.stack([numbers.sum(), p99, numbers.max()]))
        found = iter(torch.cat(parts).tolist() if parts else [])
        metrics = {name: Metric.mean(next(found), next(found)) for name in self._sums}
        for names, numbers in spreads.items():
            metrics[names.mean] = Metric.mean(next(found), numbers.numel())
            # Over several ranks the largest of their 99th percentiles, which is not below that of all tokens.
            metrics[names.p99] = Metric.max(next(found))
            metrics[names.max] = Metric.max(next(found))
        return metrics


class StepMetrics(dict[str, float]):
    """The numbers of a step by name. What is observed more than once is merged by its kind; assignment replaces."""

    def __init__(self) -> None:
        super().__init__()
        self._observed: dict[str, Metric] = {}

    def observe(self, *observations: Mapping[str, Metric]) -> None:
        """Merge observations of ranks or phases by name, the earliest first.

        A name of which nothing was observed is absent rather than NaN.

        Raises:
            ValueError: Two observations of a name are of different kinds; names it.
        """
        for name, metric in (pair for metrics in observations for pair in metrics.items()):
            earlier = self._observed.get(name)
            try:
                merged = metric if earlier is None else earlier.merge(metric)
            except ValueError as error:
                raise ValueError(f"metric {name!r} {error}") from None
            self._observed[name] = merged
            if not merged.is_empty:
                self[name] = merged.result()

    def absorb(self, later: StepMetrics) -> None:
        """Take in what a part of the step had its own metrics for."""
        self.observe(later._observed)
        self |= {name: value for name, value in later.items() if name not in later._observed}


def validation_of(source: str) -> str:
    """Return what the names of the validation metrics of a data source begin with: `val/<source>`.

    White space, control characters, and empty or dotted folders become `_`: trackers and files take names as paths.
    """
    parts = [re.sub(r"[\s\x00-\x1f\x7f]+", "_", part.strip()) for part in source.split("/")]
    return "/".join(["val", *("_" if part in ("", ".", "..") else part for part in parts)])
