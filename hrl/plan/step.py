"""One step of a run: its phases in seconds, and the memory of its devices."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from hrl.config.arithmetic import step_sizes
from hrl.config.model import ForwardShardingConfig, FsdpConfig
from hrl.config.placement import Placement, model_scores_apart, resolve_placement
from hrl.config.ppo import PPOTrainerConfig
from hrl.models.dtypes import dtype_of
from hrl.plan.assumptions import ON_CPU, ON_GPU, Assumptions
from hrl.plan.cost import Phase, together_s
from hrl.plan.hardware import Hardware
from hrl.plan.sampling import Engines
from hrl.plan.shapes import ModelShape, sizes_of
from hrl.plan.sync import sync_s
from hrl.plan.training import Learner
from hrl.plan.workload import Workload
from hrl.preflight.memory_ledger import GIB, Ledger, engine_too_small, gib, ledgers_of
from hrl.trainer.ppo.old_log_probs import needs_old_log_prob

DRIVER = "the driver packs, sends and collects"
_ENGINE_WORK_BYTES = GIB
_ENGINE_SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"


def driver_s(assumed: Assumptions, tokens: float, ranks: int) -> float:
    """Return the seconds that the driver spends on a phase."""
    return assumed.driver_hop_s + assumed.driver_token_s * tokens + assumed.driver_rank_s * ranks


class Bottleneck(NamedTuple):
    """Where most of a step goes.

    Attributes:
        phase: Name of the longest phase.
        cause: What most of that phase is spent on.
        share: The phase's, of the step's seconds.
    """

    phase: str
    cause: str
    share: float


@dataclass(frozen=True)
class StepCost:
    """What a step takes.

    Attributes:
        phases: In order.
        work: The samples.
        devices: Devices of the run.
        ledgers: Memory by phase.
    """

    phases: tuple[Phase, ...]
    work: Workload
    devices: int
    ledgers: tuple[Ledger, ...]

    @property
    def seconds(self) -> float:
        """Of the whole step, without validation and checkpoints."""
        return together_s(self.phases)

    @property
    def overlap_s(self) -> float:
        """By how much the seconds of the phases exceed those of the step, since some run at once; `perf/overlap_s`."""
        return sum(phase.seconds for phase in self.phases) - self.seconds

    @property
    def tokens_per_second(self) -> float:
        """As `perf/throughput` counts them: prompts and responses of all rows."""
        return self.work.tokens / self.seconds

    @property
    def bottleneck(self) -> Bottleneck:
        """The longest phase, and what most of it is spent on."""
        phase = max(self.phases, key=lambda phase: phase.seconds)
        return Bottleneck(phase.name, phase.largest, phase.seconds / self.seconds)

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest device at its worst moment."""
        return max(ledger.peak.num_bytes for ledger in self.ledgers)


@dataclass(frozen=True)
class CostModel:
    """The model of cost of a run.

    Attributes:
        config: The configuration, with every `auto` replaced by a dtype.
        shapes: Role → shape of its model.
        hardware: One device; on a CPU, the whole machine.
        work: The samples of a step.
    """

    config: PPOTrainerConfig
    shapes: Mapping[str, ModelShape]
    hardware: Hardware
    work: Workload

    @property
    def assumed(self) -> Assumptions:
        """The constants of this kind of hardware."""
        return ON_CPU if self.hardware.is_cpu else ON_GPU

    @cached_property
    def placement(self) -> Placement:
        """Pools and roles."""
        return resolve_placement(self.config)

    @property
    def packs_rows(self) -> bool:
        """Whether rows are packed; all roles get padded ones where the model of one can't run packed ones."""
        return all(shape.packs_rows for shape in self.shapes.values())

    @property
    def shares_devices(self) -> bool:
        """Whether engines are on the devices of the trained policy."""
        return self.placement.actor == self.placement.rollout

    def cost(self) -> StepCost:
        """Return what a step takes."""
        devices = self.placement.num_devices
        return StepCost(tuple(self.phases()), self.work, devices, tuple(self.ledgers()))

    def ledgers(self) -> list[Ledger]:
        """Return the memory of each pool's device, or of the machine."""
        device = "cpu" if self.hardware.is_cpu else "cuda"
        ledgers = ledgers_of(self.config, sizes_of(self.shapes), device, self.hardware.memory)
        return [ledger for ledger in ledgers if not ledger.is_host]

    def misfit(self, *, leaving: float = 0.0) -> str | None:
        """Return why the run does not fit its devices; None if it does.

        Args:
            leaving: Share of a device's memory that is to stay free.
        """
        if (small := self.engine_misfit()) is not None:
            return small
        for ledger in self.ledgers():
            peak = ledger.peak
            if peak.num_bytes > (1.0 - leaving) * self.hardware.memory:
                has = f"{ledger.where} has {gib(self.hardware.memory)} GiB"
                return f"{has}, and {peak.name!r} takes {peak.in_words()}"
        return None

    def engine_misfit(self) -> str | None:
        """Return why a GPU's share for the engine holds none; None if it does."""
        if self.hardware.is_cpu:
            return None
        small = engine_too_small(self.engine_bytes, self.config, self.shapes["actor"].size)
        return None if small is None else f"{_ENGINE_SHARE} {small}"

    @property
    def engine_bytes(self) -> float:
        """What an engine takes of a GPU while it is awake."""
        return self.config.actor_rollout_ref.rollout.gpu_memory_utilization * self.hardware.memory

    # ------------------------------------------------------------------------------------------ phases

    def phases(self, *, of_engines: bool | None = None) -> Iterator[Phase]:
        """Yield the phases that the run has, in their order.

        Args:
            of_engines: Only the phase of the engines, or only the others; None is all.
        """
        if of_engines is not False:
            yield self._driven("gen", self.engines().seconds(self.work))
        if of_engines is not True:
            yield from self._scores()
            yield from self._updates()

    def _scores(self) -> Iterator[Phase]:
        """Yield the forwards that the run makes between sampling and updates, and the advantages."""
        config, work = self.config, self.work
        if config.needs_reward_model:
            beside = "rm" if model_scores_apart(config) else None
            yield self._driven("reward", self._learner("rm").forward(work), beside)
        if needs_old_log_prob(config):
            rejects = bool(config.algorithm.rollout_correction.rollout_rs)  # then others wait for what is left
            score = self._learner("actor", scores=True).forward(work)
            yield self._driven("old_log_prob", score, None if rejects else "actor")
        if config.runs_reference:
            ref = "actor" if config.reference_is_actor else "ref"
            yield self._driven("ref", self._learner(ref).forward(work), ref)
        if config.needs_critic:
            yield self._driven("values", self._learner("critic", scores=True).forward(work), "critic")
        cells = work.sequences * work.longest_response
        yield Phase("adv", {"the driver": self.assumed.advantage_token_s * cells})

    def _updates(self) -> Iterator[Phase]:
        """Yield the updates and the weight sync."""
        config, work = self.config, self.work
        if config.needs_critic:
            steps, everyone = step_sizes(config, config.critic), replace(work, teaching=1.0)
            update = self._learner("critic").update(everyone, steps.optimizer_steps, steps.mini_batches)
            yield self._driven("update_critic", update, "critic")
        policy, steps = self._learner("actor"), step_sizes(config)
        yield self._driven("update_actor", policy.update(work, steps.optimizer_steps, steps.mini_batches), "actor")
        terms = sync_s(
            policy.shape,
            policy.shards,
            policy.hardware,
            self.assumed,
            shares=self.shares_devices,
            sleeps=config.actor_rollout_ref.rollout.free_cache_engine,
            sends_adapter=not config.actor_rollout_ref.model.lora.merge,
        )
        yield Phase("weight_sync", terms)

    def _driven(self, name: str, terms: dict[str, float], beside: str | None = None) -> Phase:
        """Return a phase with the driver's part in it.

        Args:
            name: Of its timer.
            terms: Of its ranks.
            beside: Its role, if it runs beside its neighbours where these are on other devices. On a CPU it does not:
                all of them compute on the same cores.
        """
        ranks = max(self.ranks(role) for role in ("actor", "rollout"))
        devices: frozenset[Hashable] | None = None
        if beside is not None and not self.hardware.is_cpu:
            devices = frozenset(self.placement.devices(self.placement.roles[self._role_of(beside)]))
        return Phase(name, {**terms, DRIVER: driver_s(self.assumed, self.work.tokens, ranks)}, devices)

    def engines(self) -> Engines:
        """Return the engines that sample."""
        rollout, shape = self.config.actor_rollout_ref.rollout, self.shapes["actor"]
        ranks = rollout.tensor_model_parallel_size
        count = max(1, self.ranks("rollout") // ranks)
        width = dtype_of(rollout.dtype).itemsize
        cache = rollout.kv_cache_gib * GIB
        if not self.hardware.is_cpu:
            cache = ranks * (self.engine_bytes - _ENGINE_WORK_BYTES) - width * shape.size.parameters
        return Engines(
            shape=shape,
            hardware=self._device("rollout"),
            assumed=self.assumed,
            count=count,
            ranks=ranks,
            cache_bytes=max(cache, 1.0),
            max_requests=rollout.max_num_seqs,
            shares_prompts=rollout.enable_prefix_caching,
            max_episodes=self.config.environment.max_concurrent_episodes / count or inf,
        )

    def _learner(self, role: str, *, scores: bool = False) -> Learner:
        """Return the ranks of a role as they update, or as they score where their budget is another then."""
        config, policy = self.config, self.config.actor_rollout_ref
        sharding: FsdpConfig | ForwardShardingConfig = policy.actor.fsdp_config
        if role == "ref":
            sharding = policy.ref.fsdp_config
        elif role == "critic":
            sharding = config.critic.model.fsdp_config
        elif role == "rm":
            sharding = config.reward.reward_model.model.fsdp_config
        name = {"actor": "log_prob", "critic": "values"}.get(role, role) if scores else role
        ranks, longest = self.ranks(role), config.data.max_prompt_length + config.data.max_response_length
        each = config.micro_batches()[name]
        return Learner(
            shape=self.shapes["actor" if role == "ref" and role not in self.shapes else role],
            hardware=self._device(role),
            assumed=self.assumed,
            ranks=ranks,
            shards=ranks if sharding.fsdp_size == -1 else sharding.fsdp_size,
            budget=each.largest(longest),
            recompute=(config.critic.model if role == "critic" else policy.model).enable_gradient_checkpointing,
            master_bytes=dtype_of(sharding.model_dtype).itemsize,
            compute_bytes=dtype_of(sharding.dtype).itemsize,
            reshards=sharding.reshard_after_forward,
            has_head=role in ("actor", "ref"),
            param_offload=sharding.param_offload and not (self.hardware.is_cpu or sharding.offload_policy),
            optimizer_offload=sharding.optimizer_offload and not (self.hardware.is_cpu or sharding.offload_policy),
            degree=each.processes,
            offload_policy=sharding.offload_policy and not self.hardware.is_cpu,
            tensor=sharding.tensor_parallel_size,
            experts=sharding.expert_parallel_size,
            packs_rows=self.packs_rows,
            max_rows=each.max_rows,
        )

    def ranks(self, role: str) -> int:
        """Return the number of processes of a role."""
        return self.placement.processes(self._role_of(role))

    def _role_of(self, name: str) -> str:
        placement = self.placement
        return {"actor": placement.actor, "rollout": placement.rollout}.get(name, name)

    def _device(self, role: str) -> Hardware:
        """Return what one rank of a role computes on."""
        return self.hardware.shared_by(self.ranks(role)) if self.hardware.is_cpu else self.hardware
