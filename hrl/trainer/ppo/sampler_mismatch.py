"""The sampler's probabilities are not quite the trainer's: how far apart they are, and what is done about it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import torch
from torch import Tensor

from hrl.algos.episodes import FoldedEpisodes
from hrl.algos.reward_placement import move_scores
from hrl.algos.rollout_correction import correct, effective_share
from hrl.batching.episodes import episode_numbers
from hrl.config.algorithm import RolloutCorrectionConfig
from hrl.metrics import Meter, Metric
from hrl.protocol import DataProto
from hrl.workers.mismatch import measure_mismatch

SPOT_CHECK_ROWS = 16
"""At least this many rows of a step are compared with the sampler, if it has as many with a trained token."""


def sampler_drift(trainer: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Return how far the trainer's log-probs of the sampled tokens are from the sampler's.

    Args:
        trainer: `(B, R)`.
        sampler: `(B, R)`.
        mask: `(B, R)`, set at trained tokens.

    Returns:
        What `measure_mismatch` measures, and the number of rows that it stands for; nothing without a trained token.
    """
    tokens = mask.bool()
    if not tokens.any():
        return {}
    meter = Meter()
    measure_mismatch(meter, trainer, sampler, mask, lambda column: column[tokens])
    return {**meter.metrics(), "rollout/logprob_diff_rows": Metric.total(tokens.any(-1).sum())}


def spot_check(batch: DataProto, compared: Collection[int]) -> np.ndarray:
    """Return the rows to compare with the sampler besides those that are compared anyway.

    An update runs no row that cannot move a weight. When none can, because every reward is equal, that may be *since*
    the sampler has the wrong weights: so the comparison must not depend on rewards.

    Args:
        batch: With `response_mask (B, R)`.
        compared: Rows that the update compares.

    Returns:
        Evenly spaced other rows with a trained token that bring the total to `SPOT_CHECK_ROWS`, or all there are.
    """
    has_tokens = batch.batch["response_mask"].bool().any(-1).numpy()
    is_compared = np.isin(np.arange(len(batch)), list(compared))
    others = np.flatnonzero(has_tokens & ~is_compared)
    lacking = SPOT_CHECK_ROWS - int((has_tokens & is_compared).sum())
    count = min(max(lacking, 0), len(others))
    return others[np.arange(count) * len(others) // max(count, 1)]


def correct_for_sampler(batch: DataProto, settings: RolloutCorrectionConfig) -> tuple[DataProto, dict[str, Metric]]:
    """Weigh and reject by the ratio of trainer to sampler, once over the whole batch.

    What is rejected leaves `response_mask`: it trains nothing, and a sequence that leaves whole has no part in its
    group. A score that stood on a rejected token moves to the last one before it that is left. An episode of several
    rows is one sequence.

    Args:
        batch: `old_log_probs` as the trainer computed them, `rollout_log_probs`, `response_mask` and, of what is
            scored, `token_level_scores`, `(B, R)` each.
        settings: `algorithm.rollout_correction`.

    Returns:
        The batch, with `rollout_is_weights (B, R)` where weights are on; and metrics `rollout_corr/rollout_*`.
    """
    columns = batch.batch
    fold, unfold = _to_sequences_and_back(batch)
    mask = fold(columns["response_mask"])
    weights, kept, metrics = correct(fold(columns["old_log_probs"] - columns["rollout_log_probs"]), mask, settings)
    if weights is not None:
        columns["rollout_is_weights"] = unfold(weights)
    if not torch.equal(kept, mask):
        if "token_level_scores" in columns:  # not where a teacher alone is learnt from
            columns["token_level_scores"] = unfold(move_scores(fold(columns["token_level_scores"]), kept))
        columns["response_mask"] = unfold(kept)
    return batch, {name: Metric.mean(*pair) for name, pair in metrics.items()}


_Reshape = Callable[[Tensor], Tensor]


def _to_sequences_and_back(batch: DataProto) -> tuple[_Reshape, _Reshape]:
    """Return how a column of tokens gets one row for each episode, and back; as it is where each row is one."""
    columns, episodes = batch.batch, episode_numbers(batch)
    if episodes is None or not columns["response_mask"].any():
        return (lambda column: column), (lambda column: column)
    turns = columns.get("turn_index", None)
    episodes_of = FoldedEpisodes.of(columns["response_mask"], torch.from_numpy(episodes), turns)
    return episodes_of.tokens, episodes_of.unfold


def with_sample_sizes(metrics: dict[str, float]) -> None:
    """Add, in place, the effective sample sizes of the batch as it was sampled and as it is weighed."""
    ratio, mean = metrics.pop("rollout_corr/ratio", None), metrics.get("rollout_corr/rollout_is_mean")
    if ratio is not None:
        second_moment = metrics["rollout_corr/chi2_token"] + 1.0
        metrics["rollout_corr/eff_sample_size"] = effective_share(ratio, second_moment)
    if mean is not None:
        square = metrics.pop("rollout_corr/rollout_is_mean_square")
        metrics["rollout_corr/rollout_is_eff_sample_size"] = effective_share(mean, square)


def is_apart(drift: float, limit: float) -> bool:
    """Return whether a mean absolute difference of log-probs is above the limit; NaN is."""
    return not drift <= limit


class DriftGate:
    """Decides whether the next step may take the sampler's log-probs in place of the trainer's.

    It judges by the last difference that was measured. While it is open, the update measures it, which has the
    trainer's log-probs of the weights that sampled (and `spot_check` for the rows that the update does not run). While
    it is closed, the forward pass for the old log-probs does. So it moves one step late, and opens again when the two
    agree.

    Args:
        limit: The largest mean absolute difference of log-probs.

    Attributes:
        is_closed: Whether the trainer computes the old log-probs.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.is_closed = False

    def judge(self, drift: float | None) -> str | None:
        """Take the step's mean absolute difference, and return what to tell the user if the gate moves.

        Without a measurement (`None`: no sample had a trained token) it stays where it is. NaN is no agreement.
        """
        if drift is None or is_apart(drift, self.limit) == self.is_closed:
            return None
        self.is_closed = not self.is_closed
        if self.is_closed:
            return (
                f"bypass mode: sampler and trainer differ by {drift:.3f} per token, above "
                f"{self.limit:g} (alarm sampler_gap): old log-probs are computed again until they agree"
            )
        return (
            f"bypass mode: sampler and trainer differ by {drift:.3f} per token: the sampler's log-probs are taken again"
        )
