"""Adafactor on sharded parameters: of a matrix's second moments it keeps the means of rows and of columns.

The formulas are those of `torch.optim.Adafactor`, which can't be given shards: it takes the norm of a shard for that of
the parameter, and its column means don't add up over ranks. (Shazeer and Stern 2018, "Adafactor: adaptive learning
rates with sublinear memory cost"; torch's documentation says where it departs from the paper.) The learning rate is
relative: at step t a parameter moves by `min(lr, 1 / sqrt(t))` of the root mean square of its weights, at most on
average.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from hrl.workers.engine.host_memory import local
from hrl.workers.engine.update_rule import BUCKET_ELEMENTS, UpdateRule, like_rows, shard_group, widened

#: torch's defaults: decay of the second moments' averages, least root mean square of a weight, largest of an update.
_BETA2_DECAY = -0.8
_LEAST_SCALE = 1e-3
_LARGEST_UPDATE = 1.0


class Adafactor(UpdateRule):
    """Adafactor.

    Args:
        names: Names of the trained parameters.
        weight_decay: Decoupled weight decay.
        device: Where parameters and gradients are during a step.
        seed: Of the run, by which bfloat16 masters are rounded.
        bucket_elements: See `BUCKET_ELEMENTS`.

    Attributes:
        state: `row_var (..., R, 1)` and `col_var (..., 1, C)` of parameters `(..., R, C)`, `variance (N,)` of vectors.
            The columns of a matrix are whole on every rank; all else is sharded as the parameter is.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        *,
        weight_decay: float,
        device: torch.device,
        seed: int = 0,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        super().__init__(names, device=device, seed=seed)
        self._weight_decay = weight_decay
        self._bucket_elements = bucket_elements
        self._group = next((group for p in names if (group := shard_group(p)) is not None), None)
        #: Where the group sums: of state in host memory the device, as a group of a mesh may be its backend's alone.
        self._meets_on = next((p.device_mesh.device_type for p in names if isinstance(p, DTensor)), device.type)
        self.state = {parameter: self._zeros(parameter) for parameter in names}

    def _zeros(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        shape, dtype, device = tuple(parameter.shape), self._dtype, self._device
        if parameter.dim() < 2:
            return {"variance": like_rows(parameter, shape, dtype, device)}
        rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
        if parameter.dim() > 2:  # sharded along another dimension than the two that are averaged over
            return {
                "row_var": like_rows(parameter, rows, dtype, device),
                "col_var": like_rows(parameter, columns, dtype, device),
            }
        whole = torch.zeros(columns, dtype=dtype, device=device)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            whole = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False).to(device)
        return {"row_var": like_rows(parameter, rows, dtype, device), "col_var": whole}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        moved = self._take_step()
        if not moved:
            return
        weights = self._totals([_sum_of_squares(local(p.detach())) for p in moved])
        scales = [max(_LEAST_SCALE, math.sqrt(square / p.numel())) for p, square in zip(moved, weights, strict=True)]
        self._average(moved)
        rows = [self.state[p]["row_var"] for p in moved if p.dim() == 2]
        means = iter(self._totals([local(row).double().sum() for row in rows]))
        mean_rows = {p: next(means) / p.shape[0] for p in moved if p.dim() == 2}
        for bucket in self._buckets(list(zip(moved, scales, strict=True))):
            updates = [self._update(parameter, mean_rows.get(parameter)) for parameter, _ in bucket]
            sizes = self._totals([_sum_of_squares(update) for update in updates])
            for (parameter, scale), update, size in zip(bucket, updates, sizes, strict=True):
                largest = max(1.0, math.sqrt(size / parameter.numel()) / _LARGEST_UPDATE)
                rate = scale * min(lr, 1.0 / math.sqrt(self.steps[parameter]))
                weight = local(parameter.detach())
                wide = widened(weight)
                if self._weight_decay:
                    wide.mul_(1 - lr * self._weight_decay)
                wide.add_(update, alpha=-rate / largest)
                self._round_back(parameter, weight, wide)

    def _average(self, moved: Sequence[nn.Parameter]) -> None:
        """Let the state take in the squares of the gradients."""
        columns = []
        for parameter in moved:
            grad, state, share = self._grad(parameter), self.state[parameter], self._share(parameter)
            if parameter.dim() < 2:
                local(state["variance"]).lerp_(grad * grad, share)
                continue
            of_rows = torch.norm(grad, dim=-1, keepdim=True).square_().div_(grad.size(-1))
            local(state["row_var"]).lerp_(of_rows, share)
            of_columns = torch.norm(grad, dim=-2, keepdim=True).square_()
            if parameter.dim() == 2:
                columns.append(of_columns)
            else:
                local(state["col_var"]).lerp_(of_columns.div_(grad.size(-2)), share)
        whole = iter(self._sums(columns))
        for parameter in moved:
            if parameter.dim() == 2:
                mean = next(whole).div_(parameter.shape[0])
                local(self.state[parameter]["col_var"]).lerp_(mean, self._share(parameter))

    def _update(self, parameter: nn.Parameter, mean_row: float | None) -> Tensor:
        """Return this rank's part of the gradient over the root of its second moments, before it is clipped.

        Args:
            parameter: Whose.
            mean_row: Of a matrix, the mean of its rows' state on all ranks.
        """
        state = {name: local(tensor) for name, tensor in self.state[parameter].items()}
        least = torch.finfo(self._dtype).eps
        if parameter.dim() < 2:
            estimate = state["variance"].clone()
        else:
            estimate = state["row_var"] @ state["col_var"]
            if mean_row is None:
                estimate.div_(state["row_var"].mean(dim=-2, keepdim=True).clamp_(min=least))
            else:
                estimate.div_(max(mean_row, least))
        return estimate.clamp_(min=least * least).rsqrt_().mul_(self._grad(parameter))

    def _grad(self, parameter: nn.Parameter) -> Tensor:
        assert parameter.grad is not None, "parameters without a gradient are left out before"
        return local(parameter.grad).to(self._dtype)

    def _share(self, parameter: nn.Parameter) -> float:
        """Return the weight of this step in the averages."""
        return float(self.steps[parameter] ** _BETA2_DECAY)

    def _sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sum of each tensor over the ranks that share a copy; one collective for all."""
        if self._group is None or not tensors:
            return list(tensors)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        home = flat.device
        if home.type != self._meets_on:
            flat = flat.to(self._meets_on)
        dist.all_reduce(flat, group=self._group)
        flat = flat.to(home)
        sizes = [tensor.numel() for tensor in tensors]
        return [part.view(tensor.shape) for part, tensor in zip(flat.split(sizes), tensors, strict=True)]

    def _totals(self, numbers: Sequence[Tensor]) -> list[float]:
        """Return the sum of each number over the same ranks; the host waits for them once."""
        found: list[float] = self._sums([torch.stack(list(numbers))])[0].tolist() if numbers else []
        return found

    def _buckets(self, moved: list[tuple[nn.Parameter, float]]) -> Iterator[list[tuple[nn.Parameter, float]]]:
        """Yield parameters whose updates are held together, the same on every rank."""
        bucket: list[tuple[nn.Parameter, float]] = []
        size = 0
        ranks = 1 if self._group is None else self._group.size()
        for parameter, scale in moved:
            # By the size of the largest shard, which every rank knows.
            elements = -(-parameter.shape[0] // ranks) * (parameter.numel() // max(1, parameter.shape[0]))
            if bucket and size + elements > self._bucket_elements:
                yield bucket
                bucket, size = [], 0
            bucket.append((parameter, scale))
            size += elements
        if bucket:
            yield bucket


def _sum_of_squares(numbers: Tensor) -> Tensor:
    """Return the sum in float64, with one copy of the numbers in it."""
    wide = numbers.double()
    return (wide.square() if wide is numbers else wide.square_()).sum()
