"""The worker processes of a run with one model: started, saved and ended together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hrl.cluster.roles import ResourcePoolManager, Role
from hrl.cluster.worker_groups import start_processes
from hrl.config.offline import OfflineConfig
from hrl.single_controller.worker import RayClassWithInitArgs
from hrl.single_controller.worker_group import RayWorkerGroup
from hrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hrl.workers.reward_model import RewardModelWorker
from hrl.workers.runtime import Runtime


@dataclass(frozen=True)
class Learner:
    """What a worker reads of the model that it trains, under the names that it has in `actor_rollout_ref.actor`.

    Attributes:
        optim: Optimizer and schedule.
        grad_clip: Largest gradient norm.
        fsdp_config: Sharding.
        checkpoint: What is saved and loaded.
        use_kl_loss: No loss here has a KL term of its own.
    """

    optim: Any
    grad_clip: float
    fsdp_config: Any
    checkpoint: Any
    use_kl_loss: bool = False

    @classmethod
    def of(cls, config: OfflineConfig) -> Learner:
        """From the whole configuration of an offline run."""
        return cls(config.optim, config.optim.clip_grad, config.model.fsdp_config, config.checkpoint)


@dataclass(frozen=True)
class OneRole:
    """The part of `actor_rollout_ref` that a policy without engine and reference reads."""

    model: Any
    actor: Learner


def policy_worker(config: OfflineConfig, total_steps: int, runtime: Runtime, path: str) -> RayClassWithInitArgs:
    """Return the worker of a policy that learns."""
    roles = OneRole(config.model, Learner.of(config))
    return RayClassWithInitArgs(
        ActorRolloutRefWorker, roles, Role.Actor.value, total_steps, runtime=runtime, model_path=path
    )


def reward_model_worker(config: OfflineConfig, total_steps: int, runtime: Runtime, path: str) -> RayClassWithInitArgs:
    """Return the worker of a reward model that learns."""
    roles = OneRole(config.model, Learner.of(config))
    return RayClassWithInitArgs(RewardModelWorker, roles, roles.actor, total_steps, runtime=runtime, model_path=path)


@dataclass
class OfflineWorkers:
    """One model on all processes.

    Attributes:
        role: What it is, and the name of its folder in a checkpoint.
        model: Calls the model's methods.
        processes: The processes.
    """

    role: Role
    model: Any
    processes: list[RayWorkerGroup]

    @classmethod
    def start(cls, config: OfflineConfig, role: Role, worker: RayClassWithInitArgs, *, use_gpu: bool) -> OfflineWorkers:
        """Start `trainer.n_gpus_per_node` processes on each of `trainer.nnodes` machines and load the model.

        Raises:
            PlacementError: The cluster lacks the devices.
            WorkerError: A worker could not be constructed or could not load its model.
        """
        counts = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
        manager = ResourcePoolManager({"global": counts}, {role: "global"}, use_gpu=use_gpu)
        groups, started = start_processes(config, {role: worker}, manager, RayWorkerGroup)
        workers = cls(role, groups[role], started)
        try:
            workers.model.with_timeout(config.trainer.timeouts.init_s).init_model()
        except BaseException:  # Ctrl-C included: no process stays behind
            workers.shutdown()
            raise
        return workers

    @property
    def trained(self) -> list[Any]:
        """The groups whose models learn, and are saved."""
        return [self.model]

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        """Write the model's state below `folder`, and a transformers folder `hf` where asked."""
        hf_folder = str(folder / "hf") if "hf_model" in contents else None
        self.model.save_checkpoint(str(folder / self.role.value), hf_folder)

    def load(self, folder: Path) -> None:
        """Load what `save` wrote."""
        self.model.load_checkpoint(str(folder / self.role.value))

    def shutdown(self) -> None:
        """End every process."""
        for group in self.processes:
            group.shutdown()
