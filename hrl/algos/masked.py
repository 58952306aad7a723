"""Statistics over trained tokens, and packing of a ragged batch to its trained tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Full name → sum and count over trained tokens, or over rows."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are kept within ±20 before `exp`, which could overflow to NaN. Every clipped loss is flat well before."""
WHITEN_EPSILON = 1e-8


def check_shapes(mask: Tensor, **tensors: Tensor | None) -> None:
    """Refuse tensors that are not `(B, R)` like the response mask.

    Raises:
        ValueError: A tensor's shape differs; names the tensor and both shapes.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, response_mask has {tuple(mask.shape)}")


def keep(matrix: Tensor, mask: Tensor) -> Tensor:
    """Return `matrix` with 0 outside the mask, also in place of NaN and infinity."""
    return torch.where(mask.bool(), matrix, 0.0)


def sum_and_count(matrix: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the entries inside the mask and their number, both detached scalars."""
    return keep(matrix.detach(), mask).sum(), mask.sum()


def rows_with_tokens(mask: Tensor) -> Tensor:
    """Return which rows have at least one trained token, `(B,)` bool."""
    if mask.shape[-1] == 0:
        return mask.new_zeros(mask.shape[:-1], dtype=torch.bool)
    # A maximum of bytes takes a twentieth of the time of `any`.
    return mask.bool().view(torch.uint8).amax(dim=-1).bool()


def broadcast_rows(row_values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Give every trained token its row's value, and 0 to everything else. `(B,) -> (B, R)`."""
    return torch.where(mask.bool(), row_values.to(dtype).unsqueeze(-1), 0.0)


def pad_segments(flat: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a packed column to rows, the form that all functions of this package take. Differentiable.

    `flat [a b c d]`, `lengths [3 0 1]` becomes `[a b c] [0 0 0] [d 0 0]` with mask `111 000 100`.

    Args:
        flat: The trained tokens of all rows, one row after the other `(N,)`.
        lengths: Number of trained tokens of each row, int64 `(B,)`.

    Returns:
        Matrix and mask, both `(B, longest)`.

    Raises:
        ValueError: The lengths don't add up to N.
    """
    if int(lengths.sum()) != len(flat):
        raise ValueError(f"the lengths add up to {int(lengths.sum())} tokens, the packed column has {len(flat)}")
    width = int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(width, device=flat.device) < lengths.to(flat.device).unsqueeze(-1)
    return flat.new_zeros(mask.shape).masked_scatter(mask, flat), mask


def whiten(matrix: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale the entries inside the mask to mean 0 and (unbiased) variance 1; 0 outside.

    A single entry equals its mean and becomes 0.
    """
    dtype = torch.promote_types(matrix.dtype, torch.float32)  # NumPy has no bfloat16
    entries, trained = matrix.detach().to("cpu", dtype).numpy(), mask.bool().cpu().numpy()
    # NumPy copies runs of entries; torch looks for the index of each, which takes 15 times as long.
    flat = entries[trained].astype(np.float64)
    whiten_in_place([flat])
    whitened = np.zeros_like(entries)
    whitened[trained] = flat
    return torch.from_numpy(whitened).to(matrix)


def whiten_in_place(pieces: Sequence[NDArray[np.floating]]) -> None:
    """Shift and scale numbers, `(N,)` in each piece, to mean 0 and (unbiased) variance 1 over all pieces."""
    count = sum(map(len, pieces))
    mean = sum(float(piece.sum()) for piece in pieces) / max(count, 1)
    for piece in pieces:
        piece -= mean
    squares = sum(float(piece @ piece) for piece in pieces)
    for piece in pieces:
        piece *= 1.0 / math.sqrt(squares / max(count - 1, 1) + WHITEN_EPSILON)


@dataclass(frozen=True)
class TrainedTokens:
    """The places of the trained tokens of a `(B, R)` batch before and after packing each row to the left.

    `mask [1 0 1 1]`, row `[a b c d]` packs to `[a c d]`; shorter rows are filled with 0 up to the longest.

    Attributes:
        trained: `(B, R)` bool, the places of the tokens in the batch.
        slots: `(B, width)` bool, their places in the packed matrix; both in the same order.
    """

    trained: Tensor
    slots: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> TrainedTokens:
        """Find the trained tokens of a `(B, R)` mask."""
        lengths = mask.bool().sum(dim=-1, keepdim=True)
        width = int(lengths.max()) if lengths.numel() else 0
        return cls(mask.bool(), torch.arange(width, device=mask.device) < lengths)

    def pack(self, matrix: Tensor) -> Tensor:
        """Move the trained tokens of each row to its start, with 0 behind them. `(B, R) -> (B, width)`."""
        return matrix.new_zeros(self.slots.shape).masked_scatter_(self.slots, matrix[self.trained])

    def unpack(self, packed: Tensor) -> Tensor:
        """Move the tokens back to their places, with 0 elsewhere. `(B, width) -> (B, R)`."""
        return packed.new_zeros(self.trained.shape).masked_scatter_(self.trained, packed[self.slots])
