import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hrl.algos.ratio_bounds import REJECTION_RULES, Interval, parse_rejections
from hrl.algos.rollout_correction import (
    correct,
    effective_share,
    importance_weights,
    mismatch,
    rejection_mask,
)
from tests.algos.batches import Batch

RATIOS = torch.tensor([[0.4, 0.8, 6.0]], dtype=torch.float64)
ONES = torch.ones(1, 3, dtype=torch.int64)


def test_icepop_drops_ratios_outside_the_interval() -> None:
    weights = importance_weights(RATIOS.log(), ONES, "token", Interval(lower=0.5, upper=5.0))
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.8, 0.0]], dtype=torch.float64))


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


def test_effective_share() -> None:
    assert effective_share(mean=1.0, mean_square=1.0) == 1.0
    assert effective_share(mean=0.6, mean_square=0.4) == pytest.approx(1.2**2 / (2 * 0.8))  # of weights 0.4 and 0.8
    assert effective_share(mean=0.0, mean_square=0.0) == 0.0


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


def means(metrics: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    return {name: float(total / count) for name, (total, count) in metrics.items()}


def test_mismatch_by_hand() -> None:
    log2 = math.log(2.0)
    trainer = torch.tensor([[0.0, log2, 7.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    got = means(mismatch(trainer, torch.zeros_like(trainer), mask))
    assert got == {
        "rollout_corr/kl": pytest.approx(-log2 / 2),
        "rollout_corr/k3_kl": pytest.approx((1.0 - log2) / 2),
        "rollout_corr/ratio": pytest.approx((1.0 + 2.0) / 2),
        "rollout_corr/chi2_token": pytest.approx((1.0 + 4.0) / 2 - 1.0),
        "rollout_corr/training_ppl": pytest.approx(2**-0.5),
        "rollout_corr/rollout_ppl": pytest.approx(1.0),
        "rollout_corr/ppl_ratio": pytest.approx(2**-0.5),
        "rollout_corr/log_ppl_diff": pytest.approx(-log2 / 2),
        "rollout_corr/log_ppl_abs_diff": pytest.approx(log2 / 2),
    }
    assert effective_share(got["rollout_corr/ratio"], got["rollout_corr/chi2_token"] + 1.0) == pytest.approx(
        9.0 / (2 * 5.0)
    )
    assert {float(count) for _, count in mismatch(trainer, trainer, mask * 0).values()} == {0.0}


def settings(**changes: Any) -> SimpleNamespace:
    base: dict[str, Any] = {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
    }
    return SimpleNamespace(**base | changes)


def test_without_settings_nothing_is_corrected() -> None:
    weights, kept, metrics = correct(LOG_RATIO, MASK, settings())
    assert weights is None and kept is MASK and metrics == {}


def test_weights_and_their_effective_sample_size() -> None:
    weights, kept, metrics = correct(RATIOS.log(), ONES, settings(rollout_is="token", rollout_is_threshold="0.5_5.0"))
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.8, 0.0]], dtype=torch.float64))
    assert torch.equal(kept, ONES)  # IcePop gives tokens no weight, it does not take them out of the batch
    got = means(metrics)
    assert (
        got["rollout_corr/rollout_is_ratio_fraction_high"]
        == got["rollout_corr/rollout_is_ratio_fraction_low"]
        == pytest.approx(1 / 3)
    )
    share = effective_share(got["rollout_corr/rollout_is_mean"], got["rollout_corr/rollout_is_mean_square"])
    assert share == pytest.approx(1 / 3)


def test_a_token_stays_where_every_rule_keeps_it() -> None:
    turned = settings(rollout_rs="seq_max_k2,token_k1", rollout_rs_threshold="0.4,0.5_3.0")
    chosen = settings(rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold="0.5_3.0,0.4")
    _, kept, metrics = correct(LOG_RATIO, MASK, chosen)
    assert torch.equal(correct(LOG_RATIO, MASK, turned)[1], kept)
    assert kept.tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 0]]
    assert means(metrics) == {
        "rollout_corr/rollout_rs_token_k1_masked_fraction": pytest.approx(1 / 8),
        "rollout_corr/rollout_rs_token_k1_seq_masked_fraction": pytest.approx(1 / 3),
        "rollout_corr/rollout_rs_seq_max_k2_masked_fraction": pytest.approx(3 / 8),
        "rollout_corr/rollout_rs_seq_max_k2_seq_masked_fraction": pytest.approx(1 / 3),
        "rollout_corr/rollout_rs_masked_fraction": pytest.approx(3 / 8),
        "rollout_corr/rollout_rs_seq_masked_fraction": pytest.approx(1 / 3),
    }


def test_metrics_do_not_depend_on_how_a_batch_is_cut() -> None:
    batch = Batch.random()
    chosen = settings(rollout_is="sequence", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.05)

    def all_metrics(rows: slice) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        new, old, mask = batch.log_prob[rows], batch.old_log_prob[rows], batch.mask[rows]
        return correct(new - old, mask, chosen)[2] | mismatch(new, old, mask)

    whole = all_metrics(slice(None))
    parts = [all_metrics(slice(start, start + 3)) for start in (0, 3, 6)]
    joined = {name: tuple(sum(part[name][i] for part in parts) for i in (0, 1)) for name in whole}
    assert means(joined) == pytest.approx(means(whole))


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


def test_rules_and_thresholds_as_they_are_written() -> None:
    assert parse_rejections(None, None) == ()
    assert parse_rejections("token_k1, seq_max_k3", "0.5_2.0,0.1") == (("token_k1", "0.5_2.0"), ("seq_max_k3", "0.1"))
    assert parse_rejections("token_k2,seq_sum_k2,token_k2", 0.3) == (("token_k2", "0.3"), ("seq_sum_k2", "0.3"))
    for rules, thresholds in (("token_k1", None), ("token_k1,token_k2", "1,2,3"), ("token_k3", "0.1_1.0"), ("k", 1)):
        with pytest.raises(ValueError, match=r"threshold|one upper bound|unknown"):
            parse_rejections(rules, thresholds)
