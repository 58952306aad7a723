"""Statistics over trained tokens, and packing of a ragged batch to its trained tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

WHITEN_EPSILON = 1e-8
TOKENS_AT_ONCE = 1 << 18
"""Entries in one piece of a large batch: few enough that its float64 copies stay in the processor's cache."""


def in_pieces(*matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut matrices `(B, R)` into the same pieces of whole rows, in order; a matrix without rows is one piece."""
    rows = max(TOKENS_AT_ONCE // max(matrices[0].shape[1], 1), 1)
    return zip(*(matrix.split(rows) for matrix in matrices), strict=True)


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
    return mask.bool().any(dim=-1)


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
    trained = mask.bool()
    count = int(trained.count_nonzero())
    if count < 2:
        return torch.zeros_like(matrix)
    whitened = keep(matrix, trained)
    pieces = list(in_pieces(whitened, trained))
    mean = torch.stack([piece.double().sum() for piece, _ in pieces]).sum() / count
    squares = [keep(piece.double() - mean, kept).square_().sum() for piece, kept in pieces]
    scale = torch.rsqrt(torch.stack(squares).sum() / (count - 1) + WHITEN_EPSILON)
    for piece, kept in pieces:
        piece.copy_(keep((piece.double() - mean).mul_(scale), kept))
    return whitened


@dataclass(frozen=True)
class TrainedTokens:
    """The places of the trained tokens of a `(B, R)` batch before and after packing each row to the left.

    `mask [1 0 1 1]`, row `[a b c d]` packs to `[a c d]`; shorter rows are filled with 0 up to the longest.

    Attributes:
        trained: `(B, R)` bool, the places of the tokens in the batch.
        slots: `(B, width)` bool, their places in the packed matrix; both in the same order.
        already_packed: Whether every row's tokens are at its start, so that packing only removes columns.
    """

    trained: Tensor
    slots: Tensor
    already_packed: bool

    @classmethod
    def of(cls, mask: Tensor) -> TrainedTokens:
        """Find the trained tokens of a `(B, R)` mask."""
        trained = mask.bool()
        lengths = trained.count_nonzero(dim=-1).unsqueeze(-1)
        width = int(lengths.max()) if lengths.numel() else 0
        slots = torch.arange(width, device=mask.device) < lengths
        return cls(trained, slots, already_packed=torch.equal(trained[:, :width], slots))

    def pack(self, matrix: Tensor) -> Tensor:
        """`(B, R) -> (B, width)`, trained tokens to the left, 0 behind them."""
        if self.already_packed:
            return keep(matrix[:, : self.slots.shape[1]], self.slots)
        return matrix.new_zeros(self.slots.shape).masked_scatter_(self.slots, matrix[self.trained])

    def unpack(self, packed: Tensor) -> Tensor:
        """`(B, width) -> (B, R)`, back in place, 0 outside the mask."""
        if self.already_packed:
            padding = self.trained.shape[1] - self.slots.shape[1]
            return torch.nn.functional.pad(keep(packed, self.slots), (0, padding))
        return packed.new_zeros(self.trained.shape).masked_scatter_(self.trained, packed[self.slots])
