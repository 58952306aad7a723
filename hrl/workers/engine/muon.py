"""Muon on sharded parameters: the momentum of a layer's matrix, made orthogonal, is its update; AdamW moves the rest.

The formulas are those of `torch.optim.Muon`: momentum 0.95 in Nesterov's form, five Newton-Schulz iterations in
bfloat16 (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"), and an update that is scaled
to the root mean square of AdamW's, so that a learning rate and a weight decay for AdamW serve here too (Liu et al.
2025, "Muon is scalable for LLM training").

An iteration needs the whole matrix. Of as many matrices as there are ranks, each rank gathers one, makes it orthogonal,
and sends every rank its rows back: two exchanges in bfloat16, and no matrix is computed twice. So a rank computes what
a single one would of the same gradients, bit for bit. Experts that are stacked in one parameter are matrices
of their own, and whole on the rank that holds them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hrl.workers.engine.adamw import AdamW
from hrl.workers.engine.host_memory import local
from hrl.workers.engine.update_rule import UpdateRule, like_rows, shard_group, widened

MOMENTUM = 0.95
#: Root mean square of AdamW's updates, over that of a matrix whose singular values are one.
_SCALE = 0.2


class Muon(UpdateRule):
    """Muon for matrices, AdamW for all else.

    Args:
        names: Names of the trained parameters.
        matrices: Names of those that are matrices `(R, C)` of layers, or stacks of them `(E, R, C)`.
        betas: Decay rates of AdamW's moments.
        weight_decay: Decoupled weight decay, of all parameters.
        device: Where parameters and gradients are during a step.
        seed: Of the run, by which bfloat16 masters are rounded.

    Attributes:
        state: `momentum_buffer` of matrices, `exp_avg` and `exp_avg_sq` of others, sharded as the parameter is.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        matrices: Collection[str],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        super().__init__(names, device=device, seed=seed)
        self._weight_decay = weight_decay
        self._matrices = {parameter: name for parameter, name in names.items() if name in matrices}
        others = {parameter: name for parameter, name in names.items() if name not in matrices}
        self._adamw = AdamW(others, betas=betas, weight_decay=weight_decay, device=device, seed=seed)
        self._adamw.steps = self.steps  # there is one count, which a checkpoint sets
        self._group = next((group for p in self._matrices if (group := shard_group(p)) is not None), None)
        momenta = {p: {"momentum_buffer": like_rows(p, p.shape, self._dtype, device)} for p in self._matrices}
        self.state = momenta | self._adamw.state

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self._adamw.step(lr)
        moved = [parameter for parameter in self._matrices if parameter.grad is not None]
        for parameter in moved:
            self.steps[parameter] += 1
        for parameter in moved:
            if parameter.dim() > 2:
                directions = [orthogonal(matrix) for matrix in self._momentum(parameter)]
                self._move(parameter, torch.stack(directions) if directions else None, lr)
        for turn in self._turns([parameter for parameter in moved if parameter.dim() == 2]):
            directions = self._orthogonal([self._momentum(parameter) for parameter in turn], turn)
            for parameter, direction in zip(turn, directions, strict=True):
                self._move(parameter, direction, lr)

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        """Take the gradient into the momentum; return this rank's part of what is to be made orthogonal, bfloat16."""
        assert parameter.grad is not None, "parameters without a gradient are left out before"
        grad, momentum = local(parameter.grad).to(self._dtype), local(self.state[parameter]["momentum_buffer"])
        momentum.lerp_(grad, 1 - MOMENTUM)
        return grad.lerp(momentum, MOMENTUM).bfloat16()

    def _move(self, parameter: nn.Parameter, direction: Tensor | None, lr: float) -> None:
        """Move this rank's part of a parameter against a direction of the same shape."""
        if direction is None or direction.numel() == 0:
            return
        weight = local(parameter.detach())
        wide = widened(weight)
        wide.mul_(1 - lr * self._weight_decay)
        wide.add_(direction, alpha=-lr * (_SCALE * math.sqrt(max(parameter.shape[-2:]))))
        self._round_back(parameter, weight, wide)

    def _turns(self, matrices: Sequence[nn.Parameter]) -> Iterator[Sequence[nn.Parameter]]:
        """Yield as many matrices at a time as there are ranks to compute with."""
        ranks = 1 if self._group is None else self._group.size()
        for start in range(0, len(matrices), ranks):
            yield matrices[start : start + ranks]

    def _orthogonal(self, shards: Sequence[Tensor], turn: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return this rank's rows of the orthogonal matrices; the i-th rank computes the i-th of them.

        Args:
            shards: This rank's rows of each matrix, `(r, C)` bfloat16.
            turn: Their parameters.
        """
        group = self._group
        if group is None:
            return [orthogonal(shard) for shard in shards]
        ranks, mine = group.size(), group.rank()
        sent = [shard.numel() for shard in shards] + [0] * (ranks - len(shards))
        if mine < len(turn):
            rows, columns = turn[mine].shape
            received = [_rows_of(rank, rows, ranks) * columns for rank in range(ranks)]
        else:
            rows, columns, received = 0, 0, [0] * ranks
        whole = _exchanged(torch.cat([shard.reshape(-1) for shard in shards]), sent, received, group)
        if whole.numel():
            whole = orthogonal(whole.view(rows, columns)).reshape(-1)
        back = _exchanged(whole, received, sent, group)
        return [part.view(shard.shape) for part, shard in zip(back.split(sent), shards, strict=False)]


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the nearest matrix `(R, C)` with orthogonal rows or columns, about: all singular values are near one.

    Args:
        matrix: `(R, C)` bfloat16.
    """
    # Of a matrix that is as wide as high at least, torch's Muon takes off a zero parameter exactly that at a rate of
    # one, without momentum and decay. It turns higher ones on their side itself, and would also scale them.
    is_high = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_high else matrix
    zero = nn.Parameter(torch.zeros_like(wide))
    zero.grad = wide
    torch.optim.Muon([zero], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="original").step()
    found = zero.detach().neg_()
    return found.T if is_high else found


def _rows_of(rank: int, rows: int, ranks: int) -> int:
    """Return how many rows of a matrix a rank holds: FSDP cuts as `torch.chunk` does."""
    chunk = -(-rows // ranks)
    return max(0, min(rows, (rank + 1) * chunk) - rank * chunk)


def _exchanged(flat: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return what each rank has sent to this one, `(sum of received,)`."""
    # As bytes, which gloo has too.
    size = flat.itemsize
    out = torch.empty(size * sum(received), dtype=torch.uint8, device=flat.device)
    splits = ([size * count for count in counts] for counts in (received, sent))
    dist.all_to_all_single(out, flat.contiguous().view(torch.uint8), *splits, group=group)
    return out.view(flat.dtype)
