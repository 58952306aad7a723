"""Episodes of several rows, folded to one row each, so that whatever compares or discounts sees whole episodes.

Where a chat template rewrites what was before, an episode goes on in a further row, a *branch*. How many rows it has is
the template's doing and must not show in the maths. So estimators and the correction for the sampler get a batch in
which each episode is one row: its trained tokens in the order in which they were sampled.

The update is the exception, which has rows and not episodes: losses with the trait `has_row_ratio`, and in bypass mode
the correction by sequences, see every row as a sequence. A run that has both is warned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Places = NDArray[np.int64]


@dataclass(frozen=True)
class FoldedEpisodes:
    """Where the trained tokens of a `(B, R)` batch stand in one of E episodes, `(E, W)`.

    Two rows `a b - -` and `- - c d`, which are one episode, fold to `a b c d`; `-` is not trained.

    Attributes:
        row: `(N,)` of each trained token in the batch.
        column: `(N,)`, likewise.
        episode: `(N,)` of each trained token among the episodes.
        place: `(N,)` in its episode.
        first_row: `(E,)` the first row of each episode.
        shape: B and R.
    """

    row: Places
    column: Places
    episode: Places
    place: Places
    first_row: Places
    shape: tuple[int, int]

    @classmethod
    def of(cls, mask: Tensor, episode_ids: Tensor, turn_index: Tensor | None = None) -> FoldedEpisodes:
        """Find the trained tokens of every episode.

        Args:
            mask: `(B, R)`.
            episode_ids: `(B,)` int64 codes from 0 up.
            turn_index: `(B, R)`, the turn of each token; None takes the rows of an episode for their order in time.
        """
        if episode_ids.shape != mask.shape[:1]:
            raise ValueError(f"episode_ids has shape {tuple(episode_ids.shape)}, expected ({mask.shape[0]},)")
        row, column = mask.bool().numpy(force=True).nonzero()
        ids = episode_ids.numpy(force=True)
        episode = ids[row]
        turn = np.zeros_like(row) if turn_index is None else turn_index.numpy(force=True)[row, column]
        in_time = np.lexsort((column, row, turn, episode))
        row, column, episode = row[in_time], column[in_time], episode[in_time]
        place = np.arange(len(row)) - np.searchsorted(episode, episode)
        first_row = np.unique(ids, return_index=True)[1]
        return cls(row, column, episode, place, first_row, (mask.shape[0], mask.shape[1]))

    def tokens(self, matrix: Tensor) -> Tensor:
        """Fold a column of tokens, with 0 behind each episode. `(B, R) -> (E, W)`."""
        width = int(self.place.max(initial=-1)) + 1
        folded = matrix.new_zeros((len(self.first_row), width))
        folded[self.episode, self.place] = matrix[self.row, self.column]
        return folded

    def mask(self) -> Tensor:
        """Return the mask of the folded batch, `(E, W)` bool."""
        return self.tokens(torch.ones(self.shape, dtype=torch.bool))

    def rows(self, column: Tensor) -> Tensor:
        """Take what is an episode's own, which all its rows have, from its first row. `(B, …) -> (E, …)`."""
        return column[torch.from_numpy(self.first_row)]

    def unfold(self, folded: Tensor) -> Tensor:
        """Move the tokens back to their rows, with 0 elsewhere. `(E, W) -> (B, R)`."""
        matrix = folded.new_zeros(self.shape)
        matrix[self.row, self.column] = folded[self.episode, self.place]
        return matrix


def episode_sums(row_values: Tensor, episode_ids: Tensor) -> Tensor:
    """Return for each row the total of its episode, `(B,)` float64."""
    return torch.bincount(episode_ids, weights=row_values.double()).index_select(0, episode_ids)
