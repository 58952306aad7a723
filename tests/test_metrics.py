import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.metrics import Metric, StepMetrics, reduce_metrics


def test_a_mean_is_the_sum_over_everything_divided_by_its_count_not_a_mean_of_means():
    # 3 tokens that add up to 6 and 1 token of 10: the mean is 16 / 4, the mean of means would be 6.
    assert Metric.mean(6.0, 3).merge(Metric.mean(10.0, 1)).result() == 4.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-1000, 1000), st.integers(0, 50)), min_size=2), st.integers(1, 5))
def test_a_mean_does_not_depend_on_how_it_was_cut(parts, cut):
    whole = reduce_metrics({"loss": [Metric.mean(s, c) for s, c in parts]})
    chunks = [parts[i : i + cut] for i in range(0, len(parts), cut)]
    merged = [Metric.mean(sum(s for s, _ in chunk), sum(c for _, c in chunk)) for chunk in chunks]
    assert reduce_metrics({"loss": merged}) == whole


@pytest.mark.parametrize(
    ("make", "expected"), [(Metric.total, 6.0), (Metric.max, 3.0), (Metric.min, 1.0), (Metric.last, 2.0)]
)
def test_each_kind_is_reduced_its_own_way(make, expected):
    assert reduce_metrics({"x": [make(1), make(3), make(2)]}) == {"x": expected}


@pytest.mark.parametrize("make", [Metric.total, Metric.max, Metric.min, lambda x: Metric.mean(x, 1)])
@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_nan_is_not_lost_in_a_reduction(make, values):
    assert math.isnan(reduce_metrics({"x": [make(v) for v in values]})["x"])


def test_plain_numbers_are_averaged_whatever_holds_them():
    reduced = reduce_metrics({"a": [1, 2.0, np.float32(3)], "b": torch.tensor(4.0), "c": 5})
    assert reduced == {"a": 2.0, "b": 4.0, "c": 5.0}


def test_what_saw_nothing_is_absent():
    assert reduce_metrics({"none": [], "empty": Metric.mean(0, 0), "seen": [Metric.mean(0, 0), Metric.mean(2, 1)]}) == {
        "seen": 2.0
    }
    with pytest.raises(ValueError, match="mean of nothing"):
        Metric.mean(0, 0).result()


def test_mixed_kinds_are_refused_by_name():
    with pytest.raises(ValueError, match="'loss' mixes kinds: max, mean"):
        reduce_metrics({"loss": [Metric.max(1), Metric.mean(1, 1)]})
    with pytest.raises(ValueError, match="'loss' mixes kinds: mean, plain number"):
        reduce_metrics({"loss": [Metric.mean(1, 1), 2.0]})
    with pytest.raises(ValueError, match="cannot merge"):
        Metric.max(1).merge(Metric.min(1))


@pytest.mark.parametrize("bad", ["1.0", ["nan"], [None]])
def test_what_is_no_number_is_refused_by_name(bad):
    with pytest.raises(TypeError, match="'loss'"):
        reduce_metrics({"loss": bad})


def test_a_metric_that_makes_no_sense_cannot_be_made():
    with pytest.raises(ValueError, match="unknown metric kind 'median'"):
        Metric("median", 1.0)
    with pytest.raises(ValueError, match="count"):
        Metric.mean(1.0, -1)


def test_what_a_step_observes_twice_is_merged_by_its_kind() -> None:
    metrics = StepMetrics()
    metrics.observe({"length": Metric.mean(6, 2), "cut": [Metric.total(1), Metric.total(2)], "longest": Metric.max(4)})
    metrics.observe({"length": Metric.mean(1, 1), "cut": Metric.total(4), "longest": Metric.max(3)})
    metrics.observe({"none": Metric.mean(0, 0), "never": []})
    assert metrics == {"length": 7 / 3, "cut": 7.0, "longest": 4.0}
    metrics["length"] = 1.0
    assert metrics["length"] == 1.0
    with pytest.raises(ValueError, match="'cut'"):
        metrics.observe({"cut": Metric.max(1)})
