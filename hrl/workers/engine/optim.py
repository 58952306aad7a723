"""An optimizer step: learning rate, global gradient norm, clipping, what happens if something is not finite, and AdamW.

AdamW works on this rank's shards, with state per parameter. Its arithmetic is torch's (`torch.optim.adamw`, its fused
kernel), on

- **whole shards**, where moments are on the device and masters are float32 (or float64);
- **buckets** of at most `BUCKET_ELEMENTS` elements otherwise. With `offload` the moments are allocated in host memory,
  and at most two buckets of them visit the device: while one is computed with, the next comes and the one before goes,
  each on its own stream. bfloat16 masters are widened to float32 a bucket at a time and rounded back stochastically;
  their moments are float32.

Stochastic rounding: bfloat16 has 8 significant bits, so neighbours are 0.4 to 0.8 % of a weight apart. An update of
1e-6 to a weight of 0.02 is a hundredth of that; rounded to nearest it is lost every time, and all but the smallest
weights never move. Here a number `x` between neighbours `a` and `b` becomes `b` with probability `(x - a) / (b - a)`
and `a` otherwise, so that its expectation is `x` (Gupta et al. 2015, "Deep learning with limited numerical precision").
The chance is a hash of (seed, parameter, its step, the element's place in the whole parameter), not drawn from a
generator. So a resumed run rounds as an uninterrupted one does, and so does a run on another number of ranks.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.adamw import adamw

from hrl.models.ops.layout import has_triton
from hrl.workers.engine.host_memory import Lane, host_zeros_like, local

if TYPE_CHECKING:
    from hrl.config.model import OptimConfig
    from hrl.workers.requests import Training

#: Elements whose moments visit the device together: 128 MiB for each of the two moments in float32.
BUCKET_ELEMENTS = 1 << 25
MOMENTS = ("exp_avg", "exp_avg_sq")
_EPS = 1e-8

_WORD = 1 << 32
_DROPPED_BITS = 16  # of a float32's 23, those that a bfloat16 lacks
_DROPPED = (1 << _DROPPED_BITS) - 1


def learning_rate(optim: OptimConfig, total_steps: int, steps_taken: int) -> float:
    """Return the rate of the next optimizer step: linear warm-up, then what `optim.lr_scheduler_type` says.

    Args:
        optim: The schedule's keys. The first of n warm-up steps has an n-th of `lr`.
        total_steps: Length of the run in optimizer steps, after which cosine and linear end at `min_lr_ratio`.
        steps_taken: Optimizer steps before this one.
    """
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total_steps)
    if steps_taken < warmup:
        return optim.lr * (steps_taken + 1) / warmup
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    progress = min(1.0, (steps_taken - warmup) / max(1, total_steps - warmup))
    shape = 1.0 - progress if optim.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * shape)


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did.

    Attributes:
        grad_norm: Global norm before clipping; not finite if the step was skipped for that reason.
        lr: The rate with which the step was, or would have been, taken.
        applied: False if the loss or the gradient was not finite.
        nonfinite_gradients: If not applied, the parameters whose gradient is not finite on this rank.
        losses: If not applied, the share of the mini-batch's loss that each micro-batch of this rank had.
    """

    grad_norm: float
    lr: float
    applied: bool
    nonfinite_gradients: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()


class Optimizer:
    """AdamW over sharded parameters, with a schedule and clipping.

    Args:
        module: The sharded module. Parameters that require no gradient are left alone.
        training: How it learns.
        device: Where a step is computed.
        offload: Keep the moments in host memory.

    Attributes:
        steps_taken: Position in the schedule.
        skipped_in_a_row: Number of steps not applied since the last one that was.
    """

    def __init__(self, module: nn.Module, training: Training, *, device: torch.device, offload: bool = False) -> None:
        self._training = training
        self.steps_taken = 0
        self.skipped_in_a_row = 0
        self.names = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.parameters: list[nn.Parameter] = list(self.names)
        beta1, beta2 = training.optim.betas
        self.adamw = AdamW(
            self.names,
            betas=(beta1, beta2),
            weight_decay=training.optim.weight_decay,
            device=device,
            offload=offload,
            seed=training.seed,
        )

    def zero_grad(self) -> None:
        """Free all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, loss: Tensor, *, fill_missing: bool = False) -> StepReport:
        """Clip and apply the gradients, unless something is not finite on any rank.

        Args:
            loss: Scalar, this rank's share of the mini-batch's loss.
            fill_missing: Step with zero gradients, because no row of the mini-batch ran: none can move a weight.
        """
        if fill_missing:
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        grads = [local(p.grad) for p in self.parameters if p.grad is not None]
        norm, finite = global_norm(grads, loss, self.parameters[0])
        lr = learning_rate(self._training.optim, self._training.total_steps, self.steps_taken)
        if not finite:
            broken = {name: local(p.grad) for p, name in self.names.items() if p.grad is not None}
            self.zero_grad()
            self.skipped_in_a_row += 1
            return StepReport(norm, lr, applied=False, nonfinite_gradients=names_of_nonfinite(broken))
        self.skipped_in_a_row = 0
        if norm > self._training.grad_clip:
            torch._foreach_mul_(grads, self._training.grad_clip / (norm + 1e-6))
        self.adamw.step(lr)
        self.zero_grad()
        self.steps_taken += 1
        return StepReport(norm, lr, applied=True)

    @property
    def moment_steps(self) -> dict[str, int]:
        """By parameter, how many steps its moments have seen, from which AdamW corrects their bias."""
        return {name: self.adamw.steps[parameter] for parameter, name in self.names.items()}

    def set_moment_steps(self, steps: Mapping[str, int]) -> None:
        """Set how many steps the moments, which come from a checkpoint, have seen."""
        self.adamw.steps = {parameter: steps[name] for parameter, name in self.names.items()}


def global_norm(grads: Sequence[Tensor], loss: Tensor, example: Tensor) -> tuple[float, bool]:
    """Return the gradient's norm over all ranks, and whether it and every rank's loss are finite. One collective.

    Args:
        grads: This rank's shards.
        loss: This rank's loss.
        example: A parameter, whose mesh says which ranks hold the other shards.
    """
    squares = torch.zeros((), dtype=torch.float64, device=loss.device)
    if grads:
        squares = torch.stack(torch._foreach_norm(list(grads))).double().square().sum()
    total, replicas = torch.stack([squares, (~torch.isfinite(loss.detach())).double().reshape(())]), 1
    if isinstance(example, DTensor) and example.device_mesh.size() > 1:
        dist.all_reduce(total)
        # Where shards are replicated, every shard was counted once per replica.
        mesh = example.device_mesh
        replicas = mesh["replicate"].size() if "replicate" in (mesh.mesh_dim_names or ()) else 1
    square, num_bad = total.tolist()
    norm = math.sqrt(square / replicas)
    return norm, math.isfinite(norm) and num_bad == 0.0


def names_of_nonfinite(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of the floating-point tensors that hold a NaN or an infinity."""
    return tuple(
        name for name, tensor in tensors.items() if tensor.is_floating_point() and not torch.isfinite(tensor).all()
    )


class _Span(NamedTuple):
    """Elements `start` to `stop` of a parameter's flattened shard."""

    parameter: nn.Parameter
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of the parameter, its gradient or a moment, as a view `(n,)`."""
        return local(tensor).view(-1)[self.start : self.stop]


class AdamW:
    """AdamW over sharded parameters.

    Args:
        names: Names of the trained parameters.
        betas: Decay rates of the moments.
        weight_decay: Decoupled weight decay.
        device: Where parameters and gradients are during a step.
        offload: Keep the moments in host memory.
        seed: Of the run, by which bfloat16 masters are rounded.
        bucket_elements: See `BUCKET_ELEMENTS`.

    Attributes:
        state: `exp_avg` and `exp_avg_sq` of each parameter, sharded as it is. They exist from the start, so that a
            checkpoint has the same keys before and after the first step.
        steps: How many updates the moments of each parameter have seen, which gives its bias correction.

    Raises:
        ValueError: A parameter's dtype is neither float32, float64 nor bfloat16, or it is bfloat16 and not sharded by
            rows.
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
        self._names = names
        self._betas = betas
        self._weight_decay = weight_decay
        self._device = device
        self._seed = seed
        self.offload = offload
        for parameter, name in names.items():
            if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
                raise ValueError(
                    f"{name} is {parameter.dtype}: AdamW trains float32 and bfloat16 weights (model_dtype)"
                )
        dtypes = {parameter.dtype for parameter in names}
        self._dtype = torch.float64 if dtypes == {torch.float64} else torch.float32  # of the arithmetic
        # Weights that are updated where they lie are not cut.
        self._bucket_elements = bucket_elements if offload or torch.bfloat16 in dtypes else sys.maxsize
        self.steps = dict.fromkeys(names, 0)
        self.state = {parameter: {moment: self._zeros_like(parameter) for moment in MOMENTS} for parameter in names}
        self._coming, self._going = Lane(device), Lane(device)
        places = {parameter: place_of(parameter) for parameter in names if parameter.dtype == torch.bfloat16}
        if not all(place.is_run for place in places.values()):
            raise ValueError(
                "bfloat16 masters are rounded by rows: with tensor_parallel_size above 1, model_dtype must be fp32"
            )
        self._first = {parameter: place.first for parameter, place in places.items()}

    def _zeros_like(self, parameter: nn.Parameter) -> Tensor:
        if self.offload:
            return host_zeros_like(parameter, self._dtype, self._device)
        return torch.zeros_like(parameter, dtype=self._dtype, device=self._device)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every parameter that has a gradient; others keep weight, moments and step count."""
        moved = [p for p in self._names if p.grad is not None]
        for parameter in moved:
            self.steps[parameter] += 1
        buckets = list(self._buckets([p for p in moved if local(p).numel() > 0]))
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
        wide = [weight.float() if weight.dtype == torch.bfloat16 else weight for weight in weights]
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
            eps=_EPS,
            maximize=False,
        )
        for piece, weight, number in zip(bucket, weights, wide, strict=True):
            if number is not weight:
                parameter = piece.parameter
                key = rounding_key(self._seed, self._names[parameter], self.steps[parameter])
                weight.copy_(round_stochastically(number, key, self._first[parameter] + piece.start))

    def _counts(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return how many updates each parameter had before this one, on the device; the kernel adds one itself."""
        before = torch.tensor([float(self.steps[parameter] - 1) for parameter in parameters])
        if self._device.type == "cuda":
            before = before.pin_memory()
        return list(before.to(self._device, non_blocking=True).unbind())

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


# ---------------------------------------------------------------------- stochastic rounding


def rounding_key(seed: int, name: str, step: int) -> int:
    """Return 64 bits that decide how a parameter is rounded at one of its steps."""
    text = f"{seed}/{name}/{step}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@torch.no_grad()
def round_stochastically(wide: Tensor, key: int, first: int) -> Tensor:
    """Round float32 numbers to bfloat16, each to one of its two neighbours by chance.

    Args:
        wide: `(n,)` float32.
        key: See `rounding_key`.
        first: Place of `wide[0]` in the flattened whole parameter.

    Returns:
        `(n,)` bfloat16. NaN and infinities stay what they are.
    """
    if wide.is_cuda and has_triton():
        return by_kernel(wide, key, first)
    # As integers, the bits of float32 numbers of one sign grow with the magnitude: adding chance below the cut carries
    # into the kept bits with exactly the probability that is wanted.
    bits = wide.view(torch.int32) + noise(wide.numel(), key, first, wide.device)
    rounded = bits.bitwise_and_(~_DROPPED).view(torch.float32)
    return torch.where(torch.isfinite(wide), rounded, wide).to(torch.bfloat16)


def by_kernel(wide: Tensor, key: int, first: int) -> Tensor:
    """Do as `round_stochastically`, in one kernel."""
    from hrl.workers.engine.rounding_kernel import round_run

    wide = wide.contiguous()
    out = torch.empty_like(wide, dtype=torch.bfloat16)
    for run, run_key, low in _runs(wide.numel(), key, first):
        round_run(wide[run], out[run], run_key, low)
    return out


def noise(count: int, key: int, first: int, device: torch.device) -> Tensor:
    """Return `(count,)` int32, uniform in [0, 65536); element i depends on `key` and `first + i` alone."""
    out = torch.empty(count, dtype=torch.int32, device=device)
    for run, run_key, low in _runs(count, key, first):
        places = torch.arange(run.stop - run.start, dtype=torch.int32, device=device)
        out[run] = _hash(places.add_(low), run_key)
    return out.bitwise_and_(_DROPPED)


def _runs(count: int, key: int, first: int) -> Iterator[tuple[slice, int, int]]:
    """Yield elements whose places have the same upper word: which, their key, and the first one's lower word."""
    start = 0
    while start < count:  # once, unless a parameter has more elements than 32 bits can count
        block, low = divmod(first + start, _WORD)
        stop = min(count, start + _WORD - low)
        yield slice(start, stop), _signed((key ^ (key >> 32) * (2 * block + 1)) % _WORD), _signed(low)
        start = stop


def _hash(words: Tensor, key: int) -> Tensor:
    """Mix int32 words in place: xor-shift and multiply, twice (the constants of Wellons' `lowbias32`)."""
    words.bitwise_xor_(key)
    words.bitwise_xor_(_shifted(words, 16)).mul_(0x7FEB352D)
    words.bitwise_xor_(_shifted(words, 15)).mul_(_signed(0x846CA68B))
    return words.bitwise_xor_(_shifted(words, 16))


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros, where torch's shift of a signed word repeats its sign."""
    return (words >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word
