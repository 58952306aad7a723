"""Aggregate a loss per token to one number, independent of the split into micro-batches and ranks.

A loss function returns a matrix `(B, R)`. `aggregate` sums it up, weighted as a mode says, and divides by the counts of
the *whole mini-batch over all ranks*, never by those of a piece. The sum over micro-batches and ranks is the
mini-batch's loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hrl.algos.masked import check_shapes, keep, rows_with_tokens
from hrl.algos.registry import AGGREGATION_NAMES, Registry, Traits


@dataclass(frozen=True)
class Counts:
    """The counts of a whole mini-batch, over all its micro-batches and ranks.

    Attributes:
        tokens: Trained tokens.
        sequences: Rows with at least one trained token; an episode of several rows is one.
        groups: Distinct groups among those rows.
    """

    tokens: float
    sequences: float
    groups: float = 0.0

    @classmethod
    def of(cls, mask: Tensor, group_ids: Tensor | None = None) -> Counts:
        """Count a batch that is a whole mini-batch, with `mask (B, R)` and integer `group_ids (B,)`."""
        rows = rows_with_tokens(mask)
        groups = 0 if group_ids is None else group_ids[rows].unique().numel()
        return cls(tokens=float(mask.bool().sum()), sequences=float(rows.sum()), groups=float(groups))


def _token_mean(row_sums: Tensor, row_tokens: Tensor, counts: Counts, norm: float | None) -> Tensor:
    """`sum_it l_it / T`: every token weighs the same (DAPO, arXiv:2503.14476 equation 12)."""
    return row_sums.sum() / max(counts.tokens, 1.0)


def _token_sum(row_sums: Tensor, row_tokens: Tensor, counts: Counts, norm: float | None) -> Tensor:
    """`sum_it l_it`: no divisor; the step grows with the batch."""
    return row_sums.sum()


def _seq_mean_token_sum(row_sums: Tensor, row_tokens: Tensor, counts: Counts, norm: float | None) -> Tensor:
    """`sum_it l_it / S`: the likelihood of whole responses.

    As REINFORCE has it: arXiv:2402.14740, section "REINFORCE Leave-One-Out (RLOO)".
    """
    return row_sums.sum() / max(counts.sequences, 1.0)


def _seq_mean_token_mean(row_sums: Tensor, row_tokens: Tensor, counts: Counts, norm: float | None) -> Tensor:
    """`sum_i (sum_t l_it / |y_i|) / S`: every response weighs the same (GRPO, arXiv:2402.03300 equation 3)."""
    return (row_sums / row_tokens.clamp(min=1)).sum() / max(counts.sequences, 1.0)


def _seq_mean_token_sum_norm(row_sums: Tensor, row_tokens: Tensor, counts: Counts, norm: float | None) -> Tensor:
    """`sum_it l_it / S / norm`: no length bias, a constant divisor (Dr.GRPO, arXiv:2503.20783 section 3.2)."""
    if norm is None or norm <= 0:
        raise ValueError(
            f"loss_agg_mode='seq-mean-token-sum-norm' divides by a constant and got {norm}; set loss_scale_factor to "
            "a positive number (Dr.GRPO: the maximum response length)"
        )
    return row_sums.sum() / max(counts.sequences, 1.0) / norm


Aggregation = Callable[[Tensor, Tensor, Counts, float | None], Tensor]

AGGREGATION_MODES: Registry[Aggregation, Traits] = Registry(
    "loss_agg_mode",
    {
        "token-mean": _token_mean,
        "token-sum": _token_sum,
        "seq-mean-token-sum": _seq_mean_token_sum,
        "seq-mean-token-mean": _seq_mean_token_mean,
        "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
    },
    table=AGGREGATION_NAMES,
)
"""From per-row sums `(B,)`, per-row token counts `(B,)`, global counts and a constant to a scalar. In formulas T and S
are the numbers of tokens and sequences of the whole mini-batch over all ranks."""


def aggregate(
    loss_mat: Tensor,
    mask: Tensor,
    mode: str,
    counts: Counts | None = None,
    norm: float | None = None,
    row_tokens: Tensor | None = None,
) -> Tensor:
    """Return this piece's share of the mini-batch's loss.

    Args:
        loss_mat: Loss per token `(B, R)`. Entries outside the mask are ignored, whatever they are.
        mask: `(B, R)`, 1 on trained tokens. Rows without trained tokens are not counted as sequences.
        mode: A key of `AGGREGATION_MODES`.
        counts: Counts of the whole mini-batch over all ranks; None when this is the whole mini-batch.
        norm: The constant divisor of `seq-mean-token-sum-norm` (Dr.GRPO, arXiv:2503.20783).
        row_tokens: `(B,)`, the trained tokens of each row's episode, where an episode has several rows: the sequence
            whose tokens `seq-mean-token-mean` takes the mean of is the episode. None counts those of the row.

    Returns:
        A scalar. Over a mini-batch without trained tokens it is 0.

    Raises:
        ValueError: Unknown mode, shapes that differ, or a missing `norm`.
    """
    aggregation = AGGREGATION_MODES.find(mode)
    check_shapes(mask, loss_mat=loss_mat)
    row_sums = keep(loss_mat, mask).sum(dim=-1)
    row_tokens = (mask.bool().sum(dim=-1) if row_tokens is None else row_tokens).to(loss_mat.dtype)
    return aggregation(row_sums, row_tokens, counts or Counts.of(mask), norm)
