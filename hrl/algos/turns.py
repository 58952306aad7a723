"""Turns as steps: what an episode does between two answers of its environment, as one action."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Turns:
    """The turns of a `(B, R)` batch that have trained tokens, K of them, by row and in each row by time.

    Attributes:
        trained: `(B, R)` bool.
        of_token: `(N,)` the turn of each trained token, in the order of the mask.
        slots: `(B, most turns of a row)` bool, places for turns as steps of their row.
    """

    trained: Tensor
    of_token: Tensor
    slots: Tensor

    @classmethod
    def of(cls, mask: Tensor, turn_index: Tensor | None) -> Turns:
        """Find the turns.

        Args:
            mask: `(B, R)`.
            turn_index: `(B, R)`, the turn of each token, which does not fall along a row; None makes what is trained of
                a row one turn.
        """
        trained = mask.bool()
        rows, columns = trained.nonzero(as_tuple=True)
        turn = torch.zeros_like(rows) if turn_index is None else turn_index[rows, columns]
        begins = torch.ones_like(rows)
        begins[1:] = (rows[1:] != rows[:-1]) | (turn[1:] != turn[:-1])
        lengths = torch.zeros(trained.shape[:1], dtype=torch.int64, device=rows.device).index_add_(0, rows, begins)
        width = int(lengths.max()) if len(lengths) else 0
        slots = torch.arange(width, device=rows.device) < lengths.unsqueeze(-1)
        return cls(trained, begins.cumsum(0) - 1, slots)

    def totals(self, matrix: Tensor) -> Tensor:
        """Sum up the trained tokens of each turn, `(B, R) -> (B, turns)` float64, 0 behind a row's last turn."""
        count = int(self.slots.sum())
        sums = torch.zeros(count, dtype=torch.float64, device=matrix.device)
        return self._steps(sums.index_add_(0, self.of_token, matrix[self.trained].double()))

    def firsts(self, matrix: Tensor) -> Tensor:
        """Take the entry of each turn's first trained token, `(B, R) -> (B, turns)`."""
        first = torch.ones_like(self.of_token, dtype=torch.bool)
        first[1:] = self.of_token[1:] != self.of_token[:-1]
        return self._steps(matrix[self.trained][first])

    def spread(self, steps: Tensor, dtype: torch.dtype) -> Tensor:
        """Give every trained token its turn's value, and 0 to everything else. `(B, turns) -> (B, R)`."""
        of_tokens = steps[self.slots].to(dtype)[self.of_token]
        return of_tokens.new_zeros(self.trained.shape).masked_scatter_(self.trained, of_tokens)

    def _steps(self, of_turns: Tensor) -> Tensor:
        return of_turns.new_zeros(self.slots.shape).masked_scatter_(self.slots, of_turns)
