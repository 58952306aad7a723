import math

import pytest
import torch

from hrl.algos.rollout_correction import (
    REJECTION_RULES,
    Interval,
    effective_sample_size,
    importance_weights,
    mismatch_metrics,
    rejection_mask,
)
from tests.algos.batches import Batch

RATIOS = torch.tensor([[0.4, 0.8, 6.0]], dtype=torch.float64)
ONES = torch.ones(1, 3, dtype=torch.int64)


def test_icepop_drops_ratios_outside_the_interval() -> None:
    weights = importance_weights(RATIOS.log(), ONES, "token", Interval(lower=0.5, upper=5.0))
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.8, 0.0]], dtype=torch.float64))
    assert effective_sample_size(weights, ONES) == pytest.approx(1 / 3)


def test_truncation_cuts_ratios_down() -> None:
    weights = importance_weights(RATIOS.log(), ONES, "token", Interval(upper=2.0))
    torch.testing.assert_close(weights, torch.tensor([[0.4, 0.8, 2.0]], dtype=torch.float64))


def test_sequence_weights_are_products_over_trained_tokens() -> None:
    log_ratio = torch.tensor([[0.5, 0.2, 99.0], [math.nan, math.nan, math.nan]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    weights = importance_weights(log_ratio, mask, "sequence", Interval(upper=10.0))
    torch.testing.assert_close(weights, torch.tensor([[math.exp(0.7), math.exp(0.7), 0.0], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_have_mean_one(level) -> None:
    batch = Batch.random()
    log_ratio = batch.log_prob - batch.old_log_prob
    weights = importance_weights(log_ratio, batch.mask, level, Interval(upper=1.5), normalise=True)
    rows = batch.mask.any(dim=1)
    units = weights[batch.mask.bool()] if level == "token" else weights[rows].amax(dim=1)
    assert units.mean().item() == pytest.approx(1.0)
    nothing = importance_weights(log_ratio, batch.mask * 0, level, Interval(upper=1.5), normalise=True)
    assert (nothing == 0).all()


def test_weights_have_no_gradient() -> None:
    log_ratio = torch.zeros(1, 2, requires_grad=True)
    assert not importance_weights(log_ratio, torch.ones(1, 2), "token", Interval(2.0)).requires_grad


def test_effective_sample_size() -> None:
    assert effective_sample_size(torch.ones(2, 2), torch.ones(2, 2)) == pytest.approx(1.0)
    assert effective_sample_size(torch.ones(2, 2), torch.zeros(2, 2)) == 0.0
    assert effective_sample_size(torch.zeros(2, 2), torch.ones(2, 2)) == 0.0


LOG_RATIO = torch.tensor([[0.1, -0.1, 0.0], [1.0, 0.0, -1.0], [0.0, 0.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]])
K3_UP, K3_DOWN = math.e - 2.0, 1 / math.e


@pytest.mark.parametrize(
    ("rule", "threshold", "kept"),
    [
        ("token_k1", "0.5_2.0", [[1, 1, 1], [0, 1, 0], [1, 1, 0]]),
        ("token_k1", "0.5_3.0", [[1, 1, 1], [0, 1, 1], [1, 1, 0]]),
        ("token_k1", 2.0, [[1, 1, 1], [0, 1, 0], [1, 1, 0]]),
        ("token_k2", 0.4, [[1, 1, 1], [0, 1, 0], [1, 1, 0]]),
        ("token_k3", (K3_UP + K3_DOWN) / 2, [[1, 1, 1], [0, 1, 1], [1, 1, 0]]),
        ("seq_sum_k1", "0.9_1.1", [[1, 1, 1], [1, 1, 1], [1, 1, 0]]),
        ("seq_sum_k2", 0.9, [[1, 1, 1], [0, 0, 0], [1, 1, 0]]),
        ("seq_mean_k2", 0.34, [[1, 1, 1], [1, 1, 1], [1, 1, 0]]),
        ("seq_mean_k2", 0.33, [[1, 1, 1], [0, 0, 0], [1, 1, 0]]),
        ("seq_sum_k3", K3_UP + K3_DOWN - 1e-9, [[1, 1, 1], [0, 0, 0], [1, 1, 0]]),
        ("seq_max_k3", K3_UP - 1e-9, [[1, 1, 1], [0, 0, 0], [1, 1, 0]]),
        ("seq_max_k2", 0.5, [[1, 1, 1], [1, 1, 1], [1, 1, 0]]),
    ],
)
def test_rejection_by_hand(rule: str, threshold: float | str, kept: list[list[int]]) -> None:
    got = rejection_mask(LOG_RATIO, MASK, rule, threshold)
    assert got.tolist() == kept
    assert got.dtype == MASK.dtype


@pytest.mark.parametrize("rule", sorted(REJECTION_RULES))
def test_equal_probabilities_are_never_rejected(rule: str) -> None:
    batch = Batch.random()
    assert torch.equal(rejection_mask(torch.zeros_like(batch.values), batch.mask, rule, 1.0), batch.mask)


def test_mismatch_metrics_by_hand() -> None:
    trainer = torch.tensor([[0.0, math.log(2.0), 7.0]], dtype=torch.float64)
    metrics = mismatch_metrics(trainer, torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[1, 1, 0]]))
    assert metrics == {
        "logprob_diff_mean": pytest.approx(math.log(2.0) / 2),
        "logprob_diff_p99": pytest.approx(math.log(2.0)),
        "logprob_diff_max": pytest.approx(math.log(2.0)),
        "kl_k1": pytest.approx(-math.log(2.0) / 2),
        "kl_k3": pytest.approx((1.0 - math.log(2.0)) / 2),
        "chi2": pytest.approx((1.0 + 4.0) / 2 - 1.0),
        "eff_sample_size": pytest.approx(9.0 / (2 * 5.0)),
    }
    assert mismatch_metrics(trainer, trainer, torch.zeros(1, 3)) == {}


def test_intervals() -> None:
    assert Interval.parse(2) == Interval.parse("2.0") == Interval(upper=2.0)
    assert Interval.parse("0.5_5") == Interval(lower=0.5, upper=5.0)
    for text in ("", "a", "1_2_3", "2.0_1.0", "-1", "0_1", "inf"):
        with pytest.raises(ValueError, match="ratio"):
            Interval.parse(text)


def test_bad_rules_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'token_k4'.*token_k3"):
        rejection_mask(LOG_RATIO, MASK, "token_k4", 1.0)
    with pytest.raises(ValueError, match="one upper bound"):
        rejection_mask(LOG_RATIO, MASK, "token_k3", "0.1_1.0")
    with pytest.raises(ValueError, match="'row'"):
        importance_weights(LOG_RATIO, MASK, "row", Interval(1.0))
