"""AdamW on sharded parameters.

It works on this rank's shards, with state per parameter. Its arithmetic is torch's (`torch.optim.adamw`, its fused
kernel), on

- **whole shards**, where moments are on the device and masters are float32 (or float64);
- **buckets** of at most `BUCKET_ELEMENTS` elements otherwise. With `offload` the moments are allocated in host memory,
  and at most two buckets of them visit the device: while one is computed with, the next comes and the one before goes,
  each on its own stream. bfloat16 masters are widened to float32 a bucket at a time and rounded back stochastically;
  their moments are float32.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from hrl.workers.engine.host_memory import Lane, host_zeros_like, local
from hrl.workers.engine.update_rule import BUCKET_ELEMENTS, UpdateRule, widened

MOMENTS = ("exp_avg", "exp_avg_sq")
EPS = 1e-8


class _Span(NamedTuple):
    """Elements `start` to `stop` of a parameter's flattened shard."""

    parameter: nn.Parameter
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of the parameter, its gradient or a moment, as a view `(n,)`."""
        return local(tensor).view(-1)[self.start : self.stop]


class AdamW(UpdateRule):
    """AdamW.

    Args:
        names: Names of the trained parameters.
        betas: Decay rates of the moments.
        weight_decay: Decoupled weight decay.
        device: Where parameters and gradients are during a step.
        offload: Keep the moments in host memory.
        seed: Of the run, by which bfloat16 masters are rounded.
        bucket_elements: See `BUCKET_ELEMENTS`.

    Attributes:
        state: `exp_avg` and `exp_avg_sq` of each parameter, sharded as it is.
        steps: How many updates the moments of each parameter have seen, which gives its bias correction.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        device: torch.device,
        offload: bool = False,
        seed: int = 0,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        super().__init__(names, device=device, seed=seed)
        self._betas = betas
        self._weight_decay = weight_decay
        self.offload = offload
        # Weights that are updated where they lie are not cut.
        self._bucket_elements = bucket_elements if offload or torch.bfloat16 in self._dtypes else sys.maxsize
        self.state = {parameter: {moment: self._zeros_like(parameter) for moment in MOMENTS} for parameter in names}
        self._coming, self._going = Lane(device), Lane(device)

    def _zeros_like(self, parameter: nn.Parameter) -> Tensor:
        if self.offload:
            return host_zeros_like(parameter, self._dtype, self._device)
        return torch.zeros_like(parameter, dtype=self._dtype, device=self._device)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        buckets = list(self._buckets([p for p in self._take_step() if local(p).numel() > 0]))
        counts = self._counts([piece.parameter for bucket in buckets for piece in bucket])
        visits = self._visits(buckets) if self.offload else ((bucket, self._homes(bucket)) for bucket in buckets)
        for bucket, moments in visits:
            self._update(bucket, moments, counts[: len(bucket)], lr)
            counts = counts[len(bucket) :]

    def _homes(self, bucket: Sequence[_Span]) -> list[list[Tensor]]:
        """Return a list for each moment, of views in the order of the bucket's pieces."""
        return [[piece.of(self.state[piece.parameter][moment]) for piece in bucket] for moment in MOMENTS]

    def _visits(self, buckets: Sequence[list[_Span]]) -> Iterator[tuple[list[_Span], list[list[Tensor]]]]:
        """Yield each bucket with its moments while these are on the device, where the caller updates them."""
        if not buckets:
            return
        # One bucket is computed with while another comes or goes; the first is the largest.
        size = sum(piece.stop - piece.start for piece in buckets[0])
        slots = [torch.empty(len(MOMENTS), size, dtype=self._dtype, device=self._device) for _ in buckets[:2]]
        here = Lane(self._device, computes=True)
        visitors: list[list[list[Tensor]]] = []
        gone: list[torch.cuda.Event | None] = []

        def fetch(index: int) -> None:
            self._coming.wait(gone[index - 2] if index > 1 else here.mark())
            visitors.append(self._fetch(buckets[index], slots[index % 2]))

        fetch(0)
        for index, bucket in enumerate(buckets):
            arrived = self._coming.mark()
            if index + 1 < len(buckets):
                fetch(index + 1)
            here.wait(arrived)
            yield bucket, visitors[index]
            self._going.wait(here.mark())
            self._store(bucket, visitors[index])
            gone.append(self._going.mark())
        # Now the slots may go back to the allocator, and host memory may be read.
        here.wait(gone[-1])
        self._going.finish()

    def _fetch(self, bucket: Sequence[_Span], slot: Tensor) -> list[list[Tensor]]:
        """Copy a bucket's moments to the device, into `slot (moments, elements)`."""
        homes = self._homes(bucket)
        sizes = [home.numel() for home in homes[0]]
        with self._coming.copies():
            return [
                [
                    place.copy_(home, non_blocking=True)
                    for place, home in zip(memory[: sum(sizes)].split(sizes), column, strict=True)
                ]
                for memory, column in zip(slot, homes, strict=True)
            ]

    def _store(self, bucket: Sequence[_Span], visitors: Sequence[Sequence[Tensor]]) -> None:
        """Copy a bucket's moments back to host memory."""
        with self._going.copies():
            for homes, column in zip(self._homes(bucket), visitors, strict=True):
                for home, visitor in zip(homes, column, strict=True):
                    home.copy_(visitor, non_blocking=True)

    def _update(
        self, bucket: Sequence[_Span], moments: Sequence[Sequence[Tensor]], counts: list[Tensor], lr: float
    ) -> None:
        """Update flat pieces in place, bfloat16 ones in float32 and rounded back stochastically."""
        weights = [piece.of(piece.parameter.detach()) for piece in bucket]
        # A gradient is only read, so a copy will do where its shard is not contiguous.
        grads = [local(p.grad).reshape(-1)[start:stop] for p, start, stop in bucket if p.grad is not None]
        wide = [widened(weight) for weight in weights]
        grads = [grad.to(weight.dtype) for grad, weight in zip(grads, wide, strict=True)]
        exp_avgs, exp_avg_sqs = map(list, moments)
        adamw(
            wide,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            counts,
            fused=True,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=lr,
            weight_decay=self._weight_decay,
            eps=EPS,
            maximize=False,
        )
        for piece, weight, number in zip(bucket, weights, wide, strict=True):
            self._round_back(piece.parameter, weight, number, piece.start)

    def _buckets(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[_Span]]:
        """Yield pieces of all parameters, in buckets of at most `bucket_elements` elements."""
        bucket: list[_Span] = []
        room = self._bucket_elements
        for parameter in parameters:
            size, start = local(parameter).numel(), 0
            while start < size:
                stop = min(size, start + room)
                bucket.append(_Span(parameter, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    yield bucket
                    bucket, room = [], self._bucket_elements
        if bucket:
            yield bucket
