"""What surrounds a sampling call: its rows and sampling, checks of what comes back, and greedy baselines."""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hrl.batching.planner import lengths_of
from hrl.columns import object_column
from hrl.config.rollout import RolloutConfig
from hrl.errors import HrlError
from hrl.metrics import Metric
from hrl.protocol import DataProto
from hrl.routing import ROUTED_EXPERTS, known_by_beginning
from hrl.trainer.ppo.samples import counted_samples, sample_rows
from hrl.workers.requests import SampleRequest, SamplingParams

if TYPE_CHECKING:
    from hrl.batching.plan import BatchPlan


class PolicyVersionError(HrlError, RuntimeError):
    """A batch was sampled from other weights than the ones it would train."""


@dataclass(frozen=True, eq=False)
class Asked:
    """Samples that the engines are asked for.

    Attributes:
        prompts: One row per prompt.
        rows: One per sample.
        request: How they are sampled.
        validate: They are not trained on.
    """

    prompts: DataProto
    rows: DataProto
    request: SampleRequest[BatchPlan]
    validate: bool

    def is_for(self, prompts: DataProto, step: int, seed: int) -> bool:
        """Return whether these are the first samples of a step (or validation, by the seed) from these prompts."""
        mine, other = self.prompts, prompts
        return (
            (self.request.step, self.request.seed) == (step, seed)
            and np.array_equal(mine.non_tensor_batch["index"], other.non_tensor_batch["index"])
            and torch.equal(mine.batch["prompts"], other.batch["prompts"])
        )


def prompt_batch(
    prompts: DataProto,
    samples: int,
    *,
    step: int,
    validate: bool = False,
    wave: int = 0,
    with_greedy: bool = False,
) -> DataProto:
    """Repeat every prompt once per sample and stamp the rows with group and sample number.

    Args:
        prompts: One row per prompt, from `RLHFDataset.batch`; its `index` tells prompts apart.
        samples: Responses to each prompt.
        step: The trainer's step, which sampling seeds derive from.
        validate: The samples are not trained on; their `uid` differ from those of the step that trains.
        wave: How many batches the step has sampled before. A prompt that is drawn twice in a step, from a small data
            set, forms a second group with other samples.
        with_greedy: Append one row per prompt that takes the most likely tokens; the column `greedy` marks it.

    Returns:
        `n` consecutive rows per prompt, with non-tensor `uid` (B,) and `sample_index` (B,).
    """
    # Derived, not random, so that a run that is started again draws the same samples. It uses the row's number in the
    # data set, so that prompts of a validation that runs in several batches get different uids.
    again = f"/{wave}" if wave else ""
    earlier: Counter[int] = Counter()
    names = []
    for index in prompts.non_tensor_batch["index"]:
        twice = f"/again {earlier[index]}" if earlier[index] else ""  # of a small source with a large weight
        earlier[index] += 1
        names.append(str(uuid.uuid5(uuid.NAMESPACE_OID, f"{step}/{validate}/{index}{again}{twice}")))
    prompts.non_tensor_batch["uid"] = np.array(names, dtype=object)
    rows = prompts.repeat(samples, interleave=True)
    rows.non_tensor_batch["sample_index"] = np.array([i % samples for i in range(len(rows))], dtype=object)
    if with_greedy:
        baselines = prompts.select()
        baselines.non_tensor_batch["sample_index"] = np.full(len(prompts), samples, dtype=object)
        for part, is_greedy in ((rows, False), (baselines, True)):
            part.non_tensor_batch["greedy"] = np.full(len(part), is_greedy, dtype=object)
        rows = DataProto.concat([rows, baselines])
    return rows


def sampling_of(rollout: RolloutConfig, max_tokens: int, *, validate: bool) -> SamplingParams:
    """Return how the responses of a step, or of a validation, are sampled.

    Args:
        rollout: The `rollout` part of the configuration.
        max_tokens: R, the longest response.
        validate: Take `val_kwargs`, which may be greedy.
    """
    if validate and not rollout.val_kwargs.do_sample:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens)
    settings = rollout.val_kwargs if validate else rollout
    return SamplingParams(settings.temperature, settings.top_p, settings.top_k, max_tokens)


def seed_of(seed: int, *, validate: bool) -> int:
    """Return the seed of all samples; a validation has its own, as it may sample prompts of a training step."""
    return -1 - seed if validate else seed


def check_policy_version(batch: DataProto, expected: int) -> None:
    """Refuse a batch that was not sampled from the weights of step `expected`.

    Raises:
        PolicyVersionError: Naming both versions.
    """
    found = batch.meta_info.get("policy_version")
    if found != expected:
        raise PolicyVersionError(
            f"this batch was sampled from policy version {found}, but the policy is at version {expected}: "
            "the last weight sync did not reach the engine"
        )


def count_troubles(samples: DataProto) -> dict[str, Metric]:
    """Return how many responses are empty, aborted or cut off; an episode of several rows is one.

    Args:
        samples: `response_mask (B, R)` as the engine gave it, and `finish_reason`.
    """
    first = sample_rows(samples)
    reasons = samples.non_tensor_batch["finish_reason"][first.numpy()]
    return {
        "rollout/empty_responses": Metric.total(first.sum() - counted_samples(samples).sum()),
        "rollout/aborted_responses": Metric.total((reasons == "abort").sum()),
        "rollout/truncated_responses": Metric.total((reasons == "length").sum()),
    }


def share_known_experts(batch: DataProto) -> None:
    """Let rows that begin alike have the same experts there, in place; see `hrl.routing.known_by_beginning`.

    Args:
        batch: Samples drawn by the same weights, with `routed_experts`.
    """
    width, mask = batch.batch["prompts"].shape[1], batch.batch["attention_mask"].numpy().astype(bool)
    tokens = torch.cat([batch.batch["prompts"], batch.batch["responses"]], dim=1).numpy()
    known = list(batch.non_tensor_batch[ROUTED_EXPERTS])
    known = known_by_beginning([row[of] for row, of in zip(tokens[:, :width], mask[:, :width], strict=True)], known)
    if "turn_index" in batch.batch:  # what an engine had in its cache may reach into later turns
        known = known_by_beginning([row[of] for row, of in zip(tokens, mask, strict=True)], known)
    batch.non_tensor_batch[ROUTED_EXPERTS] = object_column(known)


def take_baselines(batch: DataProto, scores: Tensor, kept: Tensor) -> tuple[DataProto, dict[str, Metric]]:
    """Take the greedy rows out of a scored batch and give their scores to the samples of the same prompt.

    The greedy response of a prompt is the baseline of its samples (ReMax, arXiv:2310.10505). If the reward function
    left the greedy row out, there is no baseline, and the samples of that prompt train nothing.

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
    greedy &= sample_rows(batch)
    scored = greedy & kept
    lengths = lengths_of(batch)[1][greedy]
    return samples, {
        "reward/baseline_mean": Metric.mean(scores[scored].sum(), scored.sum()),
        "reward/baselines_left_out": Metric.total((greedy & ~kept).sum()),
        "response_length/greedy_mean": Metric.mean(lengths.sum(), len(lengths)),
    }
