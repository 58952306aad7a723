"""How far the sampler's log-probs are from the trainer's, for updates and forward passes alike."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hrl.algos.rollout_correction import mismatch
from hrl.metrics import Meter, SpreadNames

DIFFERENCE = SpreadNames("rollout/logprob_diff_mean", "rollout/logprob_diff_p99", "rollout/logprob_diff_max")


def measure_difference(meter: Meter, trainer: Tensor, sampler: Tensor, of_tokens: Callable[[Tensor], Tensor]) -> None:
    """Add the absolute difference of both log-probs per token: its mean, 99th percentile and maximum.

    Args:
        meter: Takes the metrics.
        trainer: `(B, R)`.
        sampler: `(B, R)`.
        of_tokens: From `(B, R)` to the entries of trained tokens `(N,)`. On a GPU it must not wait for the device, as
            an index by a mask would.
    """
    meter.add_spread(DIFFERENCE, of_tokens(trainer.detach() - sampler).abs())


def measure_mismatch(
    meter: Meter, trainer: Tensor, sampler: Tensor, mask: Tensor, of_tokens: Callable[[Tensor], Tensor]
) -> None:
    """Do as `measure_difference`, and add the divergences and perplexities of `rollout_correction.mismatch`.

    Args:
        meter: Takes the metrics.
        trainer: `(B, R)`.
        sampler: `(B, R)`.
        mask: `(B, R)`, set at trained tokens.
        of_tokens: As there.
    """
    measure_difference(meter, trainer, sampler, of_tokens)
    meter.add_all(mismatch(trainer, sampler, mask))
