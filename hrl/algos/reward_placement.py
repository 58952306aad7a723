"""From rewards of whole responses, or of their turns, to rewards of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hrl.algos.masked import keep

TurnRewards = Sequence[float | None]
TokenRewards = Sequence[Sequence[float] | None]


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


def move_scores(token_scores: Tensor, kept: Tensor) -> Tensor:
    """Move scores off the tokens that are no longer trained on: to the last kept token before them.

    Without one before it a score goes to the first kept token behind it.

    Args:
        token_scores: `(B, R)`.
        kept: `(B, R)`, 1 on tokens that may have a score.

    Returns:
        `(B, R)`, 0 outside of `kept`. A row that keeps no token keeps no score.
    """
    if not kept.numel():
        return token_scores
    columns = torch.arange(kept.shape[1], device=kept.device)
    before = torch.where(kept.bool(), columns, -1).cummax(dim=-1).values
    behind = kept.bool().view(torch.uint8).argmax(dim=-1, keepdim=True)
    moved = torch.zeros_like(token_scores)
    return keep(moved.scatter_add_(1, torch.where(before < 0, behind, before), token_scores), kept)


@dataclass(frozen=True)
class PlacedTurnRewards:
    """Where the rewards of turns went.

    Attributes:
        scores: `(B, R)` float32.
        num_moved: Rewards other than 0 of turns without a trained token, which stand on a token of another turn.
        num_lost: Rewards other than 0 of episodes without a trained token, which stand nowhere.
    """

    scores: Tensor
    num_moved: int
    num_lost: int


def place_turn_rewards(
    turn_rewards: Sequence[TurnRewards] | np.ndarray,
    turn_index: Tensor,
    response_mask: Tensor,
    episode_ids: NDArray[np.int64] | None = None,
) -> PlacedTurnRewards:
    """Put the reward of each turn on that turn's last trained token, in the row that holds it.

    A turn may have no trained token: it is empty, or what it sampled is masked. Then its reward goes to the last
    trained token before it: the same trained tokens have it ahead of them as before. If there is none, it goes to the
    first trained token of the episode, which keeps the episode's sum and is ahead of one token alone.

    Args:
        turn_rewards: `(B,)`, for each row the rewards of all turns of its episode; None where a turn has none.
        turn_index: `(B, R)` int64, the turn of each token, counted from 0; ignored outside of the mask.
        response_mask: `(B, R)`.
        episode_ids: `(B,)` codes from 0 up of the episode that each row is a branch of; None makes every row one.

    Raises:
        ValueError: Shapes that differ, a trained token of no turn, a reward that is not finite, or rows of an episode
            with other rewards; names the row.
    """
    mask = response_mask.bool().numpy(force=True)
    if turn_index.shape != mask.shape or len(turn_rewards) != len(mask):
        raise ValueError(
            f"turn_index has shape {tuple(turn_index.shape)} and turn_rewards {len(turn_rewards)} entries; "
            f"response_mask has shape {mask.shape}"
        )
    episodes = np.arange(len(mask)) if episode_ids is None else episode_ids
    row, column = mask.nonzero()
    turn = turn_index.numpy(force=True)[row, column]
    if (turn < 0).any():
        raise ValueError(f"row {row[np.argmax(turn < 0)]} has a trained token that is of no turn")
    num_turns = max(int(turn.max(initial=-1)) + 1, max(map(len, turn_rewards), default=0))
    rewards = _rewards_of_episodes(turn_rewards, episodes, num_turns)

    # Which trained token, by its number among all, is a turn's first and last; -1 where it has none.
    places = np.arange(len(row))
    first, last = np.full(rewards.shape, len(row)), np.full(rewards.shape, -1)
    np.minimum.at(first, (episodes[row], turn), places)
    np.maximum.at(last, (episodes[row], turn), places)
    has_token = last >= 0
    holder = np.maximum.accumulate(np.where(has_token, np.arange(num_turns), -1), axis=1)
    begin = np.take_along_axis(first, has_token.argmax(axis=1, keepdims=True), axis=1) if num_turns else first
    target = np.where(holder >= 0, np.take_along_axis(last, holder, axis=1), begin)

    placed, given, has_target = np.zeros(mask.shape), rewards != 0, has_token.any(axis=1, keepdims=True)
    found = given & has_target
    np.add.at(placed, (row[target[found]], column[target[found]]), rewards[found])
    return PlacedTurnRewards(
        scores=torch.from_numpy(placed).float().to(response_mask.device),
        num_moved=int((found & ~has_token).sum()),
        num_lost=int((given & ~has_target).sum()),
    )


def place_token_rewards(
    token_rewards: Sequence[TokenRewards] | np.ndarray,
    turn_rewards: Sequence[TurnRewards] | np.ndarray,
    turn_index: Tensor,
    response_mask: Tensor,
    episode_ids: NDArray[np.int64] | None = None,
) -> tuple[Tensor, list[list[float | None]]]:
    """Put the rewards of tokens on these, and return them with what is left of the turns' for `place_turn_rewards`.

    What a turn sampled stands in one row of its episode, and is trained there or not at all. Where it is not, the
    turn's reward is left whole.

    Args:
        token_rewards: `(B,)`, for each row and each turn of its episode the rewards of the tokens that the turn
            sampled, or None; nothing where no turn has any.
        turn_rewards: `(B,)`, with the sums of these.
        turn_index: As for `place_turn_rewards`.
        response_mask: `(B, R)`.
        episode_ids: As for `place_turn_rewards`.

    Returns:
        `(B, R)` float32; and the turns' rewards without those.

    Raises:
        ValueError: A turn has another number of trained tokens than of rewards; names row and turn.
    """
    placed = torch.zeros(response_mask.shape)
    mask, turn_of = response_mask.bool().cpu(), turn_index.cpu()
    episodes = range(len(mask)) if episode_ids is None else episode_ids.tolist()
    paid: dict[tuple[int, int], float] = {}
    for row, (episode, of_turns) in enumerate(zip(episodes, token_rewards, strict=True)):
        for turn, rewards in enumerate(of_turns):
            columns = (mask[row] & (turn_of[row] == turn)).nonzero()[:, 0] if rewards is not None else ()
            if rewards is None or not len(columns):
                continue
            if len(columns) != len(rewards):
                raise ValueError(f"row {row}, turn {turn}: {len(columns)} trained tokens, {len(rewards)} token rewards")
            placed[row, columns] = torch.tensor(rewards)
            paid[episode, turn] = math.fsum(rewards)
    left = [
        [(reward or 0.0) - paid[episode, turn] if (episode, turn) in paid else reward for turn, reward in enumerate(of)]
        for episode, of in zip(episodes, turn_rewards, strict=True)
    ]
    return placed.to(response_mask.device), left


def _rewards_of_episodes(
    turn_rewards: Sequence[TurnRewards] | np.ndarray, episodes: NDArray[np.int64], num_turns: int
) -> NDArray[np.float64]:
    """Return `(E, num_turns)`, 0 where a turn has no reward."""
    rewards = np.zeros((int(episodes.max(initial=-1)) + 1, num_turns))
    first_row: dict[int, int] = {}
    for row, (episode, of_turns) in enumerate(zip(episodes.tolist(), turn_rewards, strict=True)):
        other = first_row.setdefault(episode, row)
        if other != row:
            if list(of_turns) != list(turn_rewards[other]):
                raise ValueError(f"rows {other} and {row} are of one episode and have other turn rewards")
            continue
        for turn, reward in enumerate(of_turns):
            if reward is not None:
                if not math.isfinite(reward):
                    raise ValueError(f"the reward of row {row}, turn {turn} is {reward}; rewards must be finite")
                rewards[episode, turn] = reward
    return rewards


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
