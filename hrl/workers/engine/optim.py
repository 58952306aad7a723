"""An optimizer step: learning rate, global gradient norm, clipping, what happens if something is not finite.

What a gradient does to a weight is an `UpdateRule`: `AdamW`, `AdamW8bit`, `Adafactor` or `Muon`, each in a file of its
own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hrl.workers.engine.adafactor import Adafactor
from hrl.workers.engine.adamw import AdamW
from hrl.workers.engine.adamw_8bit import AdamW8bit
from hrl.workers.engine.host_memory import local
from hrl.workers.engine.muon import Muon
from hrl.workers.engine.update_rule import UpdateRule

if TYPE_CHECKING:
    from hrl.config.model import OptimConfig
    from hrl.workers.requests import Training


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
    """An update rule over sharded parameters, with a schedule and clipping.

    Args:
        module: The sharded module. Parameters that require no gradient are left alone.
        training: How it learns.
        device: Where a step is computed.
        offload: Keep AdamW's moments in host memory.
        matrices: Names of the parameters that Muon takes; AdamW takes the others.

    Attributes:
        steps_taken: Position in the schedule.
        skipped_in_a_row: Number of steps not applied since the last one that was.
        rule: What a gradient does to a weight.
    """

    def __init__(
        self,
        module: nn.Module,
        training: Training,
        *,
        device: torch.device,
        offload: bool = False,
        matrices: Collection[str] = (),
    ) -> None:
        self._training = training
        self.steps_taken = 0
        self.skipped_in_a_row = 0
        self.names = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.parameters: list[nn.Parameter] = list(self.names)
        self.rule = _rule(self.names, training, device=device, offload=offload, matrices=matrices)

    @property
    def name(self) -> str:
        """Which optimizer it is: `optim.name`."""
        return self._training.optim.name

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
        self.rule.step(lr)
        self.zero_grad()
        self.steps_taken += 1
        return StepReport(norm, lr, applied=True)

    @property
    def moment_steps(self) -> dict[str, int]:
        """By parameter, how many steps its moments, or what else its state is, have seen."""
        return {name: self.rule.steps[parameter] for parameter, name in self.names.items()}

    def set_moment_steps(self, steps: Mapping[str, int]) -> None:
        """Set how many steps the state, which comes from a checkpoint, has seen."""
        self.rule.steps.update({parameter: steps[name] for parameter, name in self.names.items()})

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state of all parameters, by the names that a checkpoint has them under."""
        return {
            f"{part}.{name}": tensor
            for parameter, name in self.names.items()
            for part, tensor in self.rule.state[parameter].items()
        }


def _rule(
    names: Mapping[nn.Parameter, str],
    training: Training,
    *,
    device: torch.device,
    offload: bool,
    matrices: Collection[str],
) -> UpdateRule:
    """Return the update rule that `optim.name` names."""
    optim = training.optim
    beta1, beta2 = optim.betas
    decay, seed = optim.weight_decay, training.seed
    if optim.name == "adafactor":
        return Adafactor(names, weight_decay=decay, device=device, seed=seed)
    betas = (beta1, beta2)
    if optim.name == "muon":
        return Muon(names, matrices, betas=betas, weight_decay=decay, device=device, seed=seed)
    if optim.name == "adamw8bit":
        return AdamW8bit(names, betas=betas, weight_decay=decay, device=device, seed=seed)
    return AdamW(names, betas=betas, weight_decay=decay, device=device, offload=offload, seed=seed)


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
    # Gradients may be in host memory, and the loss on the device.
    total = torch.stack([squares.to(loss.device), (~torch.isfinite(loss.detach())).double().reshape(())])
    replicas = 1
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
