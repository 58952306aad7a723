"""Numbers that know how they are reduced: every metric carries its kind, a mean carries (sum, count)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, SupportsFloat, get_args

MetricKind = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True)
class Metric:
    """One observation, or several already merged.

    The kind belongs to the number and not to its name, so that a mean over micro-batches, ranks and steps is the mean
    over all tokens (or rows), however they were cut.

    Attributes:
        kind: How two observations become one.
        value: The sum for `"mean"` and `"sum"`, otherwise the number itself.
        count: For `"mean"`, how many things were summed; 0 says that nothing was observed.
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
        """Return a number of which the largest is kept."""
        return cls("max", float(value))

    @classmethod
    def min(cls, value: SupportsFloat) -> Metric:
        """Return a number of which the smallest is kept."""
        return cls("min", float(value))

    @classmethod
    def last(cls, value: SupportsFloat) -> Metric:
        """Return a number of which the latest is kept, such as a learning rate."""
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


def reduce_metrics(metrics: Mapping[str, Metric | Sequence[Metric | float] | float]) -> dict[str, float]:
    """Reduce the metrics of many micro-batches and ranks to one float per name.

    Args:
        metrics: Per name one `Metric`, one number, or a list of either. Metrics are merged by their kind, plain numbers
            are averaged.

    Returns:
        Per name the number. A name that saw nothing (an empty list, a mean of count 0) is absent rather than NaN.

    Raises:
        ValueError: A name holds metrics of different kinds, or metrics beside plain numbers.
        TypeError: A name holds something that is no number.
    """
    reduced: dict[str, float] = {}
    for name, value in metrics.items():
        merged = _merge_all(name, [value] if isinstance(value, Metric | SupportsFloat) else value)
        if merged is not None and not merged.is_empty:
            reduced[name] = merged.result()
    return reduced


def merge_metrics(observations: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge what several ranks have measured, by name; the order of ranks is that of time.

    Raises:
        ValueError: Two observations of a name are of different kinds.
    """
    merged: dict[str, Metric] = {}
    for metrics in observations:
        for name, metric in metrics.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


class StepMetrics(dict[str, float]):
    """The numbers of a step by name. What is observed more than once is merged by its kind; assignment replaces."""

    def __init__(self) -> None:
        super().__init__()
        self._observed: dict[str, Metric] = {}

    def observe(self, metrics: Mapping[str, Metric | Sequence[Metric]]) -> None:
        """Take metrics in. A name that saw nothing yet is absent rather than NaN.

        Raises:
            ValueError: Two observations of a name are of different kinds.
        """
        for name, value in metrics.items():
            earlier = [self._observed[name]] if name in self._observed else []
            merged = _merge_all(name, [*earlier, *([value] if isinstance(value, Metric) else value)])
            if merged is None:
                continue
            self._observed[name] = merged
            if not merged.is_empty:
                self[name] = merged.result()


def _merge_all(name: str, values: Sequence[Metric | float]) -> Metric | None:
    """Merge the observations of one name, or return None when there are none."""
    kinds = {value.kind if isinstance(value, Metric) else "plain number" for value in values}
    if len(kinds) > 1:
        raise ValueError(f"metric {name!r} mixes kinds: {', '.join(sorted(kinds))}")
    merged: Metric | None = None
    for value in values:
        metric = value if isinstance(value, Metric) else Metric.mean(_as_float(name, value), 1)
        merged = metric if merged is None else merged.merge(metric)
    return merged


def _as_float(name: str, value: SupportsFloat) -> float:
    # float() would parse text: "nan" or "1" arriving here is a mistake of the sender, not a number.
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        raise TypeError(f"metric {name!r} holds {value!r} of type {type(value).__name__}, which is no number")
    return float(value)
