"""Metrics with a kind that determines how they are merged; a mean has its sum and count."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, SupportsFloat, get_args

MetricKind = Literal["mean", "sum", "max", "min", "last"]


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
    def min(cls, value: SupportsFloat) -> Metric:
        """Return a number whose minimum is kept."""
        return cls("min", float(value))

    @classmethod
    def last(cls, value: SupportsFloat) -> Metric:
        """Return a number whose latest value is kept, such as a learning rate."""
        return cls("last", float(value))

    @property
    def is_empty(self) -> bool:
        """True when nothing was observed: there is no mean of no tokens."""
        return self.kind == "mean" and self.count == 0

    def merge(self, other: Metric) -> Metric:
        """Return both observations as one; `other` is the later of the two.

        Raises:
            ValueError: The two are of different kinds.
        """
        if other.kind != self.kind:
            raise ValueError(f"cannot merge a metric of kind {self.kind!r} with one of kind {other.kind!r}")
        return Metric(self.kind, _MERGE[self.kind](self.value, other.value), self.count + other.count)

    def result(self) -> float:
        """Return the reduced number.

        Raises:
            ValueError: It is a mean of nothing (`is_empty`).
        """
        if self.is_empty:
            raise ValueError("the mean of nothing has no value; leave the metric out (see Metric.is_empty)")
        return self.value / self.count if self.kind == "mean" else self.value


def _keep_nan(pick: Callable[[float, float], float]) -> Callable[[float, float], float]:
    """Make `max` and `min` pass a NaN on from either side: a lost number must not hide behind a good one."""
    return lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else pick(a, b)


_MERGE: dict[str, Callable[[float, float], float]] = {
    "mean": lambda a, b: a + b,
    "sum": lambda a, b: a + b,
    "max": _keep_nan(max),
    "min": _keep_nan(min),
    "last": lambda a, b: b,
}


def merge_metrics(observations: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the observations of ranks, micro-batches or phases by name, the earliest first.

    Raises:
        ValueError: Two observations of a name are of different kinds; names it.
    """
    merged: dict[str, Metric] = {}
    for metrics in observations:
        for name, metric in metrics.items():
            earlier = merged.get(name)
            if earlier is not None and earlier.kind != metric.kind:
                raise ValueError(f"metric {name!r} mixes kinds: {earlier.kind}, {metric.kind}")
            merged[name] = metric if earlier is None else earlier.merge(metric)
    return merged


class StepMetrics(dict[str, float]):
    """The numbers of a step by name. What is observed more than once is merged by its kind; assignment replaces."""

    def __init__(self) -> None:
        super().__init__()
        self._observed: dict[str, Metric] = {}

    def observe(self, metrics: Mapping[str, Metric]) -> None:
        """Add observations. A name without any observation is absent rather than NaN.

        Raises:
            ValueError: Two observations of a name are of different kinds; names it.
        """
        self._observed = merge_metrics([self._observed, metrics])
        found = {name: self._observed[name] for name in metrics}
        self.update({name: metric.result() for name, metric in found.items() if not metric.is_empty})
