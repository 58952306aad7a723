"""What all optimizers have in common: sharded parameters, state that a checkpoint holds, masters in bfloat16."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hrl.workers.engine.host_memory import local
from hrl.workers.engine.rounding import round_stochastically, rounding_key

#: Elements of weights that an optimizer takes together where it needs memory beside its state: 128 MiB in float32.
BUCKET_ELEMENTS = 1 << 25


class UpdateRule(ABC):
    """How gradients move sharded parameters.

    Args:
        names: Names of the trained parameters.
        device: Where parameters and gradients are during a step.
        seed: Of the run, by which bfloat16 masters are rounded.

    Attributes:
        state: Tensors of each parameter by name, sharded as it is, or whole on every rank. They exist from the start,
            so that a checkpoint has the same keys before and after the first step.
        steps: How many updates the state of each parameter has seen.
        offload: The state is in host memory, and a step computes with it elsewhere.

    Raises:
        ValueError: A parameter's dtype is neither float32, float64 nor bfloat16, or it is bfloat16 and not sharded by
            rows.
    """

    state: dict[nn.Parameter, dict[str, Tensor]]
    offload: bool = False

    def __init__(self, names: Mapping[nn.Parameter, str], *, device: torch.device, seed: int) -> None:
        self._names = names
        self._device = device
        self._seed = seed
        for parameter, name in names.items():
            if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
                raise ValueError(f"{name} is {parameter.dtype}: float32 and bfloat16 weights are trained (model_dtype)")
        self._dtypes = {parameter.dtype for parameter in names}
        self._dtype = torch.float64 if self._dtypes == {torch.float64} else torch.float32  # of the arithmetic
        self.steps = dict.fromkeys(names, 0)
        places = {parameter: place_of(parameter) for parameter in names if parameter.dtype == torch.bfloat16}
        if not all(place.is_run for place in places.values()):
            raise ValueError(
                "bfloat16 masters are rounded by rows: with tensor_parallel_size above 1, model_dtype must be fp32"
            )
        self._first = {parameter: place.first for parameter, place in places.items()}

    @abstractmethod
    def step(self, lr: float) -> None:
        """Update every parameter that has a gradient; others keep weight, state and step count.

        Every rank calls it, with gradients of the same parameters.

        Args:
            lr: The learning rate.
        """

    def _take_step(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient, after counting the step that follows."""
        moved = [parameter for parameter in self._names if parameter.grad is not None]
        for parameter in moved:
            self.steps[parameter] += 1
        return moved

    def _round_back(self, parameter: nn.Parameter, weight: Tensor, number: Tensor, start: int = 0) -> None:
        """Write a weight that was computed in a wider dtype back to where it lies; nothing if it is that weight.

        Args:
            parameter: Whose it is.
            weight: Elements of this rank's shard, bfloat16 unless they are `number` itself.
            number: The same in float32.
            start: The first of them in the flattened shard.
        """
        if number is not weight:
            key = rounding_key(self._seed, self._names[parameter], self.steps[parameter])
            rounded = round_stochastically(number.reshape(-1), key, self._first[parameter] + start)
            weight.copy_(rounded.view(weight.shape))

    def _counts(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return how many updates each parameter had before this one, on the device; the kernel adds one itself."""
        before = torch.tensor([float(self.steps[parameter] - 1) for parameter in parameters])
        if self._device.type == "cuda":
            before = before.pin_memory()
        return list(before.to(self._device, non_blocking=True).unbind())


def widened(weight: Tensor) -> Tensor:
    """Return bfloat16 numbers in float32, and others as they are."""
    return weight.float() if weight.dtype == torch.bfloat16 else weight


class Place(NamedTuple):
    """Where a rank's shard lies in the flattened whole parameter: a run of rows, or of each of these some columns.

    Attributes:
        first: Place of the shard's first element.
        columns: Elements of a row that the shard has.
        width: Elements of a row.
    """

    first: int
    columns: int
    width: int

    @property
    def is_run(self) -> bool:
        """Whether the shard's elements follow one another in the whole parameter too."""
        return self.columns == self.width


def place_of(parameter: nn.Parameter) -> Place:
    """Return where this rank's shard lies in the flattened whole parameter.

    Raises:
        ValueError: It is neither a run of rows nor, of a matrix, a block.
    """
    shape = parameter.shape
    width = math.prod(shape[1:])
    if not isinstance(parameter, DTensor):
        return Place(0, width, width)
    mine, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    if tuple(mine[1:]) == tuple(shape[1:]):
        return Place(offset[0] * width if offset else 0, width, width)
    if len(shape) != 2:
        raise ValueError(f"a shard {tuple(mine)} of a parameter {tuple(shape)} is neither rows nor a matrix's block")
    return Place(offset[0] * width + offset[1], mine[1], width)


def shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that together hold one copy of a parameter; None if this one has all of it.

    Raises:
        ValueError: It is not sharded along its first dimension alone.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh["shard"]
    if mesh.size() == 1:
        return None
    if any(placement.is_shard() and not placement.is_shard(0) for placement in parameter.placements):
        raise ValueError("a parameter must be sharded along its first dimension")
    return mesh.get_group()


def like_rows(parameter: nn.Parameter, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that are sharded as a parameter is, along the first dimension.

    Args:
        parameter: `(R, ...)`.
        shape: Of the whole result, `(R, ...)`.
        dtype: Of the result.
        device: Where it is.
    """
    mine = local(parameter)
    zeros = torch.zeros(mine.shape[0], *shape[1:], dtype=dtype, device=device)
    if not isinstance(parameter, DTensor):
        return zeros
    stride = torch.empty(tuple(shape), device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    whole = DTensor.from_local(zeros, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return whole.to(device)  # where state is in host memory, the mesh is still the device's
