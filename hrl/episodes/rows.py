"""Episodes as rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from hrl.columns import object_column
from hrl.episodes.episode import NO_TURN, NO_VERSION, Episode, EpisodeRow
from hrl.pictures import MULTI_MODAL_DATA, has_pictures
from hrl.protocol import DataProto
from hrl.routing import ROUTED_EXPERTS
from hrl.workers.rollout.base import FinishReason


def episode_batch(
    asked: DataProto,
    episodes: Sequence[Episode],
    *,
    prompt_width: int,
    response_width: int,
    pad_id: int,
    with_experts: bool = False,
) -> DataProto:
    """Return the rows of episodes, those of an episode next to each other.

    An episode that failed has one row without response, so that it is counted and trains nothing.

    Args:
        asked: The rows that the episodes were asked for, one each, in this order.
        episodes: One for each row.
        prompt_width: P.
        response_width: R.
        pad_id: Fills prompts on the left and responses on the right.
        with_experts: Also return `routed_experts`, of no token where an episode failed.

    Returns:
        `prompts (B, P)`, `responses, response_mask, turn_index, rollout_versions (B, R)`, `input_ids, attention_mask,
        position_ids (B, P+R)` int64 and `rollout_log_probs (B, R)` float32; non-tensors of `asked`, and `branch`,
        `episode_id`, `num_turns`, `tool_calls`, `tool_errors`, `turn_rewards`, `token_rewards`, `env_metrics`,
        `messages`, `end`, `finish_reason`, `episode_error`, `engine_s`, `environment_s`, `attempts`.
    """
    sees = has_pictures(asked.non_tensor_batch)
    place_of: list[int] = []
    branches: list[int] = []
    rows: list[EpisodeRow] = []
    for place, episode in enumerate(episodes):
        played = [] if episode.end == "failed" else [*episode.rows]
        if not played:
            prompt = asked.batch["prompts"][place][asked.batch["attention_mask"][place].bool()]
            shown = asked.non_tensor_batch[MULTI_MODAL_DATA][place] if sees else ()
            played = [EpisodeRow(prompt.tolist(), [], [], [], [], [], pictures=shown)]
        rows += played
        branches += range(len(played))
        place_of += [place] * len(played)
    count = len(rows)
    prompts = np.full((count, prompt_width), pad_id, np.int64)
    prompt_mask = np.zeros((count, prompt_width), np.int64)
    for at, row in enumerate(rows):
        width = len(row.prompt_ids)
        prompts[at, prompt_width - width :] = row.prompt_ids
        prompt_mask[at, prompt_width - width :] = 1
    lengths = np.fromiter((len(row.response_ids) for row in rows), np.int64, count)
    is_there = np.arange(response_width) < lengths[:, None]

    def column(name: str, fill: float, dtype: type) -> np.ndarray:
        laid: np.ndarray = np.full((count, response_width), fill, dtype)
        laid[is_there] = np.fromiter(chain.from_iterable(getattr(row, name) for row in rows), dtype, int(lengths.sum()))
        return laid

    responses = column("response_ids", pad_id, np.int64)
    attention_mask = np.concatenate([prompt_mask, is_there.astype(np.int64)], axis=1)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention_mask,
        "position_ids": np.maximum(attention_mask.cumsum(axis=1) - 1, 0),
        "response_mask": column("mask", 0, np.int64),
        "rollout_log_probs": column("log_probs", 0.0, np.float32),
        "turn_index": column("turns", NO_TURN, np.int64),
        "rollout_versions": column("versions", NO_VERSION, np.int64),
    }
    of_rows = [episodes[place] for place in place_of]
    facts: dict[str, list[Any]] = {
        "branch": branches,
        "episode_id": [f"{episode.key[0]}/{episode.key[1]}" for episode in of_rows],
        "num_turns": [episode.num_turns for episode in of_rows],
        "tool_calls": [episode.num_tool_calls for episode in of_rows],
        "tool_errors": [episode.num_tool_errors for episode in of_rows],
        "turn_rewards": [list(episode.turn_rewards) for episode in of_rows],
        "token_rewards": [episode.token_rewards for episode in of_rows],
        "env_metrics": [dict(episode.metrics) for episode in of_rows],
        "messages": [list(episode.messages) for episode in of_rows],
        "turn_places": [list(episode.turn_places) for episode in of_rows],
        "end": [episode.end for episode in of_rows],
        "finish_reason": [_finish_reason(episode) for episode in of_rows],
        "episode_error": [episode.error for episode in of_rows],
        "engine_s": [episode.engine_s for episode in of_rows],
        "environment_s": [episode.environment_s for episode in of_rows],
        "attempts": [episode.attempts for episode in of_rows],
    }
    if sees:
        facts[MULTI_MODAL_DATA] = [row.pictures for row in rows]
    if with_experts:
        facts[ROUTED_EXPERTS] = _routed(rows)
    kept = {name: values[place_of] for name, values in asked.non_tensor_batch.items()}
    return DataProto.from_dict(
        tensors={name: torch.from_numpy(values) for name, values in tensors.items()},
        non_tensors=kept | {name: object_column(values) for name, values in facts.items()},
    )


def _routed(rows: Sequence[EpisodeRow]) -> list[np.ndarray]:
    told = next((row.routed for row in rows if row.routed is not None), np.zeros((0, 0, 0), np.uint8))
    return [told[:0] if row.routed is None else row.routed for row in rows]


def _finish_reason(episode: Episode) -> FinishReason:
    """Return how the engine would say that an episode ended."""
    if episode.end == "failed":
        return "abort"
    return "length" if episode.is_truncated else "stop"


def policy_version_of(batch: DataProto) -> int | None:
    """Return the version of the policy that sampled all tokens of a batch; None if nobody sampled one.

    Raises:
        ValueError: There are several.
    """
    versions = batch.batch["rollout_versions"][batch.batch["response_mask"].bool()].unique().tolist()
    if len(versions) > 1:
        raise ValueError(f"tokens of the policy's versions {versions} are in one batch")
    return versions[0] if versions else None
