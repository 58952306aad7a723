"""The worker groups of a run: built from roles and pools, initialised, synchronised, saved and ended together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hrl.cluster.roles import ResourcePoolManager, Role
from hrl.config.arithmetic import step_sizes
from hrl.models.tokenizer import resolve_tokenizer
from hrl.single_controller.errors import WorkerError, WorkerTimeoutError
from hrl.single_controller.worker import RayClassWithInitArgs, create_colocated_worker_cls
from hrl.single_controller.worker_group import GroupFuture, RayWorkerGroup, wait_for_all
from hrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hrl.workers.critic import CriticWorker
from hrl.workers.reward_model import RewardModelWorker
from hrl.workers.runtime import Runtime

#: The engine last, so that it sees how much memory the others left.
LOAD_ORDER = (Role.Critic, Role.RefPolicy, Role.RewardModel, Role.Actor, Role.ActorRollout, Role.Rollout)
#: How long to look for what befell a receiver once a weight broadcast has failed at its sender.
CAUSE_NOTICE_S = 10.0


def worker_mapping(
    config: Any, roles: list[Role], runtime: Runtime, paths: dict[Role, str], total_training_steps: int
) -> dict[Role, Any]:
    """Return the worker class of every role with its arguments.

    Args:
        config: The whole configuration.
        roles: The roles to build.
        runtime: What every process needs to know.
        paths: Local model folder by role.
        total_training_steps: Steps of the trainer; schedules run over the optimizer steps these make.
    """
    actor_steps = max(total_training_steps - config.trainer.critic_warmup, 0) * step_sizes(config).optimizer_steps
    critic_steps = total_training_steps * step_sizes(config, config.critic).optimizer_steps
    policy = with_absolute_tokenizer(config.actor_rollout_ref)
    built = {
        Role.ActorRollout: (ActorRolloutRefWorker, policy, "actor_rollout", actor_steps),
        Role.Actor: (ActorRolloutRefWorker, policy, "actor", actor_steps),
        Role.Rollout: (ActorRolloutRefWorker, policy, "rollout"),
        Role.RefPolicy: (ActorRolloutRefWorker, policy, "ref"),
        Role.Critic: (CriticWorker, config.critic, critic_steps),
        Role.RewardModel: (RewardModelWorker, config.reward.reward_model),
    }
    return {
        role: RayClassWithInitArgs(worker, *arguments, runtime=runtime, model_path=paths[role])
        for role, (worker, *arguments) in built.items()
        if role in roles
    }


def with_absolute_tokenizer(policy: Any) -> Any:
    """`actor_rollout_ref` with a tokenizer's folder as processes in other folders find it."""
    path = policy.model.tokenizer_path
    if path is None:
        return policy
    model = policy.model.model_copy(update={"tokenizer_path": resolve_tokenizer(path)})
    return policy.model_copy(update={"model": model})


def start_processes(
    config: Any,
    role_worker_mapping: dict[Role, Any],
    manager: ResourcePoolManager,
    worker_group_cls: type[RayWorkerGroup],
) -> tuple[dict[Role, RayWorkerGroup], list[RayWorkerGroup]]:
    """Start one process per rank of every pool, with an object for each role on that pool; all pools side by side.

    Returns:
        The group of every role, and the groups of processes, one per pool.

    Raises:
        PlacementError: The cluster lacks what a pool needs.
        WorkerError: A worker could not be constructed.
    """
    manager.create_resource_pool()
    by_pool: dict[str, dict[str, Any]] = defaultdict(dict)
    for role, worker in role_worker_mapping.items():
        by_pool[manager.mapping[role]][role.value] = worker
    timeouts = config.trainer.timeouts
    started: list[RayWorkerGroup] = []
    try:
        for pool, class_dict in by_pool.items():
            started.append(
                worker_group_cls(
                    resource_pool=manager.resource_pool_dict[pool],
                    ray_cls_with_init=create_colocated_worker_cls(class_dict),
                    name_prefix=pool,
                    call_timeout_s=timeouts.call_s,
                    start_timeout_s=timeouts.init_s,
                    wait=False,
                )
            )
        worker_group_cls.start_together(started)
    except BaseException:  # Ctrl-C included: no process stays behind
        for group in started:
            group.shutdown()
        raise
    groups: dict[Role, RayWorkerGroup] = {}
    for processes, class_dict in zip(started, by_pool.values(), strict=True):
        groups |= {Role(name): group for name, group in processes.spawn(prefix_set=class_dict).items()}
    return groups, started


def build_worker_groups(
    config: Any,
    role_worker_mapping: dict[Role, Any],
    manager: ResourcePoolManager,
    worker_group_cls: type[RayWorkerGroup],
) -> WorkerGroups:
    """Start the processes of a PPO run; raises as `start_processes`."""
    groups, started = start_processes(config, role_worker_mapping, manager, worker_group_cls)
    merged = groups.get(Role.ActorRollout)
    return WorkerGroups(
        actor=merged or groups[Role.Actor],
        rollout=merged or groups[Role.Rollout],
        ref=groups.get(Role.RefPolicy),
        critic=groups.get(Role.Critic),
        rm=groups.get(Role.RewardModel),
        processes=started,
        load_order=[
            [groups[role] for role in LOAD_ORDER if manager.mapping.get(role) == pool]
            for pool in dict.fromkeys(manager.mapping.values())
        ],
        timeouts=config.trainer.timeouts,
        sync_timeout_s=config.actor_rollout_ref.rollout.weight_sync.driver_timeout_s,
    )


def _raise_cause_in(receiving: GroupFuture, consequence: WorkerError) -> None:
    """Raise what befell a receiver, of which a sender only knows that it is gone; returns if that is nothing."""
    try:
        receiving.get(timeout_s=CAUSE_NOTICE_S)
    except WorkerTimeoutError:
        return
    except WorkerError as cause:
        raise cause from consequence


def _least_read_back(engines: Sequence[dict[str, float]]) -> dict[str, float]:
    key = "weight_sync/read_back_tensors"
    return {key: min(engine[key] for engine in engines)} if engines else {}


@dataclass
class WorkerGroups:
    """One worker group per role; `actor` and `rollout` are the same group where the hybrid engine merges them.

    Attributes:
        processes: The groups by process, one per pool.
        load_order: For each pool, the groups on it in the order in which their models are loaded.
        timeouts: Seconds for initialisation (`init_s`) and a phase (`call_s`).
        sync_timeout_s: For a weight sync.
    """

    actor: Any
    rollout: Any
    ref: Any
    critic: Any
    rm: Any
    processes: list[Any]
    load_order: list[list[Any]]
    timeouts: Any
    sync_timeout_s: float
    _weight_group: tuple[Any, ...] = ()

    @property
    def merged(self) -> bool:
        """Whether the policy and its engines share processes, so that weights pass by memory handles."""
        return self.actor is self.rollout

    @property
    def trained(self) -> list[Any]:
        """The groups whose models learn, and are saved."""
        return [group for group in (self.actor, self.critic) if group is not None]

    def init_models(self) -> None:
        """Load every model and start the engines: pools side by side, the roles of a pool one after the other.

        Raises:
            WorkerError: The first failure, at once; `wait_for_all` says what becomes of others.
        """
        loading = [
            # The processes of a pool take their calls in turn: each one's deadline holds the time of those before it.
            group.with_timeout(place * self.timeouts.init_s).execute_all_async("init_model")
            for groups in self.load_order
            for place, group in enumerate(groups, 1)
        ]
        wait_for_all(loading)
        if not self.merged:
            nodes = {*self.actor.node_ips, *self.rollout.node_ips}
            address = "127.0.0.1" if len(nodes) == 1 else self.actor.node_ips[0]
            self._weight_group = self.actor.open_weight_broadcast(self.rollout.world_size, address)

    def sync_weights(self, version: int) -> dict[str, float]:
        """Give every engine the policy's weights as `version`; returns the sender's figures as metrics.

        On separate pools there is one group of trainer rank 0 and all processes of all engines.
        """
        actor, rollout = (group.with_timeout(self.sync_timeout_s) for group in (self.actor, self.rollout))
        if self.merged:
            engines = [engine for engine in actor.sync_weights(version) if engine]
            slowest = max(engines, key=lambda engine: engine["weight_sync/seconds"])
            return slowest | _least_read_back(engines)
        receiving = rollout.receive_weights(version, *self._weight_group)
        sending = actor.send_weights(version)
        try:
            engines, senders = wait_for_all([receiving, sending])
        except WorkerError as error:
            if error.method.endswith(".send_weights"):
                _raise_cause_in(receiving, error)
            raise
        return senders[0] | _least_read_back([engine for engine in engines if engine])

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        """Write the state of the trained roles below `folder`."""
        self.actor.save_checkpoint(str(folder / "actor"), str(folder / "hf") if "hf_model" in contents else None)
        if self.critic is not None:
            self.critic.save_checkpoint(str(folder / "critic"))

    def load(self, folder: Path) -> None:
        """Load what `save` wrote."""
        self.actor.load_checkpoint(str(folder / "actor"))
        if self.critic is not None:
            self.critic.load_checkpoint(str(folder / "critic"))

    def shutdown(self) -> None:
        """End every process of every pool."""
        for group in self.processes:
            group.shutdown()
