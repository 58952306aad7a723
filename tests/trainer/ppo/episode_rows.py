"""Batches of episodes: turns of the policy's tokens with the environment's between them, in one row or in several."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hrl.batching.episodes import episode_numbers
from hrl.protocol import DataProto

PROMPT_WIDTH, WIDTH = 3, 12
NOISY = ("values", "old_log_probs", "ref_log_prob", "rollout_log_probs", "entropys", "sum_pi_squared")
"""Columns of tokens that stand for what a model made of the environment's too."""


def whole_episodes(seed: int, groups: int = 3, samples: int = 3) -> DataProto:
    """One row for each episode. One episode in six or so is empty, as one that failed is."""
    rng = np.random.default_rng(seed)
    count = groups * samples
    mask, attention = np.zeros((count, WIDTH), np.int64), np.zeros((count, WIDTH), np.int64)
    turns, scores = np.full((count, WIDTH), -1), np.zeros((count, WIDTH), np.float32)
    for row in range(count):
        at = 0
        for turn in range(int(rng.integers(1, 4)) if rng.random() > 0.15 else 0):
            sampled, answered = int(rng.integers(1, 4)), int(rng.integers(0, 2))
            mask[row, at : at + sampled] = 1
            scores[row, at + sampled - 1] = rng.integers(-1, 3)
            turns[row, at : at + sampled + answered] = turn
            at += sampled + answered
        attention[row, :at] = 1
    noise = torch.from_numpy(rng.normal(size=(len(NOISY), count, WIDTH))).float()
    responses = rng.integers(0, 50, (count, WIDTH)) * attention
    names = [f"p{row // samples}" for row in range(count)]
    numbers = torch.from_numpy(mask)
    return DataProto.from_dict(
        tensors={
            "prompts": torch.ones(count, PROMPT_WIDTH, dtype=torch.int64),
            "responses": torch.from_numpy(responses),
            "attention_mask": torch.from_numpy(np.concatenate([np.ones((count, PROMPT_WIDTH), int), attention], 1)),
            "response_mask": numbers,
            "turn_index": torch.from_numpy(turns),
            "token_level_scores": torch.from_numpy(scores),
            "token_level_rewards": torch.from_numpy(scores),
            "plain_scores": torch.from_numpy(rng.integers(-1, 3, count)).float(),
            "reward_baselines": torch.from_numpy(rng.normal(size=count)).float(),
            "bootstrap_values": torch.from_numpy(rng.normal(size=count)).float(),
            **{name: -column.abs() - 0.05 for name, column in zip(NOISY, noise, strict=True)},
        },
        non_tensors={
            "uid": np.array(names, dtype=object),
            "sample_index": np.array([row % samples for row in range(count)], dtype=object),
            "branch": np.zeros(count, dtype=object),
            "finish_reason": np.array(["stop"] * count, dtype=object),
            "reward_parts": np.array(
                [{"acc": float(row % 2), "form": 0.1 * row} for row in range(count)], dtype=object
            ),
        },
        meta_info={"temperature": 1.0},
    )


def in_branches(batch: DataProto, seed: int) -> DataProto:
    """Let some episodes go on in a further row, which repeats what was before and trains what comes then."""
    rng = np.random.default_rng(seed)
    columns = batch.batch
    rows, first_turn, end_turn, branches = [], [], [], []
    for row, turns in enumerate(columns["turn_index"].tolist()):
        cuts = [0, *(turn for turn in range(1, max(turns) + 1) if rng.random() < 0.7), WIDTH]
        for branch, (first, end) in enumerate(pairwise(cuts)):
            rows.append(row)
            first_turn.append(first)
            end_turn.append(end)
            branches.append(branch)
    split = batch.select_idxs(rows)
    split.non_tensor_batch["branch"] = np.array(branches, dtype=object)
    turns = split.batch["turn_index"]
    is_there = (turns < torch.tensor(end_turn)[:, None]) & (turns >= 0)
    is_own = is_there & (turns >= torch.tensor(first_turn)[:, None])
    split.batch["turn_index"] = torch.where(is_there, turns, -1)
    split.batch["attention_mask"][:, PROMPT_WIDTH:] *= is_there
    split.batch["response_mask"] *= is_own
    for name in ("token_level_scores", "token_level_rewards"):
        split.batch[name] = split.batch[name] * is_own
    return with_noise(split, seed)


def with_noise(batch: DataProto, seed: int) -> DataProto:
    """Return the batch with other numbers at all tokens that are not trained, but for scores, which are 0 there."""
    noisy = batch.select(deepcopy=True)
    masked = noisy.batch["response_mask"] == 0
    generator = torch.Generator().manual_seed(seed)
    for name in (name for name in NOISY if name in noisy.batch.keys()):
        noise = 100 * torch.randn(masked.shape, generator=generator)
        noisy.batch[name] = torch.where(masked, noise, noisy.batch[name])
    turns = torch.randint(-1, 6, masked.shape, generator=generator)
    noisy.batch["turn_index"] = torch.where(masked, turns, noisy.batch["turn_index"])
    return noisy


def by_episode(batch: DataProto, name: str) -> Tensor:
    """A column of tokens with one row for each episode, 0 where nothing is trained."""
    column, mask = batch.batch[name], batch.batch["response_mask"].bool()
    episodes = episode_numbers(batch)
    numbers = torch.arange(len(batch)) if episodes is None else torch.from_numpy(episodes)
    merged = column.new_zeros(int(numbers.max()) + 1, column.shape[1])
    return merged.index_add_(0, numbers, torch.where(mask, column, 0))
