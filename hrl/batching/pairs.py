"""Plans for losses of pairs: both answers of a pair run in one micro-batch, on one rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hrl.batching.plan import BatchPlan, RankPlan
from hrl.batching.planner import Lengths, plan_update
from hrl.batching.rows import counts


def plan_pairs(
    prompt_lens: Lengths,
    response_lens: Lengths,
    trained_tokens: Lengths,
    *,
    world_size: int,
    mini_batch_pairs: int,
    max_tokens: int | None,
    max_pairs: int | None = None,
    epochs: int = 1,
    share_prefix: bool = False,
    shuffle_seed: int | None = None,
    budget_key: str = "data.max_token_len_per_gpu",
) -> BatchPlan:
    """Plan the optimizer steps of a batch of N pairs, rows 2i and 2i + 1 being a pair.

    Args:
        prompt_lens: (2N,) tokens of every prompt, the same for both rows of a pair.
        response_lens: (2N,) tokens of every answer.
        trained_tokens: (2N,) tokens of every answer that are trained on, at least one.
        world_size: Number of ranks.
        mini_batch_pairs: Pairs per optimizer step, over all ranks.
        max_tokens: Hard cap on the tokens of a rank's micro-batch; None only together with `max_pairs`.
        max_pairs: Fixed number of pairs per micro-batch.
        epochs: Passes over the batch.
        share_prefix: Both answers of a pair count (and compute) their prompt once.
        shuffle_seed: Shuffle the pairs before cutting, anew in each epoch; None keeps their order.
        budget_key: The configuration key that an error about `max_tokens` names.

    Returns:
        A plan of rows. `num_groups` counts pairs, the divisor of a loss per pair; `num_sequences` counts answers.

    Raises:
        ValueError: An odd number of rows, an answer without trained tokens, two prompts in a pair, or a pair that alone
            exceeds `max_tokens`; the pair is named.
    """
    if len(prompt_lens) % 2:
        raise ValueError(f"{len(prompt_lens)} rows are no pairs")
    named = {"prompt_lens": prompt_lens, "response_lens": response_lens, "trained_tokens": trained_tokens}
    prompt, response, trained = (
        counts(lens, name, num_rows=len(prompt_lens)).reshape(-1, 2) for name, lens in named.items()
    )
    for wrong, what in (
        (prompt[:, 0] != prompt[:, 1], "has two prompts of different length"),
        ((trained == 0).any(1), "has an answer without a trained token"),
    ):
        if wrong.any():
            raise ValueError(f"pair {int(np.argmax(wrong))} {what}")
    once = prompt[:, 0] if share_prefix else prompt.sum(1)
    tokens = once + response.sum(1)
    if max_tokens is not None and (tokens > max_tokens).any():
        pair = int(np.argmax(tokens > max_tokens))
        raise ValueError(
            f"the answers of pair {pair} have {tokens[pair]} tokens with their prompt, more than the {max_tokens} that "
            f"one micro-batch may hold; set {budget_key} to at least {tokens[pair]}"
        )
    pairs = plan_update(
        once,
        response.sum(1),
        trained.sum(1),
        world_size=world_size,
        mini_batch_rows=mini_batch_pairs,
        epochs=epochs,
        max_tokens=max_tokens,
        max_rows=max_pairs,
        shuffle_seed=shuffle_seed,
        budget_key=budget_key,
    )
    return _both_rows(pairs)


def _both_rows(pairs: BatchPlan) -> BatchPlan:
    """Return a plan of pairs as a plan of their rows: pair i is rows 2i and 2i + 1."""

    def both(items: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(row for item in items for row in (2 * item, 2 * item + 1))

    ranks = [
        RankPlan(
            tuple(
                replace(
                    step,
                    micro_batches=tuple(map(both, step.micro_batches)),
                    num_sequences=2 * step.num_groups,
                )
                for step in rank.mini_batches
            )
        )
        for rank in pairs.ranks
        if rank is not None
    ]
    return BatchPlan(rows=tuple(map(both, pairs.rows)), ranks=tuple(ranks))
