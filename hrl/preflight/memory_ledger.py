"""Add up the memory of every phase of a run before anything starts, and tell whether it fits.

A model's sizes come from its config (`hrl.models.footprint`); placement and offloading determine what is resident in
which phase. On a GPU the sum is for one card; on a CPU it is for the machine, whose memory all processes share. The
sums are upper estimates of the tensors at a phase's worst moment, without losses to fragmentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hrl.config.arithmetic import Fact
from hrl.config.model import ForwardShardingConfig, FsdpConfig
from hrl.config.offline import DPOTrainerConfig, OfflineConfig, PairDataConfig, RMTrainerConfig
from hrl.config.outline import RunConfiguration
from hrl.config.placement import Placement, resolve_placement
from hrl.config.ppo import PPOTrainerConfig
from hrl.models.dtypes import dtype_of
from hrl.models.footprint import Footprint
from hrl.models.ops.log_prob import default_chunk
from hrl.workers.engine.casts import keeps_cast_parameters

GIB = 1 << 30
#: AdamW's two moments of one weight, both float32.
_MOMENT_BYTES = 8
#: Gradients are reduced, and the head's gradient summed up, in float32.
_REDUCE_BYTES = 4
#: Ratio of a layer's activations and their gradients in the backward pass to the activations alone; torch's memory
#: tracker shows 1.3 to 1.6.
_BACKWARD_OVER_KEPT = 1.6
#: Number of float32 tiles of logits that are held at once in the log-prob's backward pass.
_LOGIT_TILES = 3
#: CUDA's context, NCCL's buffers, and memory that the allocator can't release.
_CUDA_OVERHEAD_BYTES = int(1.5 * GIB)
#: Memory that a sleeping engine keeps: context and CUDA graphs.
_ASLEEP_BYTES = int(1.5 * GIB)
#: Memory of a running engine besides weights and cache: the activations of one iteration.
_ENGINE_WORK_BYTES = 1 * GIB
#: Libraries and interpreter of processes on a CPU: a rank, an engine's two processes, the driver with those of Ray.
_RANK_BYTES, _ENGINE_BYTES, _DRIVER_BYTES = int(0.9 * GIB), int(1.9 * GIB), int(2.0 * GIB)


class Entry(NamedTuple):
    """One item of a phase.

    Attributes:
        label: Name of the item.
        num_bytes: Size in bytes.
        certain: Whether it follows from the configuration; otherwise it is an upper estimate, e.g. the activations of
            the largest micro-batch that the configuration allows.
    """

    label: str
    num_bytes: float
    certain: bool = True


@dataclass(frozen=True)
class MemoryPhase:
    """What is resident at the worst moment of a phase."""

    name: str
    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> float:
        """The sum."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def certain_bytes(self) -> float:
        """The sum of the entries that are certain."""
        return sum(entry.num_bytes for entry in self.entries if entry.certain)

    def in_words(self) -> str:
        """Return the sum and its parts, the largest first."""
        parts = sorted(self.entries, key=lambda entry: entry.num_bytes, reverse=True)
        listed = ", ".join(f"{entry.label} {gib(entry.num_bytes)}" for entry in parts if entry.num_bytes >= GIB / 20)
        return f"{gib(self.num_bytes)} GiB: {listed}"


@dataclass(frozen=True)
class Ledger:
    """The phases of all processes that share one memory.

    Attributes:
        where: Name of the memory: a GPU of a pool, or the machine.
        phases: Phases in the order of a step.
    """

    where: str
    phases: tuple[MemoryPhase, ...]

    @property
    def peak(self) -> MemoryPhase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.num_bytes)


@dataclass(frozen=True)
class ResidentModel:
    """One model of a process.

    Attributes:
        name: Role of the model.
        size: Sizes of the whole model.
        trained: Whether it has gradients and moments.
        master_bytes: Bytes of a stored weight.
        compute_bytes: Bytes of a weight in a matrix product.
        shards: Number of processes that share one copy.
        tokens: Tokens of its largest micro-batch on one process.
        recompute: Whether activations are recomputed in the backward pass.
        keeps_cast: Whether all weights in the compute dtype are there at once: a rank that is alone keeps them, see
            `keeps_cast_parameters`, and several gather them for a whole pass if they don't reshard after the forward.
        param_offload, optimizer_offload: Whether these are in host memory while not in use.
        has_head: Whether it computes log-probs; a value or reward model has a head of one row.
        chunk: Number of logits held at once.
        is_reference: Whether its log-probs before its first step are the reference's.
        cut: Processes of a tensor group, each with parts of the large weights and of what is computed with them.
    """

    name: str
    size: Footprint
    trained: bool
    master_bytes: int
    compute_bytes: int
    shards: int
    tokens: int
    recompute: bool
    keeps_cast: bool
    param_offload: bool
    optimizer_offload: bool
    has_head: bool
    chunk: int
    is_reference: bool = False
    cut: int = 1

    @property
    def weights(self) -> float:
        """Bytes of this process's share of the stored weights."""
        return self.frozen + self.trained_weights

    @property
    def frozen(self) -> float:
        """Bytes of its share of the weights beside an adapter, which are stored as matrix products read them."""
        return self.compute_bytes * self.size.parameters / self.shards if self.has_adapter else 0.0

    @property
    def trained_weights(self) -> float:
        """Bytes of its share of the weights that are trained, or would be."""
        return self.master_bytes * (self.size.adapter if self.has_adapter else self.size.parameters) / self.shards

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained instead of the model."""
        return self.trained and self.size.adapter > 0

    @property
    def moments(self) -> float:
        """Bytes of this process's share of AdamW's moments."""
        return _MOMENT_BYTES * self.size.trained / self.shards if self.trained else 0.0

    @property
    def gathered(self) -> float:
        """Bytes of weights in the compute dtype: all, or those of embedding, head, the running layer and the next."""
        if self.keeps_cast:
            return self.compute_bytes * self.size.parameters / self.cut
        size = self.size
        return self.compute_bytes * (size.embedding + size.head + 2 * size.largest_layer) / self.cut

    @property
    def logits(self) -> float:
        """Bytes of the tiles of logits."""
        logits = self.tokens * self.size.vocab_size / self.cut
        return _LOGIT_TILES * _REDUCE_BYTES * min(self.chunk, logits) * self.has_head

    @property
    def layer(self) -> float:
        """Bytes that one layer's activations take while it runs."""
        return self.compute_bytes / 2 * self.kept_per_token * self.tokens

    @property
    def kept_per_token(self) -> float:
        """Bytes that a layer keeps of each token, of which every process of a tensor group has the residual stream."""
        size = self.size
        return size.stream_bytes_per_token + (size.kept_bytes_per_token - size.stream_bytes_per_token) / self.cut

    def idle(self) -> Iterator[Entry]:
        """Yield what stays on the device while other models work."""
        if not self.param_offload:
            yield Entry(f"{self.name} weights", self.weights)
        if not self.optimizer_offload:
            yield Entry(f"{self.name} moments", self.moments)

    def phases(self) -> Iterator[tuple[str, list[Entry]]]:
        """Yield each phase in which the model works: its name, and what the model then holds."""
        if self.is_reference:
            yield "reference", self.forward()
        yield (f"{self.name} update", self.update()) if self.trained else (f"{self.name} scores", self.forward())

    def _at_work(self) -> list[Entry]:
        """Return what every pass needs; offloaded parameters are on the device while it runs."""
        moments = [] if self.optimizer_offload else [Entry(f"{self.name} moments", self.moments)]
        gathered = Entry(f"{self.name} gathered weights", self.gathered)
        return [Entry(f"{self.name} weights", self.weights), *moments, gathered]

    def forward(self) -> list[Entry]:
        """Return the entries of a forward pass without gradients."""
        return [
            *self._at_work(),
            Entry(f"{self.name} activations", self.layer, certain=False),
            Entry(f"{self.name} logits", self.logits, certain=False),
        ]

    def update(self) -> list[Entry]:
        """Return the entries at the worst moment of forward and backward; the optimizer's step afterwards needs less.

        Gradients grow while the kept activations shrink, so the larger of the two counts.
        """
        size = self.size
        gradients = self.trained_weights
        per_token = size.stream_bytes_per_token if self.recompute else self.kept_per_token
        kept = self.compute_bytes / 2 * per_token * self.tokens * size.num_layers
        # Of frozen weights there is no gradient.
        gradient = size.adapter // size.num_layers if self.has_adapter else size.largest_layer / self.cut
        in_layer = _BACKWARD_OVER_KEPT * self.layer + gradient * (self.compute_bytes + _REDUCE_BYTES)
        head = 0 if self.has_adapter else max(size.head, size.embedding) / self.cut * self.has_head
        in_head = self.logits + head * (self.compute_bytes + _REDUCE_BYTES)
        left = max(0.0, kept - gradients) if self.recompute else kept
        return [
            *self._at_work(),
            Entry(f"{self.name} gradients", gradients),
            Entry(f"{self.name} kept activations", left, certain=False),
            Entry(f"{self.name} layer at work", max(in_layer, in_head), certain=False),
        ]


@dataclass(frozen=True)
class EngineMemory:
    """The sampler beside or instead of the models of a process.

    Attributes:
        weights: Bytes of weights per process.
        sent: Those of them that a weight sync brings.
        utilization: Share of a GPU that vLLM takes while awake.
        cache: Bytes of the KV cache on a CPU.
        one_sequence: Bytes of the KV cache for the longest sequence.
        buckets: Bytes of the buffers of a weight sync: two if the engine opens the handles of a trainer beside it, one
            if it receives a broadcast.
        largest_tensor: Bytes of the largest weight, unsharded.
        sleeps: Whether it releases its memory while others work.
        shares: Whether it shares its device with the actor.
        is_synced: Whether there is an actor, whose weights it gets.
    """

    weights: float
    sent: float
    utilization: float
    cache: float
    one_sequence: float
    buckets: float
    largest_tensor: float
    sleeps: bool
    shares: bool
    is_synced: bool


class _Pool(NamedTuple):
    """Processes that hold the same models.

    Attributes:
        where: Name of the memory of one of them, if it is a GPU.
        processes: Their number on the machine that has most of them.
        models: The models of each.
        engine: The sampler beside or instead of the models, if there is one.
        engines: Number of engines on that machine.
    """

    where: str
    processes: int
    models: list[ResidentModel]
    engine: EngineMemory | None = None
    engines: int = 0


def ledgers_of(
    config: RunConfiguration, sizes: Mapping[str, Footprint], device: str, capacity_bytes: float | None
) -> list[Ledger]:
    """Return the ledgers of a run: one for a GPU of each pool, or one for the machine.

    Args:
        config: The validated configuration, with every `auto` replaced by a dtype.
        sizes: Role (`actor`, `critic`, `rm`) → sizes of its model; the reference and the engine use the actor's.
        device: `cpu` or `cuda`.
        capacity_bytes: Memory of one card, to which the engine's share refers; None if unknown.
    """
    if isinstance(config, PPOTrainerConfig):
        pools = _pools(config, sizes, device)
    else:
        pools = [_offline_pool(config, next(iter(sizes.values())), device)]
    if device == "cpu":
        return [_machine(pools, saves=config.trainer.save_freq > 0)]
    return [Ledger(pool.where, tuple(_card(pool, capacity_bytes))) for pool in pools]


# ---------------------------------------------------------------------------------------------- models and engines


def _resident(
    name: str,
    size: Footprint,
    fsdp: FsdpConfig | ForwardShardingConfig,
    ranks: int,
    tokens: int,
    device: str,
    *,
    recompute: bool,
    head: bool = True,
    is_reference: bool = False,
) -> ResidentModel:
    return ResidentModel(
        name=name,
        size=size,
        trained=isinstance(fsdp, FsdpConfig),
        master_bytes=dtype_of(fsdp.model_dtype).itemsize,
        compute_bytes=dtype_of(fsdp.dtype).itemsize,
        shards=ranks if fsdp.fsdp_size == -1 else fsdp.fsdp_size,
        tokens=tokens,
        recompute=recompute,
        keeps_cast=(ranks > 1 and not fsdp.reshard_after_forward)
        or keeps_cast_parameters(ranks, torch.device(device), fsdp.reshard_after_forward),
        param_offload=fsdp.param_offload and device != "cpu",
        optimizer_offload=fsdp.optimizer_offload and device != "cpu",
        has_head=head,
        chunk=default_chunk(torch.device(device)),
        is_reference=is_reference,
        cut=fsdp.tensor_parallel_size,
    )


def _largest_micro_batch(config: PPOTrainerConfig, role: str, prompts: int, ranks: int) -> int:
    """Return a rank's tokens of a role's largest micro-batch, at most its part of the samples of `prompts`.

    Episodes have no such bound: how many rows they give, and how much of them is shared, is known when they are over.
    """
    samples, data, each = config.actor_rollout_ref.rollout.n, config.data, config.micro_batches()[role]
    sequences = -(-prompts * samples * each.processes // ranks)
    there = sequences * data.max_response_length + -(-sequences // samples) * data.max_prompt_length
    longest = data.max_prompt_length + data.max_response_length
    largest = each.largest(longest)
    return -(-(largest if config.environment.is_used else min(there, largest)) // each.slices)


def _pools(config: PPOTrainerConfig, sizes: Mapping[str, Footprint], device: str) -> list[_Pool]:
    """Return the pools of a PPO run."""
    placement, tensor_parallel = resolve_placement(config), config.actor_rollout_ref.rollout.tensor_model_parallel_size
    pools = []
    for name, sizes_on_nodes in placement.pools.items():
        roles, processes = placement.roles_on(name), max(sizes_on_nodes)
        models = [_model_of(config, role, sizes, placement, device) for role in roles if role != "rollout"]
        pool = _Pool(f"each GPU of pool {name}", processes, models)
        if placement.rollout in roles:
            engine = _engine_of(config, sizes["actor"], shares="rollout" not in roles, is_synced=placement.trains)
            pool = pool._replace(engine=engine, engines=max(1, processes // tensor_parallel))
        pools.append(pool)
    return pools


def _model_of(
    config: PPOTrainerConfig, role: str, sizes: Mapping[str, Footprint], placement: Placement, device: str
) -> ResidentModel:
    """Return the model of a role."""
    policy, critic, ranks = config.actor_rollout_ref, config.critic, placement.processes(role)
    name = "actor" if role == "actor_rollout" else role
    sharding: FsdpConfig | ForwardShardingConfig
    if name in ("actor", "critic"):
        learner = policy.actor if name == "actor" else critic
        sharding = policy.actor.fsdp_config if name == "actor" else critic.model.fsdp_config
        prompts = learner.ppo_mini_batch_size
    else:
        sharding = policy.ref.fsdp_config if name == "ref" else config.reward.reward_model.model.fsdp_config
        prompts = config.data.train_batch_size
    return _resident(
        name,
        sizes["actor" if name == "ref" else name],
        sharding,
        ranks,
        _largest_micro_batch(config, name, prompts, ranks),
        device,
        recompute=(critic.model if name == "critic" else policy.model).enable_gradient_checkpointing,
        head=name in ("actor", "ref"),
    )


def _offline_pool(config: OfflineConfig, size: Footprint, device: str) -> _Pool:
    """Return the one pool of a run that learns from a data set."""
    rows, each = 2 if isinstance(config.data, PairDataConfig) else 1, config.micro_batches()["model"]
    model = _resident(
        "model",
        size,
        config.model.fsdp_config,
        config.num_processes,
        -(-each.largest(rows * config.data.max_length) // each.slices),
        device,
        recompute=config.model.enable_gradient_checkpointing,
        head=not isinstance(config, RMTrainerConfig),
        is_reference=isinstance(config, DPOTrainerConfig) and config.needs_reference,
    )
    return _Pool("each GPU", config.trainer.n_gpus_per_node, [model])


def _engine_of(config: PPOTrainerConfig, size: Footprint, *, shares: bool, is_synced: bool) -> EngineMemory:
    rollout = config.actor_rollout_ref.rollout
    width = dtype_of(rollout.dtype).itemsize
    ranks = rollout.tensor_model_parallel_size
    sends_adapter = size.adapter > 0 and not config.actor_rollout_ref.model.lora.merge
    longest = rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length
    return EngineMemory(
        weights=width * size.parameters / ranks,
        sent=width * (size.adapter if sends_adapter else size.parameters) / ranks,
        utilization=rollout.gpu_memory_utilization,
        cache=rollout.kv_cache_gib * GIB,
        one_sequence=size.kv_bytes_per_token * width / 2 * longest / ranks,
        buckets=(2 if shares else 1) * rollout.weight_sync.bucket_mb * (1 << 20),
        largest_tensor=width * (size.adapter // size.num_layers if sends_adapter else max(size.embedding, size.head)),
        sleeps=rollout.free_cache_engine and shares,
        shares=shares,
        is_synced=is_synced,
    )


# ---------------------------------------------------------------------------------------------- phases


def _overhead() -> Iterator[Entry]:
    yield Entry("CUDA", _CUDA_OVERHEAD_BYTES, certain=False)


def _asleep() -> Entry:
    return Entry("engine asleep", _ASLEEP_BYTES, certain=False)


def _card(pool: _Pool, capacity_bytes: float | None) -> Iterator[MemoryPhase]:
    """Yield the phases of a GPU: engine start and generation, then every model in turn, then the sync."""
    models, engine = pool.models, pool.engine
    idle = [entry for model in models for entry in model.idle()]
    asleep: list[Entry] = []
    if engine is not None:
        share = engine.utilization * capacity_bytes if capacity_bytes is not None else _least(engine)
        awake = Entry("engine", share)
        yield MemoryPhase("generation", (*idle, awake, *_overhead()))
        asleep = [_asleep() if engine.sleeps else awake] if engine.shares else []
        if not models:
            if engine.is_synced:
                yield MemoryPhase("weight sync", (awake, *_reload(engine), *_overhead()))
            return
    for model in models:
        others = [entry for other in models if other is not model for entry in other.idle()]
        for name, work in model.phases():
            yield MemoryPhase(name, (*work, *others, *asleep, *_overhead()))
    if engine is not None and engine.shares:
        actor = next(model for model in models if model.name == "actor")
        whole = Entry("a gathered tensor", actor.compute_bytes * max(actor.size.embedding, actor.size.largest_layer))
        half_awake = [Entry("engine weights", engine.weights), _asleep()] if engine.sleeps else [awake]
        # Offloaded shards stay in host memory; each one comes to the device in turn.
        yield MemoryPhase("weight sync", (*idle, *half_awake, *_reload(engine), whole, *_overhead()))


def _reload(engine: EngineMemory) -> Iterator[Entry]:
    """Yield the buffers for loading new weights, which are outside the share that vLLM has reserved.

    A tensor larger than a bucket is assembled whole, and the layer that loads it is created a second time.
    """
    yield Entry("buffers", engine.buckets)
    yield Entry("a tensor and its layer as they load", 2 * engine.largest_tensor, certain=False)


def _least(engine: EngineMemory) -> float:
    """Return the bytes that an engine needs to sample one sequence."""
    return engine.weights + engine.one_sequence + _ENGINE_WORK_BYTES


def engine_too_small(engine_share_bytes: float, config: PPOTrainerConfig, size: Footprint) -> str | None:
    """Return a message if a card's share can't hold the engine's weights and one sequence, else None."""
    engine = _engine_of(config, size, shares=True, is_synced=True)
    if _least(engine) <= engine_share_bytes:
        return None
    return (
        f"gives the engine {gib(engine_share_bytes)} GiB of each GPU, but its weights take {gib(engine.weights)}, the "
        f"cache of the longest sequence {gib(engine.one_sequence)} and one iteration about {gib(_ENGINE_WORK_BYTES)}"
    )


def _machine(pools: list[_Pool], *, saves: bool) -> Ledger:
    """Return the ledger of a machine without a GPU: nothing is offloaded, and all processes share its memory.

    Args:
        pools: Of the run.
        saves: Whether it writes checkpoints: what is not written when the next update comes is copied.
    """
    base = [Entry("driver and Ray", _DRIVER_BYTES, certain=False)]
    for pool in pools:
        base.append(Entry("ranks' libraries", pool.processes * _RANK_BYTES, certain=False))
        if pool.engine is not None:
            base.append(Entry("engine's libraries", pool.engines * _ENGINE_BYTES, certain=False))
            base.append(Entry("engine weights", pool.engines * pool.engine.weights))
            base.append(Entry("KV cache", pool.engines * pool.engine.cache))
            if pool.engine.is_synced:
                base.append(Entry("weights on their way", pool.engine.sent))
        base += [Entry(e.label, pool.processes * e.num_bytes) for model in pool.models for e in model.idle()]
    phases = []
    for pool in pools:
        for model in pool.models:
            resident = {entry.label for entry in model.idle()}
            for name, work in model.phases():
                added = [entry for entry in work if entry.label not in resident]
                if saves and name == f"{model.name} update":
                    copies = model.trained_weights + model.moments
                    added.append(Entry(f"{model.name} checkpoint being written", copies, certain=False))
                scaled = [Entry(e.label, pool.processes * e.num_bytes, e.certain) for e in added]
                phases.append(MemoryPhase(name, (*base, *scaled)))
    return Ledger("this machine", tuple(phases) or (MemoryPhase("generation", tuple(base)),))


# ---------------------------------------------------------------------------------------------- verdicts


def too_large(ledger: Ledger, capacity_bytes: float) -> str | None:
    """Return a message if even the certain entries don't fit, else None."""
    worst = max(ledger.phases, key=lambda phase: phase.certain_bytes)
    if worst.certain_bytes <= capacity_bytes:
        return None
    certain = MemoryPhase(worst.name, tuple(entry for entry in worst.entries if entry.certain))
    needs = f"the phase {worst.name!r} takes at least {certain.in_words()}"
    return f"{ledger.where} has {gib(capacity_bytes)} GiB, and {needs}"


def perhaps_too_large(ledger: Ledger, capacity_bytes: float) -> str | None:
    """Return a message if the ledger fits only with smaller micro-batches than the configuration allows, else None."""
    peak = ledger.peak
    if peak.num_bytes <= capacity_bytes or too_large(ledger, capacity_bytes) is not None:
        return None
    return f"{ledger.where} has {gib(capacity_bytes)} GiB, and the phase {peak.name!r} may take {peak.in_words()}"


def gib(num_bytes: float) -> str:
    """Format bytes in GiB, with one decimal below 100."""
    return f"{num_bytes / GIB:.1f}" if num_bytes < 100 * GIB else f"{num_bytes / GIB:,.0f}"


def in_words(ledgers: Iterable[Ledger]) -> list[Fact]:
    """Return a line for each phase."""
    return [Fact(f"{phase.name}, {ledger.where}", phase.in_words()) for ledger in ledgers for phase in ledger.phases]
