"""The numbers of a step and of a validation, under the names that verl's users know."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hrl.algos.groups import count_groups_without_spread, group_codes
from hrl.algos.masked import rows_with_tokens
from hrl.algos.sample_metrics import best_at_k, maj_at_k, pass_at_k, worst_at_k
from hrl.batching.planner import lengths_of
from hrl.metrics import validation_of
from hrl.protocol import DataProto
from hrl.reward.parts import numeric_parts
from hrl.trainer.ppo.samples import counted_samples, sample_rows, sample_sums


def _spread(values: torch.Tensor, mean: str, largest: str, smallest: str) -> dict[str, float]:
    """Return mean, maximum and minimum under these names; nothing where there is no value."""
    if values.numel() == 0:
        return {}
    return {mean: float(values.float().mean()), largest: float(values.max()), smallest: float(values.min())}


def _explained_variance(values: torch.Tensor, returns: torch.Tensor) -> dict[str, float]:
    """Return the share of the returns' variance that the critic explains; undefined where they do not vary."""
    variance = returns.float().var(unbiased=False) if returns.numel() else torch.zeros(())
    if variance == 0:
        return {}
    unexplained = (returns - values).float().var(unbiased=False)
    return {"critic/vf_explained_var": float(1 - unexplained / variance)}


def _length_metrics(batch: DataProto) -> dict[str, float]:
    """Return prompt and response lengths, and the share of them that hit their limit or stayed empty."""
    prompt_lens, response_lens = lengths_of(batch)
    prompt_width = batch.batch["attention_mask"].shape[-1] - batch.batch["responses"].shape[-1]
    # A response that ends by itself in the very last column was not cut: the sampler knows, the length does not.
    cut = torch.tensor([reason == "length" for reason in batch.non_tensor_batch["finish_reason"]])[sample_rows(batch)]
    return {
        **_spread(response_lens, "response_length/mean", "response_length/max", "response_length/min"),
        **_spread(prompt_lens, "prompt_length/mean", "prompt_length/max", "prompt_length/min"),
        "response_length/clip_ratio": float(cut.float().mean()),
        "prompt_length/clip_ratio": float((prompt_lens == prompt_width).float().mean()),
        "response/aborted_ratio": float((response_lens == 0).float().mean()),
    }


def _score_metrics(batch: DataProto, counted: torch.Tensor) -> dict[str, float]:
    """Return scores, what shaping made of them, and groups without spread, over the samples `counted (B,)`."""
    columns = batch.batch
    trained_on = sample_sums(batch, columns["token_level_scores"].sum(-1))
    scores = columns.get("plain_scores", trained_on)
    metrics = _spread(scores[counted], "critic/score/mean", "critic/score/max", "critic/score/min")
    if not counted.any():
        return metrics
    metrics["reward/mean"] = metrics["critic/score/mean"]
    metrics["reward/std"] = float(scores[counted].float().std(unbiased=False))
    is_same = torch.equal
    if "turn_index" in columns:  # rewards of several turns are added up in another order on each side
        is_same = functools.partial(torch.allclose, rtol=1e-5, atol=1e-6)
    if not is_same(scores[counted].float(), trained_on[counted].float()):
        metrics["reward/shaped_mean"] = float(trained_on[counted].float().mean())
        metrics["reward/shaped_std"] = float(trained_on[counted].float().std(unbiased=False))
    groups = group_codes(batch.non_tensor_batch["uid"])
    metrics["rollout/zero_variance_groups"] = count_groups_without_spread(trained_on, groups, counted)
    return metrics


def compute_data_metrics(batch: DataProto, use_critic: bool = True, *, has_advantages: bool = True) -> dict[str, float]:
    """Describe the batch of one step: scores, rewards, advantages, returns, values and lengths.

    The score of a sample is what its reward functions gave (a reward model where there is none), as in validation. What
    shaping, a length penalty or a model beside the functions made of it has metrics of its own, where it is another.

    Rows without a trained token (an empty response, or one that the reward function left out) are not part of the score
    and reward statistics; empty ones are counted in `response/aborted_ratio`. Token statistics run over trained tokens
    (`response_mask`) only. An episode of several rows is one sample; lengths are those of rows, with what an
    environment said.

    Args:
        batch: The step's samples; `plain_scores (B,)` are their scores, or else the sums of `token_level_scores`.
            Without either nothing is said of scores.
        use_critic: Also describe `values` and how much of the returns they explain.
        has_advantages: Also describe `token_level_rewards`, `advantages` and `returns`.

    Returns:
        Metric name to number, e.g. `critic/score/mean`, `reward/mean`, `response_length/clip_ratio`;
        `rollout/zero_variance_groups` counts by what is trained on, which is what estimators compare.
    """
    columns = batch.batch
    trained = columns["response_mask"].bool()
    counted = counted_samples(batch, rows_with_tokens(trained))
    metrics = _length_metrics(batch)

    if "token_level_scores" in columns.keys():
        metrics |= _score_metrics(batch, counted)
    if has_advantages and "token_level_rewards" in columns.keys():
        rewards = sample_sums(batch, columns["token_level_rewards"].sum(-1))[counted]
        metrics |= _spread(rewards, "critic/rewards/mean", "critic/rewards/max", "critic/rewards/min")
    for name in ("advantages", "returns") if has_advantages else ():
        if name in columns.keys():
            of_tokens = columns[name][trained]
            metrics |= _spread(of_tokens, f"critic/{name}/mean", f"critic/{name}/max", f"critic/{name}/min")
    if use_critic:
        values = columns["values"][trained]
        metrics |= _spread(values, "critic/values/mean", "critic/values/max", "critic/values/min")
        metrics |= _explained_variance(values, columns["returns"][trained])
    return metrics


# ---------------------------------------------------------------------------------------------- validation


#: Counters of rewards and rollouts that a validation passes on.
_TROUBLES = (
    "reward/num_errors",
    "reward/num_timeouts",
    "reward/num_crashes",
    "reward/num_retries",
    "rollout/empty_responses",
    "rollout/aborted_responses",
    "rollout/truncated_responses",
    "episode/num_failed",
    "episode/num_late",
    "episode/num_replayed",
)
_EPISODES = ("env/", "episode/end/", "episode/turns/", "episode/truncated_ratio", "serve/")
CORRECT_AT = 1.0
"""The least score of a correct answer, where the reward function does not say which answers are correct."""


def validation_troubles(counters: Mapping[str, float]) -> dict[str, float]:
    """Return what went wrong in a validation, as `val/<counter>`; a counter that is zero is absent.

    Args:
        counters: Of the rewards (`reward/num_timeouts`) and the engines (`rollout/truncated_responses`).
    """
    return {f"val/{name}": counters[name] for name in _TROUBLES if counters.get(name, 0.0) > 0}


def validation_episodes(counters: Mapping[str, float]) -> dict[str, float]:
    """Return how the episodes of a validation went, as `val/env/<name>`, `val/serve/calls` and the like."""
    return {f"val/{name}": value for name, value in counters.items() if name.startswith(_EPISODES)}


def count_left_out(batch: DataProto, kept: torch.Tensor) -> dict[str, float]:
    """Return `val/<source>/skipped` for every source that lost validation samples to the reward function.

    Args:
        batch: Samples, B rows, with non-tensor `data_source`.
        kept: (B,) bool, which of them have a score.
    """
    counts = Counter(batch.non_tensor_batch["data_source"][~kept.numpy()].tolist())
    return {f"{validation_of(source)}/skipped": float(count) for source, count in counts.items()}


def validation_metrics(batch: DataProto, num_samples: int, seed: int = 0) -> dict[str, float]:
    """Return what the samples of a validation say in numbers, source by source.

    Samples of one `uid` are the answers to one prompt: n of them, or fewer if some have no score. The names are
    those of n whatever is missing. A metric is the mean over the prompts of its source, each judged by the samples it
    has: best, worst and maj are expectations over k draws with replacement from them; pass@k leaves out a prompt with
    fewer than k, since there is no estimate of k draws without replacement from them.

    Args:
        batch: Samples that have a score, B rows, with `token_level_scores (B, R)`; non-tensor `data_source`, `uid` and
            `reward_parts`.
        num_samples: n, how many samples were drawn per prompt.
        seed: Seed of the bootstrap's own generator, so that validation changes no other random state.

    Returns:
        `val/<source>/{mean,std,best,worst,pass,maj}@<k>` and `val/<source>/n`, the number of prompts; and
        `val/<source>/<part>/mean@n` of every part of the reward, over the samples that have it, with
        `val/<source>/<part>/missing`, the number of samples that do not, where there are any. Only a source has an `n`.

    Raises:
        ValueError: A score is not finite, or a prompt has more than n samples.
    """
    sources, uids = (batch.non_tensor_batch[name].tolist() for name in ("data_source", "uid"))
    scores = batch.batch["token_level_scores"].sum(-1).double().numpy()
    for row in np.flatnonzero(~np.isfinite(scores)):
        raise ValueError(f"validation sample {row} (source {sources[row]!r}) has the score {scores[row]}")
    prompts: dict[tuple[str, Hashable], list[int]] = {}
    for row, key in enumerate(zip(sources, uids, strict=True)):
        prompts.setdefault(key, []).append(row)
    alike: dict[tuple[str, int], list[list[int]]] = {}
    for (source, uid), rows in prompts.items():
        if len(rows) > num_samples:
            raise ValueError(f"prompt {uid} (source {source!r}) has {len(rows)} samples, but n is {num_samples}")
        alike.setdefault((source, len(rows)), []).append(rows)

    parts = batch.non_tensor_batch["reward_parts"].tolist()
    answers, correct = answers_voted_on(parts), answers_that_are_correct(parts)
    is_correct = scores >= CORRECT_AT if correct is None else np.array(correct, dtype=bool)
    rng = np.random.default_rng(seed)
    collected: dict[str, list[np.ndarray]] = {}
    for (source, _), samples in alike.items():
        codes = None if answers is None else np.array([_codes([answers[row] for row in rows]) for rows in samples])
        picked = np.array(samples)
        found = _per_prompt(validation_of(source), scores[picked], is_correct[picked], codes, num_samples, rng)
        for name, values in found.items():
            collected.setdefault(name, []).append(values)
    counts = Counter(source for source, _ in prompts)
    return (
        {name: float(np.concatenate(values).mean()) for name, values in collected.items()}
        | {f"{validation_of(source)}/n": float(count) for source, count in counts.items()}
        | _of_parts(prompts, parts, num_samples)
    )


def _of_parts(
    prompts: Mapping[tuple[str, Hashable], Sequence[int]], parts: Sequence[Mapping[str, Any]], n: int
) -> dict[str, float]:
    """Return the mean of every part over the prompts of each source that have it.

    Args:
        prompts: Source and uid → rows.
        parts: The parts of each row.
        n: Samples per prompt, for the names.
    """
    metrics: dict[str, float] = {}
    for name, column in numeric_parts(parts).items():
        means: dict[str, list[float]] = {}
        missing: Counter[str] = Counter()
        for (source, _), rows in prompts.items():
            values = [value for value in (column[row] for row in rows) if value is not None]
            missing[source] += len(rows) - len(values)
            if values:
                means.setdefault(source, []).append(sum(values) / len(values))
        for source, of_prompts in means.items():
            metrics[f"{validation_of(source)}/{name}/mean@{n}"] = sum(of_prompts) / len(of_prompts)
            if missing[source]:
                metrics[f"{validation_of(source)}/{name}/missing"] = float(missing[source])
    return metrics


def _per_prompt(
    source: str, scores: np.ndarray, correct: np.ndarray, answers: np.ndarray | None, n: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return the metrics `(P,)` of P prompts, m of whose n samples have a score, from columns `(P, m)`."""
    scored = scores.shape[1]
    metrics = {f"{source}/mean@{n}": scores.mean(axis=1)}
    if n > 1:
        metrics[f"{source}/std@{n}"] = scores.std(axis=1)
    sizes, num_correct = _sample_sizes(n), correct.sum(axis=1)
    majority = {} if answers is None else maj_at_k(answers, scores, sizes, rng)
    for k in sizes:
        metrics[f"{source}/best@{k}"] = best_at_k(scores, k)
        metrics[f"{source}/worst@{k}"] = worst_at_k(scores, k)
        if k <= scored:  # there are no more draws without replacement
            metrics[f"{source}/pass@{k}"] = pass_at_k(num_correct, scored, k)
        if k in majority:
            metrics[f"{source}/maj@{k}"] = majority[k]
    return metrics


def _sample_sizes(num_samples: int) -> list[int]:
    """Return the powers of two below `num_samples`, then `num_samples` itself: 2, 4, 8 for 8; nothing for 1."""
    sizes = [2**i for i in range(1, num_samples.bit_length()) if 2**i < num_samples]
    return [*sizes, num_samples] if num_samples > 1 else []


def _codes(answers: Sequence[Hashable]) -> list[int]:
    """Number the different answers to one prompt from 0."""
    table = {answer: code for code, answer in enumerate(dict.fromkeys(answers))}
    return [table[answer] for answer in answers]


def answers_voted_on(reward_parts: Sequence[Mapping[str, Hashable]]) -> list[Hashable] | None:
    """Return what each sample answered: the `pred` that a reward function returned beside its score, as in verl.

    Returns:
        One answer per sample, None being an answer too; None (no majority vote) where any sample has none.
    """
    has_all = len(reward_parts) > 0 and all("pred" in part for part in reward_parts)
    return [part["pred"] for part in reward_parts] if has_all else None


def answers_that_are_correct(reward_parts: Sequence[Mapping[str, Hashable]]) -> list[bool] | None:
    """Return which samples are correct: those with an `acc` of 1 (or True) beside the score, as in verl.

    Returns:
        One bool per sample; None (scores decide) where any sample has no such number.
    """
    values = [part.get("acc") for part in reward_parts]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return [value >= CORRECT_AT for value in numbers] if values and len(numbers) == len(values) else None
