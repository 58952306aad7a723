"""AdamW whose moments are stored in 8 bits: two bytes a weight, and four more for each block of 256, instead of eight.

Each moment of a block is divided by the largest of the block and takes the nearest of 256 values, which torchao's
dynamic map spreads over seven decades (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization"). Map and
scales are torchao's; the arithmetic is AdamW's in float32, a bucket at a time.

A block lies within a row, where torchao's run on from row to row and begin anew in every shard. So blocks do not depend
on the number of ranks, and a checkpoint holds the very codes, on any number of them. Vectors and small matrices keep
float32 moments, as in torchao and bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim.adamw import adamw

from hrl.workers.engine.adamw import EPS
from hrl.workers.engine.host_memory import local
from hrl.workers.engine.update_rule import BUCKET_ELEMENTS, UpdateRule, like_rows, widened

BLOCK = 256
#: Parameters with fewer elements keep float32 moments.
SMALL = 4096
#: The moments, and whether they have a sign.
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}


class AdamW8bit(UpdateRule):
    """AdamW with moments in 8 bits.

    Args:
        names: Names of the trained parameters.
        betas: Decay rates of the moments.
        weight_decay: Decoupled weight decay.
        device: Where parameters and gradients are during a step.
        seed: Of the run, by which bfloat16 masters are rounded.
        bucket_elements: See `BUCKET_ELEMENTS`.

    Attributes:
        state: `exp_avg` and `exp_avg_sq`, codes in uint8, with the scales of their blocks `exp_avg_scale` and
            `exp_avg_sq_scale (..., blocks)`; of vectors and small parameters the moments themselves.

    Raises:
        ModuleNotFoundError: torchao is not installed.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        device: torch.device,
        seed: int = 0,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        super().__init__(names, device=device, seed=seed)
        _map(True, self._dtype, device)
        self._betas = betas
        self._weight_decay = weight_decay
        self._bucket_elements = bucket_elements
        self.state = {parameter: self._zeros(parameter) for parameter in names}

    def _zeros(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        shape, device = tuple(parameter.shape), self._device
        if not _is_coded(parameter):
            return {moment: like_rows(parameter, shape, self._dtype, device) for moment in _MOMENTS}
        blocks = (*shape[:-1], -(-shape[-1] // BLOCK))
        codes = {moment: like_rows(parameter, shape, torch.uint8, device) for moment in _MOMENTS}
        return codes | {f"{moment}_scale": like_rows(parameter, blocks, self._dtype, device) for moment in _MOMENTS}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        pieces = []
        for parameter in self._take_step():
            width = parameter.shape[-1] if parameter.dim() > 1 else local(parameter).numel()
            rows = local(parameter).numel() // width if width else 0
            at_once = max(1, self._bucket_elements // max(1, width))
            pieces += [(parameter, width, row, min(rows, row + at_once)) for row in range(0, rows, at_once)]
        counts = self._counts([parameter for parameter, *_ in pieces])
        for (parameter, width, start, stop), count in zip(pieces, counts, strict=True):
            self._update(parameter, width, slice(start, stop), count, lr)

    def _update(self, parameter: nn.Parameter, width: int, rows: slice, count: Tensor, lr: float) -> None:
        """Update some rows of this rank's shard, seen as `(rows, width)`."""
        assert parameter.grad is not None, "parameters without a gradient are left out before"
        state = {name: local(tensor) for name, tensor in self.state[parameter].items()}
        weight = local(parameter.detach()).view(-1, width)[rows]
        wide = widened(weight).to(self._dtype)
        grad = local(parameter.grad).reshape(-1, width)[rows].to(self._dtype)
        moments = {moment: state[moment].view(-1, width)[rows] for moment in _MOMENTS}
        scales = {}
        if _is_coded(parameter):
            codes = moments
            scales = {name: state[f"{name}_scale"].view(-1, -(-width // BLOCK))[rows] for name in _MOMENTS}
            moments = {name: decoded(codes[name], scales[name], signed=_MOMENTS[name]) for name in _MOMENTS}
        adamw(
            [wide],
            [grad],
            [moments["exp_avg"]],
            [moments["exp_avg_sq"]],
            [],
            [count],
            fused=True,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=lr,
            weight_decay=self._weight_decay,
            eps=EPS,
            maximize=False,
        )
        for name, scale in scales.items():
            code, size = coded(moments[name], signed=_MOMENTS[name])
            codes[name].copy_(code)
            scale.copy_(size)
        if wide.dtype == weight.dtype:
            weight.copy_(wide)
        else:
            self._round_back(parameter, weight, wide, rows.start * width)


def _is_coded(parameter: nn.Parameter) -> bool:
    return parameter.dim() > 1 and parameter.numel() >= SMALL


@cache
def _map(signed: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the 256 values that a moment over its scale can have, `(256,)`, in rising order."""
    from torchao.optim.quant_utils import create_dynamic_map

    return torch.tensor(create_dynamic_map(signed=signed), dtype=dtype, device=device)


@cache
def _middles(signed: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers half-way between neighbours of `_map`, `(255,)`, which belong to the upper one."""
    values = _map(signed, dtype, device)
    return values[:-1] + (values[1:] - values[:-1]) * 0.5


def coded(moment: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes `(R, C)` uint8 of a moment `(R, C)`, and the scales of its blocks `(R, ceil(C / 256))`."""
    from torchao.optim.quant_utils import scale_tensor

    rows, width = moment.shape
    scaled, scale = scale_tensor(pad(moment, (0, -width % BLOCK)), BLOCK)
    # One search, where torchao's own takes forty operators unless they are compiled.
    codes = torch.bucketize(scaled, _middles(signed, moment.dtype, moment.device), out_int32=True, right=True)
    return codes[:, :width].to(torch.uint8), scale.view(rows, -1)


def decoded(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """Return the moment `(R, C)` of codes `(R, C)` and scales `(R, ceil(C / 256))`."""
    values = _map(signed, scale.dtype, scale.device)[codes.int()]
    return values.mul_(scale.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]])
