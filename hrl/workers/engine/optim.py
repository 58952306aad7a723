"""An optimizer step: learning rate, global gradient norm, clipping, and what happens if something is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hrl.workers.engine.adamw import AdamW
from hrl.workers.engine.host_memory import local
from hrl.workers.engine.nonfinite import names_of_nonfinite

if TYPE_CHECKING:
    from hrl.config.model import OptimConfig


@dataclass(frozen=True)
class Schedule:
    """Learning rate as a function of the number of optimizer steps taken.

    Attributes:
        peak: The rate after the warm-up.
        kind: `constant`, `cosine` or `linear`.
        warmup_steps: Steps of linear warm-up; the first step has `peak / warmup_steps`.
        total_steps: Steps after which cosine and linear end.
        min_ratio: Their last rate, as a share of `peak`.
    """

    peak: float
    kind: str
    warmup_steps: int
    total_steps: int | None
    min_ratio: float

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "cosine", "linear"):
            raise ValueError(f"optim.lr_scheduler_type={self.kind!r} is not constant, cosine or linear")
        if self.kind != "constant" and self.total_steps is None:
            raise ValueError(f"optim.lr_scheduler_type={self.kind} needs the length of the run")

    @classmethod
    def of(cls, optim: OptimConfig, total_steps: int | None) -> Schedule:
        """Return the schedule of `optim.*` for a run of `total_steps` optimizer steps."""
        warmup = optim.lr_warmup_steps
        if warmup < 0:
            if optim.lr_warmup_steps_ratio > 0 and total_steps is None:
                raise ValueError("optim.lr_warmup_steps_ratio needs the length of the run")
            warmup = int(optim.lr_warmup_steps_ratio * (total_steps or 0))
        return cls(optim.lr, optim.lr_scheduler_type, warmup, total_steps, optim.min_lr_ratio)

    def lr(self, steps_taken: int) -> float:
        """Return the rate of the next step."""
        if steps_taken < self.warmup_steps:
            return self.peak * (steps_taken + 1) / self.warmup_steps
        if self.kind == "constant" or self.total_steps is None:
            return self.peak
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (steps_taken - self.warmup_steps) / span)
        shape = 1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * shape)


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
        optim: `lr`, `betas`, `weight_decay` and the schedule's keys.
        grad_clip: Largest global gradient norm.
        total_steps: Length of the run in optimizer steps.
        device: Where a step is computed; by default where the parameters are.
        offload: Keep the moments in host memory.
        seed: Of the run.

    Attributes:
        steps_taken: Position in the schedule.
        skipped_in_a_row: Number of steps not applied since the last one that was.
    """

    def __init__(
        self,
        module: nn.Module,
        optim: OptimConfig,
        grad_clip: float,
        total_steps: int | None,
        *,
        device: torch.device | None = None,
        offload: bool = False,
        seed: int = 0,
    ) -> None:
        self.schedule = Schedule.of(optim, total_steps)
        self.grad_clip = grad_clip
        self.steps_taken = 0
        self.skipped_in_a_row = 0
        self.names = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.parameters: list[nn.Parameter] = list(self.names)
        self.adamw = AdamW(
            self.names,
            betas=(optim.betas[0], optim.betas[1]),
            weight_decay=optim.weight_decay,
            device=device or self.parameters[0].device,
            offload=offload,
            seed=seed,
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
        lr = self.schedule.lr(self.steps_taken)
        if not finite:
            broken = {name: local(p.grad) for p, name in self.names.items() if p.grad is not None}
            self.zero_grad()
            self.skipped_in_a_row += 1
            return StepReport(norm, lr, applied=False, nonfinite_gradients=names_of_nonfinite(broken))
        self.skipped_in_a_row = 0
        if norm > self.grad_clip:
            torch._foreach_mul_(grads, self.grad_clip / (norm + 1e-6))
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
    if not isinstance(example, DTensor) or example.device_mesh.size() == 1:
        norm, loss_sum = torch.stack([squares.sqrt(), loss.detach().double().reshape(())]).tolist()
        return norm, math.isfinite(norm) and math.isfinite(loss_sum)
    bad = (~torch.isfinite(loss.detach())).double().reshape(())
    total = torch.stack([squares, bad])
    dist.all_reduce(total)
    # Where shards are replicated, every shard was counted once per replica.
    replicas = example.device_mesh.size() // example.device_mesh["shard"].size()
    square, num_bad = total.tolist()
    norm = math.sqrt(square / replicas)
    return norm, math.isfinite(norm) and num_bad == 0.0
