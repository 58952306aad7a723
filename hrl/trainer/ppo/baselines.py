"""The greedy response of every prompt, whose reward is the baseline of the sampled ones (ReMax, arXiv:2310.10505)."""

from __future__ import annotations

import torch
from torch import Tensor

from hrl.batching.rows import lengths_of
from hrl.metrics import Metric
from hrl.protocol import DataProto


def take_baselines(batch: DataProto, scores: Tensor, kept: Tensor) -> tuple[DataProto, dict[str, Metric]]:
    """Take the greedy rows out of a scored batch and gives their scores to the samples of the same prompt.

    Where the reward function left a greedy row out there is no baseline: the samples of that prompt train nothing.

    Args:
        batch: Sampled rows with `uid` and `greedy`.
        scores: (B,), also of responses without a token, which have no token to put a score on.
        kept: (B,) bool, rows that have a score.

    Returns:
        The sampled rows with `reward_baselines (B,)`; and `reward/baseline_mean`, `reward/baselines_left_out` and
        `response_length/greedy_mean`.
    """
    greedy = torch.tensor([bool(mark) for mark in batch.non_tensor_batch["greedy"]])
    uids = batch.non_tensor_batch["uid"]
    baseline_of = {uids[row]: row for row in greedy.nonzero()[:, 0].tolist()}
    samples = batch.select_idxs(~greedy)
    samples.pop(non_tensor_batch_keys=["greedy"])
    rows = torch.tensor([baseline_of[uid] for uid in samples.non_tensor_batch["uid"]])
    samples.batch["reward_baselines"] = torch.where(kept[rows], scores[rows], 0.0).float()
    samples.batch["response_mask"] = samples.batch["response_mask"] * kept[rows, None]
    scored = greedy & kept
    lengths = lengths_of(batch)[1][greedy]
    return samples, {
        "reward/baseline_mean": Metric.mean(scores[scored].sum(), scored.sum()),
        "reward/baselines_left_out": Metric.total((greedy & ~kept).sum()),
        "response_length/greedy_mean": Metric.mean(lengths.sum(), len(lengths)),
    }
