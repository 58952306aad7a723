import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.metrics import Metric, StepMetrics, source_and_metric


def merged(*metrics):
    """One metric out of several of a name."""
    step = StepMetrics()
    step.observe(*({"x": metric} for metric in metrics))
    return step._observed["x"]


def test_a_mean_is_the_sum_over_everything_divided_by_its_count_not_a_mean_of_means():
    # 3 tokens that add up to 6 and 1 token of 10: the mean is 16 / 4, the mean of means would be 6.
    assert Metric.mean(6.0, 3).merge(Metric.mean(10.0, 1)).result() == 4.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-1000, 1000), st.integers(0, 50)), min_size=2), st.integers(1, 5))
def test_a_mean_does_not_depend_on_how_it_was_cut(parts, cut):
    whole = merged(*[Metric.mean(s, c) for s, c in parts])
    chunks = [parts[i : i + cut] for i in range(0, len(parts), cut)]
    assert merged(*[Metric.mean(sum(s for s, _ in chunk), sum(c for _, c in chunk)) for chunk in chunks]) == whole


@pytest.mark.parametrize(("make", "expected"), [(Metric.total, 6.0), (Metric.max, 3.0), (Metric.last, 2.0)])
def test_each_kind_is_merged_its_own_way(make, expected):
    assert merged(make(1), make(3), make(2)).result() == expected


@pytest.mark.parametrize("make", [Metric.total, Metric.max, lambda x: Metric.mean(x, 1)])
@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_nan_is_not_lost_in_a_merge(make, values):
    assert math.isnan(merged(*[make(v) for v in values]).result())


def test_names_that_only_some_ranks_have_are_kept():
    metrics = StepMetrics()
    metrics.observe({"a": Metric.max(1)}, {"b": Metric.max(2)}, {"a": Metric.max(3)})
    assert metrics == {"a": 3.0, "b": 2.0}


def test_there_is_no_mean_of_nothing():
    with pytest.raises(ValueError, match="mean of nothing"):
        Metric.mean(0, 0).result()


def test_mixed_kinds_are_refused_by_name():
    with pytest.raises(ValueError, match="'loss' mixes kinds: max, mean"):
        StepMetrics().observe({"loss": Metric.max(1)}, {"loss": Metric.mean(1, 1)})


def test_a_metric_that_makes_no_sense_cannot_be_made():
    with pytest.raises(ValueError, match="unknown metric kind 'median'"):
        Metric("median", 1.0)
    with pytest.raises(ValueError, match="count"):
        Metric.mean(1.0, -1)


def test_what_a_step_observes_twice_is_merged_by_its_kind() -> None:
    metrics = StepMetrics()
    metrics.observe({"length": Metric.mean(6, 2), "cut": Metric.total(3), "longest": Metric.max(4)})
    metrics.observe({"length": Metric.mean(1, 1), "cut": Metric.total(4), "longest": Metric.max(3)})
    metrics.observe({"none": Metric.mean(0, 0)})
    assert metrics == {"length": 7 / 3, "cut": 7.0, "longest": 4.0}
    metrics["length"] = 1.0
    metrics.observe({"none": Metric.mean(2, 1)})
    assert metrics == {"length": 1.0, "cut": 7.0, "longest": 4.0, "none": 2.0}
    with pytest.raises(ValueError, match="'cut'"):
        metrics.observe({"cut": Metric.max(1)})


def test_a_source_of_a_validation_is_told_from_a_part_by_its_number_of_prompts():
    names = ["val/a/b/n", "val/a/n", "val/a/b/x/y/mean@1", "val/a/pass@2", "val/rollout/truncated_responses"]
    found = [source_and_metric(name, names) for name in names[2:]]
    assert found == [("a/b", "x/y/mean@1"), ("a", "pass@2"), ("", "rollout/truncated_responses")]
