"""What a step and a validation say in numbers, under the names that verl's users know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
import torch

from hrl.algos.groups import count_groups_without_spread, group_codes
from hrl.algos.sample_metrics import best_at_k, maj_at_k, pass_at_k, worst_at_k
from hrl.batching.lengths import lengths_of
from hrl.protocol import DataProto
from hrl.report.phases import PHASES


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    """Mean, maximum and minimum under verl's names; nothing where there is no value."""
    if values.numel() == 0:
        return {}
    kinds = {"mean": values.float().mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{kind}": float(value) for kind, value in kinds.items()}


def _explained_variance(values: torch.Tensor, returns: torch.Tensor) -> dict[str, float]:
    """Share of the returns' variance that the critic explains; undefined where the returns don't vary."""
    variance = returns.float().var(unbiased=False) if returns.numel() else torch.zeros(())
    if variance == 0:
        return {}
    unexplained = (returns - values).float().var(unbiased=False)
    return {"critic/vf_explained_var": float(1 - unexplained / variance)}


def _length_metrics(batch: DataProto) -> dict[str, float]:
    """Prompt and response lengths, and the share of them that hit their limit or stayed empty."""
    prompt_lens, response_lens = lengths_of(batch)
    reasons = batch.non_tensor_batch.get("finish_reason")
    prompt_width = batch.batch["attention_mask"].shape[-1] - batch.batch["responses"].shape[-1]
    at_limit = response_lens == batch.batch["responses"].shape[-1]
    # A response that ends by itself at the very last column was not cut: the sampler knows, the length does not.
    cut = at_limit if reasons is None else torch.tensor([reason == "length" for reason in reasons])
    metrics = _spread("response_length", response_lens) | _spread("prompt_length", prompt_lens)
    metrics["response_length/clip_ratio"] = float(cut.float().mean())
    metrics["prompt_length/clip_ratio"] = float((prompt_lens == prompt_width).float().mean())
    metrics["response/aborted_ratio"] = float((response_lens == 0).float().mean())
    return metrics


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Describe the batch of one step: scores, rewards, advantages, returns, values and lengths.

    Rows without a trained token (an empty response, or one that the reward function left out) have no part in the
    score and reward statistics; empty ones are counted in `response/aborted_ratio`. Token statistics run over trained
    tokens (`response_mask`) only.

    Args:
        batch: The batch after the advantages were computed; columns that a run does not have are left out.
        use_critic: Also describe `values` and how much of the returns they explain.

    Returns:
        Metric name to number, e.g. `critic/score/mean`, `reward/mean`, `response_length/clip_ratio`,
        `rollout/zero_variance_groups`.
    """
    columns = batch.batch
    trained = columns["response_mask"].bool()
    counted = trained.any(-1)
    metrics = _length_metrics(batch)

    if "token_level_scores" in columns:
        scores = columns["token_level_scores"].sum(-1)
        metrics |= _spread("critic/score", scores[counted])
        if counted.any():
            metrics["reward/mean"] = metrics["critic/score/mean"]
            metrics["reward/std"] = float(scores[counted].float().std(unbiased=False))
        if "uid" in batch.non_tensor_batch and counted.any():
            groups = group_codes(batch.non_tensor_batch["uid"])
            metrics["rollout/zero_variance_groups"] = count_groups_without_spread(scores, groups, counted)
    if "token_level_rewards" in columns:
        metrics |= _spread("critic/rewards", columns["token_level_rewards"].sum(-1)[counted])
    for name in ("advantages", "returns"):
        if name in columns:
            metrics |= _spread(f"critic/{name}", columns[name][trained])
    if use_critic:
        metrics |= _spread("critic/values", columns["values"][trained])
        metrics |= _explained_variance(columns["values"][trained], columns["returns"][trained])
    return metrics


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Names the seconds of every phase, and relates them to the tokens the phase worked on.

    Args:
        batch: The batch of the step.
        timing_raw: Phase to seconds.

    Returns:
        `timing_s/<phase>` for every phase, `timing_per_token_ms/<phase>` for those that work on tokens. Generation
        is related to response tokens, every other phase to all tokens.
    """
    prompt_lens, response_lens = lengths_of(batch)
    response_tokens = float(response_lens.sum())
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    num_tokens = {"response": response_tokens, "all": response_tokens + float(prompt_lens.sum())}
    for phase in PHASES:
        if phase.tokens is not None and phase.name in timing_raw and num_tokens[phase.tokens] > 0:
            metrics[f"timing_per_token_ms/{phase.name}"] = timing_raw[phase.name] * 1000 / num_tokens[phase.tokens]
    return metrics


def compute_throughput_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Tokens of the step, its seconds, and tokens per second and device.

    Args:
        batch: The batch of the step.
        timing_raw: Phase to seconds, with `step` for the whole step.
        n_gpus: Devices that the step used (processes, on a machine without GPUs).
    """
    prompt_lens, response_lens = lengths_of(batch)
    total_num_tokens = float(prompt_lens.sum() + response_lens.sum())
    return {
        "perf/total_num_tokens": total_num_tokens,
        "perf/time_per_step": timing_raw["step"],
        "perf/throughput": total_num_tokens / (timing_raw["step"] * n_gpus),
    }


def _sample_sizes(num_samples: int) -> list[int]:
    """Powers of two below `num_samples`, then `num_samples` itself: 8 gives 2, 4, 8."""
    sizes = [2**i for i in range(1, num_samples.bit_length()) if 2**i < num_samples]
    return [*sizes, num_samples] if num_samples > 1 else []


def _answer_codes(answers: Sequence[Hashable]) -> list[int]:
    """Numbers the different answers to one prompt 0, 1, 2, ..."""
    table = {answer: code for code, answer in enumerate(dict.fromkeys(answers))}
    return [table[answer] for answer in answers]


def _per_prompt(
    scores: np.ndarray, correct: np.ndarray, answers: np.ndarray | None, n: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return the metrics of P prompts of whose n samples m are scored, `(P,)`, from columns `(P, m)`.

    M is at most n.
    """
    scored = scores.shape[1]
    metrics = {f"mean@{n}": scores.mean(axis=1)}
    if n > 1:
        metrics[f"std@{n}"] = scores.std(axis=1)
    sizes, num_correct = _sample_sizes(n), correct.sum(axis=1)
    majority = {} if answers is None else maj_at_k(answers, scores, sizes, rng)
    for k in sizes:
        metrics[f"best@{k}"] = best_at_k(scores, k)
        metrics[f"worst@{k}"] = worst_at_k(scores, k)
        if k <= scored:  # of draws without replacement there can be no more
            metrics[f"pass@{k}"] = pass_at_k(num_correct, scored, k)
        if k in majority:
            metrics[f"maj@{k}"] = majority[k]
    return metrics


#: Counters of rewards and rollouts that a validation passes on.
_TROUBLES = (
    *(f"reward/num_{name}" for name in ("errors", "timeouts", "crashes", "retries")),
    *(f"rollout/{name}_responses" for name in ("empty", "aborted", "truncated")),
)


def validation_troubles(counters: Mapping[str, float]) -> dict[str, float]:
    """Return what went wrong in a validation, as `val/<counter>`; a counter that is zero is absent.

    Args:
        counters: Of the rewards (`reward/num_timeouts`) and the engines (`rollout/truncated_responses`).
    """
    return {f"val/{name}": counters[name] for name in _TROUBLES if counters.get(name, 0.0) > 0}


def count_left_out(data_sources: Sequence[str], kept: Sequence[bool]) -> dict[str, float]:
    """`val/<source>/skipped` for every source of whose validation samples the reward function left some out."""
    left_out = Counter(source for source, keep in zip(data_sources, kept, strict=True) if not keep)
    return {f"val/{source}/skipped": float(count) for source, count in left_out.items()}


def answers_voted_on(reward_parts: Iterable[Mapping[str, Hashable]] | None) -> list[Hashable] | None:
    """Return what each sample answered.

    The `pred` that a reward function returned beside its score, as verl's users do.

    Returns:
        One answer per sample, or None (no majority vote) where any sample has none.
    """
    parts = [] if reward_parts is None else list(reward_parts)
    return [part["pred"] for part in parts] if parts and all("pred" in part for part in parts) else None


CORRECT_AT = 1.0
"""A score from here on is a correct answer, where the reward function does not say which are."""


def answers_that_are_correct(reward_parts: Iterable[Mapping[str, Hashable]] | None) -> list[bool] | None:
    """Return which samples are correct: the `acc` that a reward function returned beside its score, as verl's users do.

    Returns:
        One bool per sample, True for an `acc` of 1 (or True); None (scores decide) where any sample has none.
    """
    values = [] if reward_parts is None else [part.get("acc") for part in reward_parts]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return [value >= CORRECT_AT for value in numbers] if values and len(numbers) == len(values) else None


def compute_validation_metrics(
    data_sources: Sequence[str],
    uids: Sequence[Hashable],
    scores: Sequence[float],
    answers: Sequence[Hashable] | None = None,
    *,
    num_samples: int,
    correct: Sequence[bool] | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Reduces the scored samples of a validation to numbers per data source.

    Samples of one `uid` are the answers to one prompt, n of them or, where some have no score, fewer. The names are
    those of n whatever is missing. A metric is the mean over the prompts of its source, each judged by the samples it
    has: best, worst and maj are expectations over k draws with replacement from them; pass@k leaves a prompt with fewer
    than k out, since there is no estimate of k draws without replacement from them.

    Args:
        data_sources: Source of each sample (N,).
        uids: Prompt of each sample (N,).
        scores: Score of each sample (N,), finite.
        answers: What each sample answered (N,), for the majority vote (a None among them is an answer too); None
            leaves maj@k out.
        num_samples: n, how many samples were drawn per prompt.
        correct: Which samples are correct (N,), for pass@k; None takes those with a score of `CORRECT_AT` or more.
        seed: Seed of the bootstrap's own generator, so that validation moves no other random state.

    Returns:
        `val/<source>/{mean,std,best,worst,pass,maj}@<k>` and `val/<source>/n`, the number of prompts.

    Raises:
        ValueError: The sequences differ in length, a score is not finite, or a prompt has more than n samples.
    """
    lengths = {len(data_sources), len(uids), len(scores)}
    lengths |= {len(column) for column in (answers, correct) if column is not None}
    if len(lengths) > 1:
        raise ValueError(
            f"validation samples disagree in number: {sorted(lengths)} sources, prompts, scores, answers or verdicts"
        )
    values_of = np.asarray(scores, dtype=np.float64)
    broken = np.flatnonzero(~np.isfinite(values_of))
    if len(broken):
        row = int(broken[0])
        raise ValueError(f"validation sample {row} (source {data_sources[row]!r}) has the score {scores[row]}")

    prompts: dict[tuple[str, Hashable], list[int]] = {}
    for row, key in enumerate(zip(data_sources, uids, strict=True)):
        prompts.setdefault(key, []).append(row)
    for (source, uid), rows in prompts.items():
        if len(rows) > num_samples:
            raise ValueError(f"prompt {uid} (source {source!r}) has {len(rows)} samples, but n is {num_samples}")
    alike: dict[tuple[str, int], list[list[int]]] = {}
    for (source, _), rows in prompts.items():
        alike.setdefault((source, len(rows)), []).append(rows)

    rng = np.random.default_rng(seed)
    is_correct = values_of >= CORRECT_AT if correct is None else np.asarray(correct, dtype=bool)
    collected: dict[str, list[np.ndarray]] = {}
    for (source, _), samples in alike.items():
        codes = None
        if answers is not None:
            codes = np.array([_answer_codes([answers[row] for row in rows]) for rows in samples])
        picked = np.array(samples)
        for name, values in _per_prompt(values_of[picked], is_correct[picked], codes, num_samples, rng).items():
            collected.setdefault(f"val/{source}/{name}", []).append(values)
    counts = Counter(source for source, _ in prompts)
    return {name: float(np.concatenate(values).mean()) for name, values in collected.items()} | {
        f"val/{source}/n": float(count) for source, count in counts.items()
    }
