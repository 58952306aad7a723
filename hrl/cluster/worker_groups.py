"""The worker groups of a run: built from roles and pools, initialised, synchronised, saved and ended together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray

from hrl.cluster.roles import ResourcePoolManager, Role
from hrl.config.arithmetic import step_sizes
from hrl.config.model import LearnerConfig, ModelConfig, OptimConfig
from hrl.config.offline import OfflineConfig
from hrl.config.outline import RunConfiguration
from hrl.config.placement import resolve_placement
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.reward import RewardModelConfig
from hrl.config.rollout import RolloutConfig
from hrl.config.trainer import TimeoutsConfig
from hrl.files import expanded
from hrl.metrics import Metric
from hrl.models.hf_config import vocabulary_of
from hrl.models.tokenizer import resolve_tokenizer
from hrl.profiling.operators import Profile
from hrl.report.live import ShowStage, in_silence
from hrl.single_controller.worker import RayClassWithInitArgs, create_colocated_worker_cls
from hrl.single_controller.worker_errors import PlacementError, WorkerError, WorkerTimeoutError
from hrl.single_controller.worker_group import GroupFuture, RayWorkerGroup, wait_for_all
from hrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hrl.workers.critic import CriticWorker
from hrl.workers.requests import Training
from hrl.workers.reward_model import RewardModelWorker, StepModelWorker
from hrl.workers.reward_server import RewardServerWorker
from hrl.workers.rollout import early_process
from hrl.workers.runtime import Runtime

#: The engine last, so that it sees how much memory the others left.
LOAD_ORDER = (Role.Critic, Role.RefPolicy, Role.RewardModel, Role.Actor, Role.ActorRollout, Role.Rollout)
#: How long to wait for a receiver's own error once a weight broadcast has failed at its sender.
CAUSE_NOTICE_S = 10.0
#: Where a checkpoint keeps a role's state, if not under its name.
_FOLDERS = {Role.ActorRollout: "actor"}


def worker_mapping(
    config: RunConfiguration,
    roles: Iterable[Role],
    runtime: Runtime,
    folders: Mapping[str, Path],
    total_training_steps: int,
) -> dict[Role, RayClassWithInitArgs]:
    """Return the worker class of every role with its arguments.

    Args:
        config: The whole configuration.
        roles: The roles to build.
        runtime: What every process needs to know.
        folders: Local folders of the models of `Outline.models`.
        total_training_steps: Steps of the trainer; schedules run over the optimizer steps these make.
    """
    if isinstance(config, PPOTrainerConfig):
        built = _ppo_workers(config, runtime, total_training_steps)
    else:
        built = _offline_workers(config, runtime, total_training_steps)
    folder_of = {Role.Critic: "critic", Role.RewardModel: "rm"}
    if isinstance(config, PPOTrainerConfig) and "ref" in folders:  # a teacher
        folder_of[Role.RefPolicy] = "ref"
        pupil = config.actor_rollout_ref.model
        trust = pupil.trust_remote_code
        vocabulary = vocabulary_of(folders["actor"], pupil.override_config, trust_remote_code=trust)
        built[Role.RefPolicy] = partial(built[Role.RefPolicy], pupil_vocabulary=vocabulary)
    paths = {role: str(folders[folder_of.get(role, "actor")]) for role in roles}
    on_cpus = _roles_on_cpus(config)
    runtimes = {role: replace(runtime, device="cpu") if role in on_cpus else runtime for role in paths}
    mapping = {
        role: make(runtime=runtimes[role], model_path=paths[role]) for role, make in built.items() if role in paths
    }
    if isinstance(config, PPOTrainerConfig):
        for role in mapping.keys() & {Role.ActorRollout, Role.Rollout}:
            mapping[role].prelude = _engine_prelude(config.actor_rollout_ref.rollout, runtime)
    return mapping


def _roles_on_cpus(config: RunConfiguration) -> set[Role]:
    """Return the roles whose pool has no GPUs, in a run that has any."""
    if not isinstance(config, PPOTrainerConfig):
        return set()
    placement = resolve_placement(config)
    return {Role(role) for role in placement.roles if not placement.uses_gpu(role)}


_Workers = dict[Role, Callable[..., RayClassWithInitArgs]]


def _ppo_workers(config: PPOTrainerConfig, runtime: Runtime, steps: int) -> _Workers:
    actor_steps = max(steps - config.trainer.critic_warmup, 0) * step_sizes(config).optimizer_steps
    critic_steps = steps * step_sizes(config, config.critic).optimizer_steps
    policy, critic = config.actor_rollout_ref, config.critic
    actor = policy.actor
    of_policy = partial(RayClassWithInitArgs, ActorRolloutRefWorker, _with_absolute_folders(policy.model))
    learns = partial(
        of_policy,
        fsdp=actor.fsdp_config,
        training=_training(actor.optim, actor.grad_clip, actor_steps, runtime),
        checkpoint=actor.checkpoint,
        rollout=policy.rollout,
    )
    of_critic = _training(critic.optim, critic.grad_clip, critic_steps, runtime)
    return {
        Role.ActorRollout: partial(learns, role="actor_rollout"),
        Role.Actor: partial(learns, role="actor"),
        Role.Rollout: partial(of_policy, role="rollout", rollout=policy.rollout),
        Role.RefPolicy: partial(
            RayClassWithInitArgs,
            ActorRolloutRefWorker,
            _as_it_is(policy.model) if config.teacher_path is not None else _with_absolute_folders(policy.model),
            role="ref",
            fsdp=policy.ref.fsdp_config,
        ),
        Role.Critic: partial(RayClassWithInitArgs, CriticWorker, _with_absolute_adapter(critic.model), of_critic),
        Role.RewardModel: _reward_model(config.reward.reward_model),
    }


def _reward_model(settings: RewardModelConfig) -> Callable[..., RayClassWithInitArgs]:
    """Return the reward model that scores batches or steps, or the server of one that functions ask."""
    if settings.serve:
        driver_ip = ray.util.get_node_ip_address()
        return partial(RayClassWithInitArgs, RewardServerWorker, settings, driver_ip=driver_ip)
    worker = RewardModelWorker if settings.reward_tokens is None else StepModelWorker
    return partial(RayClassWithInitArgs, worker, settings.model)


def _offline_workers(config: OfflineConfig, runtime: Runtime, steps: int) -> _Workers:
    learns: dict[str, Any] = {
        "training": _training(config.optim, config.optim.clip_grad, steps, runtime),
        "checkpoint": config.checkpoint,
    }
    model = _with_absolute_adapter(config.model)
    policy = partial(RayClassWithInitArgs, ActorRolloutRefWorker, model, role="actor")
    return {
        Role.Actor: partial(policy, fsdp=config.model.fsdp_config, **learns),
        Role.RewardModel: partial(RayClassWithInitArgs, RewardModelWorker, model, **learns),
    }


def _training(optim: OptimConfig, grad_clip: float, total_steps: int, runtime: Runtime) -> Training:
    run_folder = Path(runtime.run_folder)
    return Training(optim=optim, grad_clip=grad_clip, total_steps=total_steps, seed=runtime.seed, run_folder=run_folder)


def _engine_prelude(rollout: RolloutConfig, runtime: Runtime) -> Callable[[], None] | None:
    """Return what starts the process of a rank's engine before the rank imports anything, if it is to have one."""
    if rollout.name != "vllm" or runtime.device != "cpu" or rollout.tensor_model_parallel_size > 1:
        return None
    return partial(early_process.begin, runtime.num_threads)


L = TypeVar("L", bound=LearnerConfig)


def _with_absolute_adapter(model: L) -> L:
    """Return the section with the adapter's folder as an absolute path, for processes that run in other folders."""
    path = model.lora_adapter_path
    return model if path is None else model.model_copy(update={"lora_adapter_path": str(expanded(path).resolve())})


def _with_absolute_folders(model: ModelConfig) -> ModelConfig:
    """Return the section with the folders of adapter and tokenizer as absolute paths."""
    model, path = _with_absolute_adapter(model), model.tokenizer_path
    return model if path is None else model.model_copy(update={"tokenizer_path": resolve_tokenizer(path)})


def _as_it_is(model: ModelConfig) -> ModelConfig:
    """Return the policy's section for another model, which is read from its folder: no adapter, nothing overridden."""
    return model.model_copy(update={"override_config": {}, "lora_rank": 0, "lora_adapter_path": None})


@dataclass
class WorkerGroups:
    """The worker groups of a run, one per role; an offline run has one.

    Attributes:
        groups: The group of every role.
        learners: Roles whose models learn and are saved, the one whose weights are exported first.
        processes: The groups by process, one per pool.
        load_order: For each pool, its groups in the order in which their models are loaded.
        init_timeout_s: For loading one model, in seconds.
        release: Gives the devices back that they are on.
    """

    groups: Mapping[Role, RayWorkerGroup]
    learners: Sequence[Role]
    processes: Sequence[RayWorkerGroup]
    load_order: Sequence[Sequence[RayWorkerGroup]]
    init_timeout_s: float
    release: Callable[[], None] = lambda: None
    _weight_group: tuple[Any, ...] = ()

    @classmethod
    def start(
        cls,
        role_worker_mapping: Mapping[Role, RayClassWithInitArgs],
        manager: ResourcePoolManager,
        timeouts: TimeoutsConfig,
        worker_group_cls: type[RayWorkerGroup],
        learners: Sequence[Role],
    ) -> WorkerGroups:
        """Start one process per rank of every pool, with an object for each role on that pool; all pools side by side.

        Args:
            role_worker_mapping: The worker class of every role, with its arguments.
            manager: Which role runs on which pool.
            timeouts: For a start and for a call.
            worker_group_cls: Starts the processes of a pool.
            learners: Roles whose models learn, where the run has them.

        Raises:
            PlacementError: The cluster lacks what a pool needs.
            WorkerError: A worker could not be constructed.
        """
        manager.create_resource_pool()
        by_pool: dict[str, dict[str, RayClassWithInitArgs]] = defaultdict(dict)
        for role, worker in role_worker_mapping.items():
            by_pool[manager.mapping[role]][role.value] = worker
        started: list[RayWorkerGroup] = []
        with ExitStack() as failed:  # then no process stays behind, and no device
            failed.callback(manager.release)
            for pool, class_dict in by_pool.items():
                group = worker_group_cls(
                    resource_pool=manager.resource_pool_dict[pool],
                    ray_cls_with_init=create_colocated_worker_cls(class_dict),
                    name_prefix=pool,
                    call_timeout_s=timeouts.call_s,
                    start_timeout_s=timeouts.init_s,
                    wait=False,
                )
                started.append(group)
                failed.callback(group.shutdown)
            worker_group_cls.start_together(started)
            failed.pop_all()
        groups: dict[Role, RayWorkerGroup] = {}
        for processes, class_dict in zip(started, by_pool.values(), strict=True):
            groups |= {Role(name): group for name, group in processes.spawn(prefix_set=class_dict).items()}
        return cls(
            groups=groups,
            learners=[role for role in learners if role in groups],
            processes=started,
            load_order=[
                [groups[role] for role in LOAD_ORDER if role in groups and manager.mapping[role] == pool]
                for pool in by_pool
            ],
            init_timeout_s=timeouts.init_s,
            release=manager.release,
        )

    # ------------------------------------------------------------------ roles

    def _first_of(self, *roles: Role) -> Any:
        return next((self.groups[role] for role in roles if role in self.groups), None)

    @property
    def actor(self) -> Any:
        """The policy that learns; None where engines are alone."""
        return self._first_of(Role.ActorRollout, Role.Actor)

    @property
    def rollout(self) -> Any:
        """The engines; None in a run that does not sample."""
        return self._first_of(Role.ActorRollout, Role.Rollout)

    @property
    def ref(self) -> Any:
        """The reference policy; None without one."""
        return self._first_of(Role.RefPolicy)

    @property
    def critic(self) -> Any:
        """The critic; None without one."""
        return self._first_of(Role.Critic)

    @property
    def rm(self) -> Any:
        """The reward model; None without one."""
        return self._first_of(Role.RewardModel)

    @property
    def model(self) -> Any:
        """The model that learns, and is exported for transformers and vLLM.

        Raises:
            PlacementError: Engines are alone.
        """
        if not self.learners:
            raise PlacementError("trainer.role_pools.actor is null: this run has engines alone, and no model to write")
        return self.groups[self.learners[0]]

    @property
    def trained(self) -> list[Any]:
        """The groups whose models learn, and are saved."""
        return [self.groups[role] for role in self.learners]

    # ------------------------------------------------------------------ from start to end

    def init_models(self, stage: ShowStage = in_silence) -> None:
        """Load every model and start the engines: pools side by side, the roles of a pool one after the other.

        Args:
            stage: Shows what goes on; what it yields takes the roles that are not ready yet.

        Raises:
            WorkerError: The first failure, at once; `wait_for_all` says what becomes of others.
        """
        loading = [
            # The processes of a pool take their calls in turn: each one's deadline holds the time of those before it.
            group.with_timeout(place * self.init_timeout_s).execute_all_async("init_model")
            for groups in self.load_order
            for place, group in enumerate(groups, 1)
        ]
        roles = [str(group.roles[0]) for groups in self.load_order for group in groups]
        engine = " and starting the engine" if self.rollout is not None else ""
        with stage(f"loading {', '.join(roles)}{engine}") as tell:
            waiting = list(zip(loading, roles, strict=True))
            wait_for_all(loading, lambda done: _tell_of(waiting, done, tell))
        if self.rollout is not None and self.actor is not None and self.rollout is not self.actor:
            nodes = {*self.actor.node_ips, *self.rollout.node_ips}
            address = "127.0.0.1" if len(nodes) == 1 else self.actor.node_ips[0]
            self._weight_group = self.actor.open_weight_broadcast(self.rollout.world_size, address)

    def sync_weights(self, version: int, timeout_s: float) -> dict[str, float]:
        """Give every engine the policy's weights as `version`, and return the sender's and engines' figures as metrics.

        On separate pools there is one group of trainer rank 0 and all processes of all engines. Engines that are alone
        keep the weights of the model's folder.
        """
        if self.actor is None:
            return {}
        actor, rollout = (group.with_timeout(timeout_s) for group in (self.actor, self.rollout))
        if self.actor is self.rollout:  # weights pass by memory handles within each process
            engines = [engine for engine in actor.sync_weights(version) if engine]
            slowest = max(engines, key=lambda engine: engine.get("weight_sync/seconds", 0.0))
            return slowest | _over_engines(engines)
        receiving = rollout.receive_weights(version, *self._weight_group)
        sending = actor.send_weights(version)
        try:
            engines, senders = wait_for_all([receiving, sending])
        except WorkerError as error:
            if error.method.endswith(".send_weights"):
                _raise_cause_in(receiving, error)
            raise
        return senders[0] | _over_engines([engine for engine in engines if engine])

    def save(self, folder: Path, contents: Sequence[str]) -> list[Path]:
        """Have the state of every model that learns written below `folder`, and a transformers folder `hf` where asked.

        What is written is the state at this moment; training may go on meanwhile.

        Returns:
            The files that will be there when everything is, see `is_written`.
        """
        records: list[str] = []
        for role in self.learners:
            records += self.groups[role].save_checkpoint(str(folder / _FOLDERS.get(role, role.value)))
        if "hf_model" in contents:
            records.append(str(folder / "written-hf.json"))
            self.model.export_hf(str(folder / "hf"), records[-1])
        return [Path(record) for record in records]

    def ranks(self) -> dict[str, int]:
        """Return how many ranks hold each model that learns, by the name of its folder in a checkpoint."""
        return {_FOLDERS.get(role, role.value): self.groups[role].world_size for role in self.learners}

    def export(self, folder: Path) -> None:
        """Write a folder that transformers and vLLM load."""
        self.model.export_hf(str(folder))
        self.finish_save()

    def finish_save(self, *, wait: bool = True) -> None:
        """Wait until all ranks have written what they are to write, or only look; raise what went wrong."""
        for role in self.learners:
            self.groups[role].finish_save(wait)

    def abandon_save(self) -> None:
        """Wait until no rank writes anything any more, whatever became of it."""
        for role in self.learners:
            self.groups[role].abandon_save()

    def bytes_to_save(self, contents: Sequence[str]) -> dict[str, int]:
        """Return the bytes of tensors that `save` writes, by what a checkpoint holds."""
        sizes: dict[str, int] = {}
        for role in self.learners:
            for rank in self.groups[role].bytes_to_save():
                for content, size in rank.items():
                    sizes[content] = sizes.get(content, 0) + size
        if "hf_model" in contents:
            sizes["hf_model"] = self.model.bytes_to_export()[0]
        return sizes

    def load(self, folder: Path) -> None:
        """Load what `save` wrote."""
        for role in self.learners:
            self.groups[role].load_checkpoint(str(folder / _FOLDERS.get(role, role.value)))

    def peak_memory(self) -> list[dict[str, Metric]]:
        """Return `perf/max_memory_gib` and the like of every rank of every pool."""
        return [metrics for answer in self._ask("peak_memory", lambda _: ()) for metrics in answer]

    def start_profile(self) -> None:
        """Profile every process of every pool, and the engines' own."""
        if self.rollout is not None:
            self.rollout.start_engine_profile()
        self._ask("start_profile", lambda _: ())

    def stop_profile(self, step: int) -> dict[str, list[Profile]]:
        """Have every process write its trace of a step, and return the profiles of the processes of each kind.

        Returns:
            The roles of a pool, joined by `+`, or `engine` → the profiles of its processes.
        """
        answers = self._ask("stop_profile", lambda group: (f"step_{step}_{_roles_of(group)}",))
        found = dict(zip(map(_roles_of, self.processes), answers, strict=True))
        if self.rollout is not None:
            of_ranks = self.rollout.stop_engine_profile(f"step_{step}_engine")
            found["engine"] = [profile for profiles in of_ranks for profile in profiles]
        return {name: list(map(Profile.from_plain, profiles)) for name, profiles in found.items() if profiles}

    def _ask(self, method: str, arguments_of: Callable[[RayWorkerGroup], tuple[Any, ...]]) -> list[list[Any]]:
        """Call a method once in every process, and return the answers of the ranks of every pool.

        Any role of a process speaks for all of them.
        """
        asked = [getattr(group, f"{group.roles[0]}_{method}")(*arguments_of(group)) for group in self.processes]
        return [answer.get() for answer in asked]

    def shutdown(self) -> None:
        """End every process of every pool, and give the pools back."""
        for group in self.processes:
            group.shutdown()
        self.release()


def _roles_of(group: RayWorkerGroup) -> str:
    return "+".join(map(str, group.roles))


def _tell_of(waiting: list[tuple[GroupFuture, str]], done: GroupFuture, tell: Callable[[str], None] | None) -> None:
    """Say which roles are still loading, now that one has."""
    (place,) = (place for place, (future, _) in enumerate(waiting) if future is done)
    _, ready = waiting.pop(place)
    if tell is not None and waiting:
        tell(f"{ready} is ready; still loading: {', '.join(role for _, role in waiting)}")


def _raise_cause_in(receiving: GroupFuture, consequence: WorkerError) -> None:
    """Re-raise the receiver's error if it has one; the sender saw only a dropped connection."""
    try:
        receiving.get(timeout_s=CAUSE_NOTICE_S)
    except WorkerTimeoutError:
        return
    except WorkerError as cause:
        raise cause from consequence


_COUNTED = (
    "rollout/split_waves",
    "rollout/failovers",
    "rollout/drafts",
    "rollout/draft_tokens",
    "rollout/accepted_tokens",
)
"""What engines count (`RolloutEngine.take_counts`)."""


def _over_engines(engines: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the least that an engine read back, what was counted in all, and the shares that follow from it."""
    least = "weight_sync/read_back_tensors"
    read_back = [engine[least] for engine in engines if least in engine]
    counts = {name: sum(engine.get(name, 0.0) for engine in engines) for name in _COUNTED}
    metrics = {least: min(read_back)} if read_back else {}
    metrics |= {name: count for name, count in counts.items() if count}
    if drafts := counts["rollout/drafts"]:
        accepted = metrics["rollout/accepted_tokens"] = counts["rollout/accepted_tokens"]
        metrics["rollout/acceptance_rate"] = accepted / counts["rollout/draft_tokens"]
        metrics["rollout/accepted_per_draft"] = accepted / drafts
    return metrics
