"""Tokens for experts: a mixture whose experts lie on several ranks, each with whole ones and rows of its own.

Each rank of an *expert group* runs its own packed row through all of the model but the experts. A token goes to the
ranks that have the experts it has chosen, and what these make of it comes back::

    (T, H), k choices each   --all-to-all-->   (R, H), for this rank's experts   --experts, all-to-all-->   (T * k, H)

R is as large as the routers say. Gradients go the same ways back, so an expert's are those of all rows of the group.

Lepikhin et al. 2020, "GShard: scaling giant models with conditional computation and automatic sharding",
https://arxiv.org/abs/2006.16668.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hrl.models.ops.tensor_parallel import WeightGroup


def exchanged_experts(
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    states: Tensor,
    chosen: Tensor,
    weights: Tensor,
    *,
    num_experts: int,
    group: WeightGroup,
) -> Tensor:
    """Return the weighted sum of what each token's experts make of it, wherever they are; every rank calls it.

    Three collectives in the forward: how many tokens go where, the tokens, and what was made of them.

    Args:
        compute: This rank's experts: from tokens `(R, H)`, for each the place of one expert among this rank's `(R, 1)`,
            and a weight `(R, 1)`, to `(R, H)`.
        states: `(T, H)`, tokens of this rank.
        chosen: `(T, k)` int64, each token's experts.
        weights: `(T, k)`, of what they make of it, with gradient.
        num_experts: Of the whole layer; a multiple of the number of ranks, of which each has a run of them.
        group: The ranks.

    Returns:
        `(T, H)`.
    """
    each, num_choices = num_experts // group.size, chosen.shape[1]
    experts, order = chosen.flatten().sort(stable=True)
    counts = torch.bincount(experts, minlength=num_experts).view(group.size, each)  # to each rank, for its experts
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts, group=group.processes)
    sent, received = torch.stack([counts.sum(1), coming.sum(1)]).tolist()
    tokens = order // num_choices
    arrived = _Exchange.apply(states[tokens], sent, received, group)
    of_experts = torch.arange(each, device=chosen.device).repeat(group.size).repeat_interleave(coming.flatten())
    if not len(arrived):  # something has to run, so that every rank joins in summing the gradients of its copies
        idle = compute(states[:1], chosen.new_zeros(1, 1), weights.new_zeros(1, 1))
        made = arrived + idle[:0]
    else:
        made = compute(arrived, of_experts[:, None], weights.new_ones(len(arrived), 1))
    back = _Exchange.apply(made, received, sent, group) * weights.flatten()[order, None]
    return torch.zeros_like(states).index_add(0, tokens, back.to(states.dtype))


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that want them: `sent[i]` of them to rank i, `received[i]` from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: WeightGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _moved(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _moved(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _moved(rows: Tensor, sent: list[int], received: list[int], group: WeightGroup) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group.processes)
    return out
