"""From rewards of whole responses to rewards of tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def place_scores(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Put each response's score on its last trained token.

    Args:
        scores: One score per response `(B,)`.
        response_mask: `(B, R)`.

    Returns:
        `(B, R)`, 0 elsewhere; float32 unless `scores` are float64. A response without trained tokens gets nothing.

    Raises:
        ValueError: Wrong shape, or a score that is not finite; names the row.
    """
    if scores.shape != response_mask.shape[:1]:
        raise ValueError(f"scores have shape {tuple(scores.shape)}, expected ({response_mask.shape[0]},)")
    finite = torch.isfinite(scores)
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise ValueError(f"the score of row {row} is {float(scores[row])}; scores must be finite")
    columns = torch.arange(1, response_mask.shape[1] + 1, device=response_mask.device)
    # One-based, so that 0 means "no trained token" and an index of -1 cannot be formed.
    last = (columns * response_mask.bool()).amax(dim=-1) if len(columns) else columns.new_zeros(len(scores))
    rows = (last > 0).nonzero(as_tuple=True)[0]
    scores = scores if scores.dtype == torch.float64 else scores.float()
    placed = scores.new_zeros(response_mask.shape)
    placed[rows, last[rows] - 1] = scores[rows]
    return placed


def overlong_penalty(response_lengths: Tensor, max_length: int, buffer_length: int, factor: float = 1.0) -> Tensor:
    """Return DAPO's soft penalty for long responses (arXiv:2503.14476, equation 13).

    It is 0 up to `max_length - buffer_length` and then falls linearly to `-factor` at `max_length`.

    Args:
        response_lengths: `(B,)`, in tokens.
        max_length: The longest response allowed, in tokens.
        buffer_length: Number of tokens before `max_length` over which the penalty grows.
        factor: Penalty at `max_length`, as a positive number.

    Returns:
        `(B,)` float32, not positive.

    Raises:
        ValueError: The buffer is not within 1 and `max_length`.
    """
    if not 1 <= buffer_length <= max_length:
        raise ValueError(f"the overlong buffer must hold 1 to {max_length} tokens, got {buffer_length}")
    excess = response_lengths.float() - (max_length - buffer_length)
    return -factor * (excess / buffer_length).clamp(min=0.0, max=1.0)
