"""Micro-batches under a token budget.

A rank's sequences are cut into micro-batches of at most 16,384 tokens. verl's engine calls `rearrange_micro_batches`:
an unequal Karmarkar-Karp of the sequences' work, anew with one more micro-batch until all are within the budget. hrl
plans the forward pass of one rank (`plan_forward`). Both get the lengths alone: verl's sequences are a nested tensor
without padding, as its engine has them, and picking the rows of each micro-batch, which is in verl's time, is a small
part of it. Both results are checked: every row once, no micro-batch over the budget. `micro-batches` is how many
there are; each is a pass through the model. hrl's are at most one more than the lower bound, tokens over budget.
Lengths are those of `balance`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from bench.harness import Case, Comparison
from bench.peers import VERL
from hrl.batching.planner import MicroBatchLimits, RowLengths, plan_forward

AXIS = "sequences"
SECONDS = 13
THREADS = 1
_BUDGET = 16384
_MicroBatches = list[list[int]]


def cases() -> Iterator[Case]:
    """Yield growth in the number of sequences."""
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    limits = MicroBatchLimits(max_tokens=_BUDGET, max_rows=None, budget_key="ppo_max_token_len_per_gpu")
    for rows, floor in ((64, None), (256, 100.0), (1024, 100.0)):
        random = np.random.default_rng(rows)
        prompts = random.integers(64, 1024, rows)
        lengths = prompts + np.clip(np.exp(random.normal(np.log(1000), 0.8, rows)), 16, 15360).astype(np.int64)
        ids = torch.nested.as_nested_tensor([torch.zeros(n, dtype=torch.int64) for n in lengths], layout=torch.jagged)
        batch = TensorDict({"input_ids": ids}, batch_size=rows)

        def ours(prompts: np.ndarray = prompts, lengths: np.ndarray = lengths) -> _MicroBatches:
            responses = lengths - prompts
            plan = plan_forward(RowLengths.of(prompts, responses, responses, None, False), 1, limits)
            held = plan.rows[0]
            return [[held[place] for place in part] for part in plan.ranks[0].mini_batches[0].micro_batches]

        def verl(batch: TensorDict = batch) -> _MicroBatches:
            return rearrange_micro_batches(batch, max_token_len=_BUDGET)[1]

        def check(a: _MicroBatches, b: _MicroBatches, lengths: np.ndarray = lengths) -> None:
            for parts in (a, b):
                assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
                assert max(lengths[part].sum() for part in parts) <= _BUDGET
            assert len(a) <= -(-lengths.sum() // _BUDGET) + 1

        def numbers(rows: int = rows, ours=ours, verl=verl) -> Iterator[Comparison]:
            yield Comparison(f"{rows} sequences", VERL, "micro-batches", len(ours()), len(verl()), 1.0)

        # verl takes seconds for the larger ones.
        rounds = 7 if rows < 1024 else 3
        yield Case(f"{rows} sequences", VERL, ours, verl, check, floor, rows, rounds=rounds, others=numbers)
