"""Around a sampling call: which rows go in, and whether what comes back may be trained on."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np

from hrl.protocol import DataProto


class PolicyVersionError(RuntimeError):
    """A batch was sampled from other weights than the ones it would train."""


def prompt_batch(prompts: DataProto, rollout: Any, *, step: int, validate: bool = False) -> DataProto:
    """Repeats every prompt once per sample and stamps the rows with group, sample number and sampling settings.

    Args:
        prompts: one row per prompt, from ``RLHFDataset.batch``; its ``index`` tells prompts apart.
        rollout: the ``rollout`` part of the configuration.
        step: the trainer's step, which sampling seeds derive from.
        validate: use ``val_kwargs`` in place of the training settings.

    Returns:
        ``n`` consecutive rows per prompt, with non-tensor ``uid`` (B,) and ``sample_index`` (B,).
    """
    settings = rollout.val_kwargs if validate else rollout
    greedy = validate and not settings.do_sample
    # Derived, not random: the same run draws the same samples when it is started again. From the number in the data
    # set, not in the batch: the prompts of a validation in several batches stay apart.
    prompts.non_tensor_batch["uid"] = np.array(
        [
            str(uuid.uuid5(uuid.NAMESPACE_OID, f"{step}/{validate}/{index}"))
            for index in prompts.non_tensor_batch["index"]
        ],
        dtype=object,
    )
    rows = prompts.repeat(settings.n, interleave=True)
    rows.non_tensor_batch["sample_index"] = np.array([i % settings.n for i in range(len(rows))], dtype=object)
    rows.meta_info |= {
        "step": step,
        "validate": validate,
        "temperature": 0.0 if greedy else settings.temperature,
    }
    return rows


def check_policy_version(batch: DataProto, expected: int) -> None:
    """Refuses a batch that was not sampled from the weights of step ``expected``.

    Raises:
        PolicyVersionError: naming both versions.
    """
    found = batch.meta_info.get("policy_version")
    if found != expected:
        raise PolicyVersionError(
            f"this batch was sampled from policy version {found}, but the policy is at version {expected}: "
            "the last weight sync did not reach the engine"
        )


def sampler_drift(batch: DataProto) -> dict[str, float]:
    """How far the trainer's log-probs of the sampled tokens are from the sampler's: mean, p99 and maximum of |diff|."""
    if "rollout_log_probs" not in batch.batch:
        return {}
    mask = batch.batch["response_mask"].bool()
    difference = (batch.batch["old_log_probs"] - batch.batch["rollout_log_probs"])[mask].abs()
    if difference.numel() == 0:
        return {}
    return {
        "rollout/logprob_diff_mean": float(difference.mean()),
        "rollout/logprob_diff_p99": float(np.quantile(difference.numpy(), 0.99)),
        "rollout/logprob_diff_max": float(difference.max()),
    }
