"""Episodes become rows: what was sampled is trained on, what was said to the policy is read, nothing else is there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from hrl.columns import object_column
from hrl.episodes.episode import Episode, EpisodeRow
from hrl.episodes.rows import episode_batch, policy_version_of
from hrl.protocol import DataProto
from hrl.routing import ROUTED_EXPERTS

P, R, PAD = 4, 6, 9


def asked(count: int) -> DataProto:
    prompts = torch.tensor([[PAD, 1, 2, 3]] * count)
    return DataProto.from_dict(
        tensors={"prompts": prompts, "attention_mask": (prompts != PAD).long()},
        non_tensors={
            "uid": object_column([f"u{place}" for place in range(count)]),
            "sample_index": object_column([0] * count),
            "columns": object_column([{"answer": place} for place in range(count)]),
        },
    )


def row(prompt: list[int], response: list[int], mask: list[int], turns: list[int], version: int = 3) -> EpisodeRow:
    log_probs = [-0.5 * bit for bit in mask]
    return EpisodeRow(prompt, response, mask, log_probs, [version if bit else -1 for bit in mask], turns)


def batch_of(*episodes: Episode, **options: bool) -> DataProto:
    return episode_batch(asked(len(episodes)), episodes, prompt_width=P, response_width=R, pad_id=PAD, **options)


def episode(place: int, *rows: EpisodeRow, end: str = "done", rewards: tuple = (None,)) -> Episode:
    return Episode((f"u{place}", 0), rows, [], rewards, end)  # type: ignore[arg-type]


def test_prompts_stand_left_responses_right_and_the_mask_has_what_was_sampled() -> None:
    batch = batch_of(
        episode(0, row([1, 2, 3], [4, 5, 6, 7], [1, 0, 0, 1], [0, 0, 0, 1]), rewards=(0.5, 1.0)),
        episode(1, row([2], [8], [1], [0]), end="max_tokens"),
    )
    columns = {name: tensor.tolist() for name, tensor in batch.batch.items()}
    assert columns["prompts"] == [[PAD, 1, 2, 3], [PAD, PAD, PAD, 2]]
    assert columns["responses"] == [[4, 5, 6, 7, PAD, PAD], [8, *[PAD] * 5]]
    assert columns["input_ids"] == [[PAD, 1, 2, 3, 4, 5, 6, 7, PAD, PAD], [PAD, PAD, PAD, 2, 8, *[PAD] * 5]]
    assert columns["attention_mask"] == [[0, 1, 1, 1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0, 0, 0]]
    assert columns["position_ids"][0] == [0, 0, 1, 2, 3, 4, 5, 6, 6, 6]
    assert columns["response_mask"] == [[1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert columns["rollout_log_probs"] == [[-0.5, 0, 0, -0.5, 0, 0], [-0.5, 0, 0, 0, 0, 0]]
    assert columns["turn_index"] == [[0, 0, 0, 1, -1, -1], [0, -1, -1, -1, -1, -1]]
    assert columns["rollout_versions"] == [[3, -1, -1, 3, -1, -1], [3, -1, -1, -1, -1, -1]]
    others = batch.non_tensor_batch
    assert others["turn_rewards"].tolist() == [[0.5, 1.0], [None]]
    assert others["finish_reason"].tolist() == ["stop", "length"]
    assert policy_version_of(batch) == 3


def test_branches_are_neighbouring_rows_with_all_that_their_episode_has() -> None:
    first, second = row([1, 2], [4], [1], [0]), row([1, 2], [5, 6], [0, 1], [0, 1])
    batch = batch_of(episode(0, first, second, rewards=(0.0, 2.0)), episode(1, row([1], [7], [1], [0])))
    others = batch.non_tensor_batch
    assert others["branch"].tolist() == [0, 1, 0] and others["uid"].tolist() == ["u0", "u0", "u1"]
    assert others["columns"].tolist() == [{"answer": 0}, {"answer": 0}, {"answer": 1}]
    assert others["turn_rewards"].tolist() == [[0.0, 2.0], [0.0, 2.0], [None]]


def test_a_failed_episode_is_a_row_without_response_whatever_it_had_sampled() -> None:
    batch = batch_of(episode(0, row([1], [7], [1], [0]), end="failed"), episode(1, end="failed"))
    assert batch.batch["response_mask"].sum() == 0 and batch.batch["attention_mask"][:, P:].sum() == 0
    assert batch.batch["prompts"].tolist() == [[PAD, 1, 2, 3]] * 2, "the row's own prompt"
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["abort", "abort"]
    assert policy_version_of(batch) is None


def test_experts_are_a_column_where_they_were_asked_for_and_of_no_token_where_an_episode_failed() -> None:
    routed = np.arange(2 * 3 * 2, dtype=np.uint8).reshape(2, 3, 2)
    played = replace(row([1], [7, 8], [1, 1], [0, 0]), routed=routed)
    episodes = [episode(0, end="failed"), episode(1, played)]
    none, told = batch_of(*episodes, with_experts=True).non_tensor_batch[ROUTED_EXPERTS]
    assert none.shape == (0, 3, 2) and none.dtype == np.uint8 and np.array_equal(told, routed)
    (none,) = batch_of(episodes[0], with_experts=True).non_tensor_batch[ROUTED_EXPERTS]
    assert none.shape == (0, 0, 0)
    assert ROUTED_EXPERTS not in batch_of(*episodes).non_tensor_batch


def test_tokens_of_two_versions_in_one_batch_are_told() -> None:
    batch = batch_of(episode(0, row([1], [7], [1], [0])), episode(1, row([1], [7], [1], [0], version=4)))
    try:
        policy_version_of(batch)
    except ValueError as error:
        assert str(error) == "tokens of the policy's versions [3, 4] are in one batch"
    else:
        raise AssertionError
    assert np.all(batch.batch["rollout_versions"].numpy() >= -1)
