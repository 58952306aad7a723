"""Exchanges of tensor parallelism, in which the ranks of a group compute parts of every matrix product of one row.

The ranks of a *tensor group* run the same packed row. Each holds a part of every large weight: columns of its product
(`colwise`: a share of the heads, of the MLP's width, of the vocabulary) or rows of it (`rowwise`, whose partial
products are added up over the group). What is not cut (norms, routers, the residual stream) every rank computes for
itself.

**Gradients.** All ranks of a group compute the same loss. Taken together they differentiate `1 / n` times the sum of
their n losses, each through its own part of the computation: the adjoint of a sum over the group is a sum over the
group, and everything else has the backward that it has anyway. So

- a rank's gradient of a part of a weight is whole;
- its gradient of anything that every rank has (the residual stream, a norm's weight) is a share, and the shares of the
  group add up to the gradient. The reduction that sums gradients over the rows of all ranks sums them too;
- what is computed from the residual stream without the group's help, and enters the loss directly, weighs `1 / n` on
  each rank (`shared`).

Megatron-LM's operators f and g sum in the backward where the stream enters a colwise product; here the sum stands where
a rowwise product leaves it. There are as many of them, and what lies between needs no care: norms of single heads,
routers and biases get their shares as all else does.

Shoeybi et al. 2019, "Megatron-LM: training multi-billion parameter language models using model parallelism",
https://arxiv.org/abs/1909.08053.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional


@dataclass(frozen=True)
class WeightGroup:
    """Ranks over which weights are cut: a tensor group, or one that shares out experts (`expert_parallel`).

    Attributes:
        mesh: Of one dimension, over which weights are cut.
        size: How many ranks they are: the degree.
        place: Of this rank among them, which says which part of a weight it has.
    """

    mesh: DeviceMesh
    size: int
    place: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> WeightGroup:
        """Return the group of this rank in a mesh of one dimension."""
        return cls(mesh, mesh.size(), mesh.get_local_rank())

    @property
    def processes(self) -> dist.ProcessGroup:
        """Their process group."""
        return self.mesh.get_group()

    def part(self, total: int) -> slice:
        """Return this rank's part of so many rows or columns: the first ranks have one more where they don't divide."""
        # As `torch.chunk`, by which DTensor cuts.
        each = -(-total // self.size)
        return slice(min(total, self.place * each), min(total, (self.place + 1) * each))


def summed(partial: Tensor, group: WeightGroup) -> Tensor:
    """Return the sum over the group, on every rank, and let the gradients add up likewise. One collective each.

    Args:
        partial: Of any shape, the same on every rank. Its memory may be taken for the result.
        group: The ranks.
    """
    return _Sum.apply(partial.contiguous(), group)


def gathered(part: Tensor, total: int, group: WeightGroup) -> Tensor:
    """Return all columns `(..., total)` of which each rank has its part `(..., part)`."""
    mine = group.part(total)
    # Each column is zero on all ranks but one, so a sum puts them together without rounding.
    return summed(functional.pad(part, (mine.start, total - mine.stop)), group)


def shared(result: Tensor, group: WeightGroup) -> Tensor:
    """Return the same, with this rank's share of the gradient: for what every rank computes and the loss reads."""
    return _Share.apply(result, group.size)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: WeightGroup) -> Tensor:
        ctx.group = group
        total = partial.clone()
        dist.all_reduce(total, group=group.processes)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group.processes)
        return total, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, size: int) -> Tensor:
        ctx.size = size
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.size, None
