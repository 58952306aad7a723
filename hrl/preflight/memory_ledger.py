"""Add up the memory of every phase of a run before anything starts, and tell whether it fits.

A model's sizes come from its config (`hrl.models.footprint`); placement and offloading determine what is resident in
which phase. On a GPU the sum is for one card; on a CPU it is for the machine, whose memory all processes share. The
sums are estimates of the tensors at a phase's worst moment, within a tenth of what was measured either way, without
losses to fragmentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch

from hrl.config.model import BackboneConfig, ForwardShardingConfig, FsdpConfig, OptimConfig
from hrl.config.offline import DPOTrainerConfig, OfflineConfig, PairDataConfig, RMTrainerConfig
from hrl.config.outline import RunConfiguration
from hrl.config.placement import Placement, resolve_placement
from hrl.config.ppo import PPOTrainerConfig
from hrl.models.dtypes import dtype_of
from hrl.models.footprint import Footprint
from hrl.models.four_bit import BYTES_PER_WEIGHT
from hrl.models.ops.log_prob import default_chunk
from hrl.workers.engine.casts import keeps_cast_parameters

GIB = 1 << 30
#: What optimizers keep of one weight: AdamW's two moments, both float32 or in 8 bits; Adafactor's means of rows and
#: columns are hardly anything. Muon keeps a momentum of layers' matrices, and AdamW's moments of the rest.
_MOMENT_BYTES = {"adamw": 8.0, "adamw8bit": 2.03, "adafactor": 0.0}
_MOMENTUM_BYTES = 4.0
#: Two buckets of offloaded moments (`hrl.workers.engine.adamw`).
_VISITING_BYTES = 512 << 20
#: Weights whose updates Adafactor holds together, and with which 8-bit AdamW computes at once, in some six float32
#: tensors of the size (`hrl.workers.engine.update_rule`, `hrl.workers.engine.adamw_8bit`).
_BUCKET, _AT_ONCE, _TENSORS_AT_ONCE = 1 << 25, 1 << 23, 6
#: bfloat16 copies of a matrix with which Muon makes it orthogonal, and two products of its shorter side with itself;
#: the copies beside them of a rank that gets it from others, and those of a stack of matrices.
_MUON_COPIES, _MUON_PRODUCTS, _MUON_FROM_OTHERS, _MUON_OF_STACK = 4, 2, 2, 3
#: Gradients are reduced, and the head's gradient summed up, in float32.
_REDUCE_BYTES = 4
#: Ratio of a layer's activations and their gradients in the backward pass to the activations that it keeps, as torch's
#: memory tracker shows it.
_BACKWARD_OVER_KEPT = 1.45
#: The same of a layer that runs without gradients, where less is kept; and of one with an adapter.
_FORWARD_OVER_KEPT, _ADAPTED_OVER_KEPT = 0.7, 0.85
#: Tensors as wide as the residual stream that each rank of a tensor group has whole in a layer.
_STREAMS = 4
#: Copies of the tokens on their way to experts of other ranks and back that a layer has beside its own activations.
_ROUTED = 3
#: Number of float32 tiles of logits that the log-prob holds at once: alone, with the entropy, in its backward pass.
_TILES_ALONE, _TILES, _TILES_BACKWARD = 1.5, 3.0, 1.5
#: CUDA's context, NCCL's buffers, and memory that the allocator can't release.
_CUDA_OVERHEAD_BYTES = int(1.5 * GIB)
#: Memory that a sleeping engine keeps: context and CUDA graphs.
_ASLEEP_BYTES = int(1.5 * GIB)
#: Memory of a running engine besides weights and cache: the activations of one iteration.
_ENGINE_WORK_BYTES = 1 * GIB
#: Libraries, interpreter and what the allocator keeps, of processes on a CPU: a rank, an engine's two processes, the
#: driver with those of Ray.
_RANK_BYTES, _ENGINE_BYTES, _DRIVER_BYTES = int(1.3 * GIB), int(1.1 * GIB), int(0.9 * GIB)


class Column(StrEnum):
    """The columns of the table, in its order."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    MOMENTS = "moments"
    ACTIVATIONS = "activations"
    ENGINE = "engine"
    OTHER = "other"


class Entry(NamedTuple):
    """One item of a phase.

    Attributes:
        label: Name of the item.
        num_bytes: Size in bytes.
        column: Where the table has it.
        certain: Whether it follows from the configuration; otherwise it is an upper estimate, e.g. the activations of
            the largest micro-batch that the configuration allows.
    """

    label: str
    num_bytes: float
    column: Column = Column.OTHER
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

    @property
    def largest(self) -> Entry:
        """The item that takes most."""
        return max(self.entries, key=lambda entry: entry.num_bytes)

    def in_column(self, column: Column) -> float:
        """Return the bytes of the items of a column."""
        return sum(entry.num_bytes for entry in self.entries if entry.column is column)

    def in_words(self) -> str:
        """Return the sum and its parts, the largest first."""
        parts = sorted(self.entries, key=lambda entry: entry.num_bytes, reverse=True)
        listed = ", ".join(f"{entry.label} {gib(entry.num_bytes)}" for entry in parts if entry.num_bytes >= GIB / 20)
        return f"{gib(self.num_bytes)} GiB: {listed}"


@dataclass(frozen=True)
class Ledger:
    """The phases of all processes that share one memory.

    Attributes:
        where: Name of the memory: a GPU of a pool, the host memory of a node, or the machine.
        phases: Phases in the order of a run.
        is_host: Whether it is the memory beside GPUs.
    """

    where: str
    phases: tuple[MemoryPhase, ...]
    is_host: bool = False

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
        wide_stream: Whether the residual stream is in float32 beside products of two bytes, as on a CPU.
        shards: Number of processes that share one copy.
        tensor: Of these, those that compute parts of each product of the same tokens.
        experts: Of these, those that share out a mixture's experts.
        tokens: Tokens of its largest micro-batch on one process.
        accumulates: Whether a mini-batch may have several micro-batches, whose gradients add up.
        recomputed: Number of layers that recompute their activations in the backward pass, the first ones.
        optimizer: Its name.
        keeps_cast: Whether all weights in the compute dtype are there at once: a rank that is alone keeps them, see
            `keeps_cast_parameters`, and several gather them for a whole pass if they don't reshard after the forward.
        param_offload, optimizer_offload: Whether these are in host memory while not in use.
        all_offload: Whether weights, gradients and moments are in host memory all the time (`offload_policy`).
        activation_offload: Whether what layers keep is there.
        has_head: Whether it computes log-probs; a value or reward model has a head of one row.
        chunk: Number of logits held at once.
        forwards: Names of the phases in which it runs without gradients.
        scores_beside_engine: Whether it runs while an engine on its device is awake, for further samples of the step
            or for a validation.
        exports: Whether a checkpoint has the folder `hf`, whose weights rank 0 holds until they are written.
    """

    name: str
    size: Footprint
    trained: bool
    master_bytes: int
    compute_bytes: int
    wide_stream: bool
    shards: int
    tensor: int
    experts: int
    tokens: int
    accumulates: bool
    recomputed: int
    optimizer: str
    keeps_cast: bool
    param_offload: bool
    optimizer_offload: bool
    all_offload: bool
    activation_offload: bool
    has_head: bool
    chunk: int
    forwards: tuple[str, ...]
    scores_beside_engine: bool = False
    exports: bool = False

    # ------------------------------------------------------------------ what it holds

    @property
    def weights(self) -> float:
        """Bytes of this process's share of the stored weights."""
        return self.frozen + self.trained_weights

    @property
    def frozen(self) -> float:
        """Bytes of its share of the weights beside an adapter, stored as matrix products read them or in 4 bits."""
        return self._frozen_bytes * self.size.parameters / self.shards if self.has_adapter else 0.0

    @property
    def _frozen_bytes(self) -> float:
        """Mean bytes of a weight beside an adapter: those of 4 bits are in full only while their layer multiplies."""
        share = self.size.in_4_bits / self.size.parameters
        return self.compute_bytes * (1 - share) + BYTES_PER_WEIGHT * share

    @property
    def read(self) -> float:
        """Bytes of the whole model as rank 0 reads it, before weights are held in 4 bits."""
        if self.has_adapter:
            return self.compute_bytes * self.size.parameters + self.master_bytes * self.size.adapter
        return self.weights * self.shards

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
        """Bytes of this process's share of what the optimizer keeps."""
        if not self.trained:
            return 0.0
        if self.optimizer in _MOMENT_BYTES:
            return _MOMENT_BYTES[self.optimizer] * self.size.trained / self.shards
        others = 0 if self.has_adapter else self.size.embedding + self.size.head
        layers = self.size.trained - others
        return (_MOMENTUM_BYTES * layers + _MOMENT_BYTES["adamw"] * others) / self.shards

    @property
    def at_step(self) -> float:
        """Bytes that the optimizer's step takes beside its state, at most; AdamW updates float32 weights in place."""
        if not self.trained:
            return 0.0
        size, shard = self.size, self.size.largest_tensor / self.shards
        if self.optimizer == "adafactor":  # updates of a bucket, and the squares of one of them in float64
            return 4 * max(shard, min(_BUCKET, size.trained / self.shards)) + 8 * shard
        if self.optimizer == "adamw8bit":
            return 4 * _TENSORS_AT_ONCE * min(_AT_ONCE, shard)
        if self.optimizer == "muon":
            copies = _MUON_COPIES * size.largest_matrix + _MUON_PRODUCTS * size.shorter_side**2
            beside = size.largest_matrix * (_MUON_FROM_OTHERS if self.shards > 1 else 1)
            return 2 * (copies + max(beside, _MUON_OF_STACK * size.largest_stack / self.shards))
        return 0.0

    @property
    def largest_tensor(self) -> float:
        """Bytes of the largest weight as it is stored, unsharded."""
        per_weight = self.compute_bytes if self.has_adapter else self.master_bytes
        return per_weight * max(self.size.embedding, self.size.head)

    def largest_gathered(self, *, adapter_alone: bool) -> float:
        """Return the bytes of the largest weight, or of a layer's experts, as it is gathered to be sent or written.

        Args:
            adapter_alone: Of a model that has an adapter, nothing else is gathered; here a layer's part of it.
        """
        if adapter_alone and self.has_adapter:
            return self.master_bytes * self.size.adapter / self.size.num_layers
        return self.compute_bytes * max(self.size.embedding, self.size.largest_layer)

    def idle(self) -> Iterator[Entry]:
        """Yield what stays on the device while other models work."""
        if not (self.param_offload or self.all_offload):
            yield self._entry(Column.WEIGHTS, self.weights)
        if not self._moments_are_off:
            yield self._entry(Column.MOMENTS, self.moments)

    def offloaded(self) -> Iterator[Entry]:
        """Yield what is in host memory instead."""
        if self.param_offload or self.all_offload:
            yield self._entry(Column.WEIGHTS, self.weights)
        if self._moments_are_off:
            yield self._entry(Column.MOMENTS, self.moments)
        if self.all_offload and self.trained:
            yield self._entry(Column.GRADIENTS, self.trained_weights)
            yield self._entry(Column.OTHER, self.at_step, "optimizer at work", certain=False)
        if self.activation_offload:
            yield self._entry(Column.ACTIVATIONS, self._kept, certain=False)

    def exported(self) -> Iterator[Entry]:
        """Yield the weights of the folder `hf`, which rank 0 holds in host memory until they are written."""
        if self.exports:
            adapter, whole = self.master_bytes * self.size.adapter, self.compute_bytes * self.size.parameters
            yield self._entry(Column.WEIGHTS, adapter if self.has_adapter else whole, "folder hf", certain=False)

    @property
    def _moments_are_off(self) -> bool:
        return self.optimizer_offload or self.all_offload

    def _entry(self, column: Column, num_bytes: float, what: str = "", *, certain: bool = True) -> Entry:
        return Entry(f"{self.name} {what or column}", num_bytes, column, certain)

    # ------------------------------------------------------------------ its phases

    def phases(self) -> Iterator[tuple[str, list[Entry]]]:
        """Yield each phase in which the model works: its name, and what it then holds at its worst moment."""
        for name in self.forwards:
            yield name, _worst(self._forward(learns=False))
        if self.trained:
            yield f"{self.name} forward", _worst(self._forward(learns=True))
            yield f"{self.name} backward", _worst(self._backward())
            yield f"{self.name} optimizer", self._optimizer()

    def _optimizer(self) -> list[Entry]:
        """Return what is there in the optimizer's step, which `offload_policy` makes in host memory."""
        found = self._moment(gradients=self.trained_weights, visiting=self._visiting)
        work = 0.0 if self.all_offload else self.at_step
        return found + [self._entry(Column.OTHER, work, "optimizer at work", certain=False)] * (work > 0)

    def _moment(
        self,
        *,
        gathered: float = 0.0,
        gradients: float = 0.0,
        reduced: float = 0.0,
        activations: float = 0.0,
        logits: float = 0.0,
        visiting: float = 0.0,
    ) -> list[Entry]:
        """Return what is there at a moment; offloaded parameters are on the device in every phase of the model.

        Args:
            gathered: Bytes of unsharded weights, and of the buffers through which they come.
            gradients: Bytes of this process's share of the gradients.
            reduced: Bytes of unsharded gradients, and of the buffers through which they are summed.
            activations: Bytes of what the layers keep and work with.
            logits: Bytes of tiles of logits.
            visiting: Bytes of moments that have come from host memory for the optimizer's step.
        """
        stays = 0.0 if self.all_offload else 1.0
        found = [
            self._entry(Column.WEIGHTS, stays * self.weights),
            self._entry(Column.MOMENTS, visiting if self._moments_are_off else self.moments),
            self._entry(Column.WEIGHTS, gathered, "gathered weights"),
            self._entry(Column.GRADIENTS, stays * gradients),
            self._entry(Column.GRADIENTS, reduced, "gradients being summed", certain=False),
            self._entry(Column.ACTIVATIONS, activations, certain=False),
            self._entry(Column.ACTIVATIONS, logits, "logits", certain=False),
        ]
        return [entry for entry in found if entry.num_bytes > 0]

    @property
    def _visiting(self) -> float:
        """Bytes of the moments that are on the device together in a step, if they live in host memory."""
        return 0.0 if self.all_offload else min(_VISITING_BYTES, self.moments)

    @property
    def _layer(self) -> float:
        """Bytes that one layer's activations take; in a tensor group, the streams whole and a share of the rest."""
        kept = self.size.wide_kept_bytes_per_token if self.wide_stream else self.size.kept_bytes_per_token
        whole = self.compute_bytes / 2 * kept * self.tokens
        streams = min(whole, _STREAMS * self._stream)
        routed = self.compute_bytes / 2 * self.size.routed_bytes_per_token * self.tokens * (self.experts > 1)
        return streams + (whole - streams) / self.tensor + _ROUTED * routed

    @property
    def _stream(self) -> float:
        """Bytes of the residual stream at one place."""
        stream = self.size.wide_stream_bytes_per_token if self.wide_stream else self.size.stream_bytes_per_token
        return self.compute_bytes / 2 * stream * self.tokens

    @property
    def _kept(self) -> float:
        """Bytes that all layers keep for their backward, wherever that is."""
        return self._stream * self.recomputed + self._layer * (self.size.num_layers - self.recomputed)

    @property
    def _last_stores(self) -> bool:
        """Whether the last layer keeps its activations."""
        return self.recomputed < self.size.num_layers

    @property
    def _kept_here(self) -> float:
        """Bytes that all layers keep on the device; of those that leave it, two layers' are still there."""
        largest = self._layer if self._last_stores else self._stream
        return min(self._kept, 2 * largest) if self.activation_offload else self._kept

    @property
    def _tile(self) -> float:
        """Bytes of a tile of logits."""
        return _REDUCE_BYTES * min(self.chunk, self.tokens * self.size.vocab_size / self.tensor) * self.has_head

    @property
    def _head(self) -> float:
        """Weights of a head that is a unit of its own, as this process gathers them."""
        return self.size.head / self.tensor if self.has_head else 0.0

    @property
    def _embedding(self) -> float:
        """Weights of the embedding, as this process gathers them."""
        return self.size.embedding / self.tensor

    @property
    def _unit(self) -> float:
        """Weights of the largest layer, as this process gathers them."""
        return self._here(self.size.largest_layer, self.size.layer_experts)

    @property
    def _all(self) -> float:
        """All weights, as this process gathers them."""
        return self._here(self.size.parameters, self.size.experts)

    def _here(self, weights: float, experts: float) -> float:
        """Return how many of these weights, some of which are experts', a process gathers."""
        return (weights - experts + experts / self.experts) / self.tensor

    @property
    def _shared(self) -> float:
        """Bytes of the matrix that embedding and head share, which is gathered from the first layer to the last."""
        return self.compute_bytes * self._embedding if self.has_head and self.size.head == 0 else 0.0

    def _gathered(self, *units: float, freed: float = 0.0) -> float:
        """Return the bytes of unsharded weights.

        Args:
            units: Weights of the unit that runs, and of those whose buffers are there; a rank alone has only the first.
            freed: Where weights are kept for the whole pass, those of units that are done with.
        """
        if self.keeps_cast:
            buffers = units[1:2] if self.shards > 1 else ()
            each = self._frozen_bytes if self.has_adapter else self.compute_bytes
            # What is held in 4 bits is in full while its layer multiplies.
            at_work = self.compute_bytes * units[0] if self.size.in_4_bits and units else 0.0
            return each * (self._all - freed + sum(buffers)) + at_work
        return self.compute_bytes * sum(units if self.shards > 1 else units[:1]) + self._shared

    def _forward(self, *, learns: bool) -> Iterator[list[Entry]]:
        """Yield the moments of a forward pass that may be its worst.

        FSDP2 keeps the buffer through which a unit was gathered until the next one's has come.
        """
        layer, head, embedding = self._unit, self._head, self._embedding
        kept = self._kept_here if learns else 0.0
        gradients = self.trained_weights if learns and self.accumulates else 0.0
        stores = learns and self._last_stores
        alone = _ADAPTED_OVER_KEPT if self.has_adapter else _FORWARD_OVER_KEPT
        at_work = (1.0 if stores else alone) * self._layer
        before_last = kept - self._layer if stores else kept
        first = 0.0 if self._shared else embedding
        yield self._moment(gathered=self._gathered(first, embedding), gradients=gradients, activations=self._stream)
        # The first layer, with the embedding's buffer, and the last, with the head's.
        yield self._moment(
            gathered=self._gathered(layer, embedding), gradients=gradients, activations=at_work + self._stream
        )
        yield self._moment(
            gathered=self._gathered(layer, max(layer, head)), gradients=gradients, activations=before_last + at_work
        )
        yield self._moment(gathered=self._gathered(2 * head), gradients=gradients, activations=kept + self._stream)
        yield self._moment(
            gathered=self._gathered(head, head or layer),
            gradients=gradients,
            activations=kept + 2 * self._stream,
            logits=(_TILES if learns else _TILES_ALONE) * self._tile,
        )

    def _backward(self) -> Iterator[list[Entry]]:
        """Yield the moments of a backward pass that may be its worst.

        From the last layer to the first, gradients grow while kept activations shrink, unless an earlier micro-batch
        has left gradients already. A unit's unsharded gradient goes through a float32 buffer, which is there until the
        next unit's comes.
        """
        size, layer, whole = self.size, self._unit, self.trained_weights
        # Of frozen weights there is no gradient.
        head, embedding, of_layer = (0.0, 0.0, 0.0) if self.has_adapter else (self._head, self._embedding, layer)
        shared = self._embedding if self._shared and not self.has_adapter else 0.0
        per_layer = size.adapter / size.num_layers if self.has_adapter else size.largest_layer
        of_head, of_embedding = head * self.tensor, embedding * self.tensor

        def gradients(missing: float) -> float:
            return whole if self.accumulates else whole - self.master_bytes * missing / self.shards

        tail = self._kept_here + 2 * self._stream
        at_work = _BACKWARD_OVER_KEPT * self._layer
        stored = self._layer if self._last_stores else 0.0
        # The log-prob's own gradient of the head is float32, and becomes one of the compute dtype.
        yield self._moment(
            gathered=self._gathered(self._head, layer),
            gradients=gradients(size.trained),
            reduced=_REDUCE_BYTES * (head or shared),
            activations=tail,
            logits=_TILES_BACKWARD * self._tile,
        )
        yield self._moment(
            gathered=self._gathered(0, layer, freed=head),
            gradients=gradients(size.trained),
            reduced=self._reduced(head) + self.compute_bytes * shared,
            activations=tail,
        )
        yield self._moment(
            gathered=self._gathered(layer, 0 if self.keeps_cast else layer, freed=head),
            gradients=gradients(size.trained - of_head),
            reduced=_REDUCE_BYTES * (head or of_layer) + self.compute_bytes * shared,
            activations=self._kept_here - stored + at_work,
        )
        yield self._moment(
            gathered=self._gathered(layer, 0.0 if self.keeps_cast else self._embedding, freed=self._all - layer),
            gradients=gradients(of_embedding + per_layer),
            reduced=_REDUCE_BYTES * of_layer + self.compute_bytes * shared,
            activations=(self._stream if self.recomputed else 0.0) + at_work,
        )
        yield self._moment(
            gradients=gradients(of_embedding), reduced=self._reduced(embedding), activations=self._stream
        )

    def _reduced(self, weights: float) -> float:
        """Return the bytes of a unit's gradient while it is summed: as computed, as sent and what comes back."""
        return weights * (self.compute_bytes + _REDUCE_BYTES + _REDUCE_BYTES * self.tensor / self.shards)


def _worst(moments: Iterable[list[Entry]]) -> list[Entry]:
    return max(moments, key=lambda entries: sum(entry.num_bytes for entry in entries))


@dataclass(frozen=True)
class EngineMemory:
    """The sampler beside or instead of the models of a process.

    Attributes:
        weights: Bytes of weights per process.
        sent: Those of them that a weight sync brings.
        copies: Bytes of the two copies of an adapter that a process keeps on a GPU beside the matrices of its layers:
            what was sent, to compare with, and what vLLM's manager has. They stay while the engine sleeps.
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
    copies: float
    utilization: float
    cache: float
    one_sequence: float
    buckets: float
    largest_tensor: float
    sleeps: bool
    shares: bool
    is_synced: bool


class _LargestMicroBatch(NamedTuple):
    """One process's share of a micro-batch that is as large as the configuration allows.

    Attributes:
        tokens: Of the process.
        is_one_of_several: Whether a mini-batch may have several.
    """

    tokens: int
    is_one_of_several: bool


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
    saves = config.trainer.save_freq > 0
    if device == "cpu":
        return [_machine(pools, saves=saves)]
    cards = [Ledger(pool.where, tuple(_card(pool, capacity_bytes, saves=saves))) for pool in pools]
    return [*cards, _host(pools, saves=saves)]


# ---------------------------------------------------------------------------------------------- models and engines


def _resident(
    name: str,
    size: Footprint,
    fsdp: FsdpConfig | ForwardShardingConfig,
    ranks: int,
    batch: _LargestMicroBatch,
    device: str,
    *,
    backbone: BackboneConfig | None,
    optim: OptimConfig | None,
    forwards: tuple[str, ...],
    head: bool = True,
    scores_beside_engine: bool = False,
    exports: bool = False,
) -> ResidentModel:
    off = device != "cpu"
    recomputed = 0
    if backbone is not None and backbone.enable_gradient_checkpointing:
        wanted = backbone.recompute_num_layers
        recomputed = size.num_layers if wanted is None else min(wanted, size.num_layers)
    compute_bytes = dtype_of(fsdp.dtype).itemsize
    return ResidentModel(
        name=name,
        size=size,
        trained=isinstance(fsdp, FsdpConfig),
        master_bytes=dtype_of(fsdp.model_dtype).itemsize,
        compute_bytes=compute_bytes,
        wide_stream=device == "cpu" and compute_bytes == 2,
        shards=ranks if fsdp.fsdp_size == -1 else fsdp.fsdp_size,
        tensor=fsdp.tensor_parallel_size,
        experts=fsdp.expert_parallel_size,
        tokens=batch.tokens,
        accumulates=batch.is_one_of_several,
        recomputed=recomputed,
        optimizer="adamw" if optim is None else optim.name,
        keeps_cast=(ranks > 1 and not fsdp.reshard_after_forward)
        or keeps_cast_parameters(ranks, torch.device(device), fsdp.reshard_after_forward),
        param_offload=fsdp.param_offload and off,
        optimizer_offload=fsdp.optimizer_offload and off,
        all_offload=fsdp.offload_policy and off,
        activation_offload=off and backbone is not None and backbone.enable_activation_offload,
        has_head=head,
        chunk=default_chunk(torch.device(device)),
        forwards=forwards,
        scores_beside_engine=scores_beside_engine,
        exports=exports,
    )


def _largest_micro_batch(config: PPOTrainerConfig, role: str, prompts: int, ranks: int) -> _LargestMicroBatch:
    """Return a rank's share of a role's largest micro-batch, at most its part of the samples of `prompts`.

    Episodes have no such bound: how many rows they give, and how much of them is shared, is known when they are over.
    """
    samples, data, each = config.actor_rollout_ref.rollout.n, config.data, config.micro_batches()[role]
    sequences = -(-prompts * samples * each.processes // ranks)
    there = sequences * data.max_response_length + -(-sequences // samples) * data.max_prompt_length
    longest = data.max_prompt_length + data.max_response_length
    largest = each.largest(longest)
    several = config.environment.is_used or there > largest
    return _LargestMicroBatch(-(-(largest if several else there) // each.slices), several)


def _pools(config: PPOTrainerConfig, sizes: Mapping[str, Footprint], device: str) -> list[_Pool]:
    """Return the pools of a PPO run."""
    placement, tensor_parallel = resolve_placement(config), config.actor_rollout_ref.rollout.tensor_model_parallel_size
    pools = []
    for names, devices_on_nodes in placement.sharing().items():
        roles, processes = [role for name in names for role in placement.roles_on(name)], max(devices_on_nodes)
        if device != "cpu" and not placement.uses_gpu(roles[0]):
            continue
        if "rm" in roles and config.reward.reward_model.is_served:  # alone there, and its server takes what it is told
            continue
        models = [_model_of(config, role, sizes, placement, device) for role in roles if role != "rollout"]
        of = f"pool {names[0]}" if len(names) == 1 else f"pools {', '.join(names)}"
        pool = _Pool(f"each GPU of {of}", processes, models)
        if placement.rollout in roles and not config.actor_rollout_ref.rollout.is_served:
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
    forwards = {"actor": ("log-probs",), "critic": ("values",), "ref": ("reference",)}.get(name, (f"{name} scores",))
    sharding: FsdpConfig | ForwardShardingConfig
    backbone: BackboneConfig | None = None
    optim: OptimConfig | None = None
    if name in ("actor", "critic"):
        learner = policy.actor if name == "actor" else critic
        sharding = policy.actor.fsdp_config if name == "actor" else critic.model.fsdp_config
        prompts, optim = learner.ppo_mini_batch_size, learner.optim
        backbone = policy.model if name == "actor" else critic.model
    else:
        sharding = policy.ref.fsdp_config if name == "ref" else config.reward.reward_model.model.fsdp_config
        prompts = config.data.train_batch_size
    return _resident(
        name,
        sizes["actor" if name == "ref" and "ref" not in sizes else name],
        sharding,
        ranks,
        _largest_micro_batch(config, name, prompts, ranks),
        device,
        backbone=backbone,
        optim=optim,
        forwards=forwards,
        head=name in ("actor", "ref"),
        # Groups without spread are replaced before the engine goes to sleep, and it is awake in a validation.
        scores_beside_engine=name == "rm" and (config.algorithm.filter_groups.enable or _validates(config)),
        exports=name == "actor" and "hf_model" in policy.actor.checkpoint.save_contents,
    )


def _validates(config: PPOTrainerConfig) -> bool:
    return bool(config.data.val_files) and (config.trainer.val_before_train or config.trainer.test_freq > 0)


def _offline_pool(config: OfflineConfig, size: Footprint, device: str) -> _Pool:
    """Return the one pool of a run that learns from a data set."""
    rows, each = 2 if isinstance(config.data, PairDataConfig) else 1, config.micro_batches()["model"]
    largest = each.largest(rows * config.data.max_length)
    refers = isinstance(config, DPOTrainerConfig) and config.needs_reference
    model = _resident(
        "model",
        size,
        config.model.fsdp_config,
        config.num_processes,
        _LargestMicroBatch(-(-largest // each.slices), is_one_of_several=True),
        device,
        backbone=config.model,
        optim=config.optim,
        forwards=("reference",) if refers else (),
        exports="hf_model" in config.checkpoint.save_contents,
        head=not isinstance(config, RMTrainerConfig),
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
        copies=2.0 * width * size.adapter if sends_adapter and rollout.name == "vllm" else 0.0,
        utilization=rollout.gpu_memory_utilization,
        cache=rollout.kv_cache_gib * GIB,
        one_sequence=size.kv_bytes_per_token * width / 2 * longest * size.cache_share(ranks),
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
    return Entry("engine asleep", _ASLEEP_BYTES, Column.ENGINE, certain=False)


def _card(pool: _Pool, capacity_bytes: float | None, *, saves: bool) -> Iterator[MemoryPhase]:
    """Yield the phases of a GPU: start, engine start and generation, then every model in turn, sync and checkpoint."""
    models, engine = pool.models, pool.engine
    idle = [entry for model in models for entry in model.idle()]
    copies: list[Entry] = []  # since the first sync
    if engine is not None and engine.copies and (engine.shares or not models):
        copies = [Entry("engine's copies of the adapter", engine.copies, Column.ENGINE)]
    for index, model in enumerate(models):
        # Models are loaded one after the other, each from shards that rank 0 sends tensor by tensor.
        there = [entry for earlier in models[:index] for entry in earlier.idle()]
        loading = [Entry(f"{model.name} weights", model.weights, Column.WEIGHTS)]
        if model.shards > 1:
            loading.append(Entry("a whole tensor", model.largest_tensor, Column.WEIGHTS, certain=False))
        yield MemoryPhase(f"{model.name} loads", (*there, *loading, *_overhead()))
    asleep: list[Entry] = []
    if engine is not None:
        share = engine.utilization * capacity_bytes if capacity_bytes is not None else _least(engine)
        awake = Entry("engine", share, Column.ENGINE)
        # vLLM starts only where its whole share is free.
        yield MemoryPhase("engine start", (*idle, awake, *_overhead()))
        yield MemoryPhase("generation", (*idle, awake, *copies, *_overhead()))
        asleep = [_asleep() if engine.sleeps else awake] if engine.shares else []
        if not models:
            if engine.is_synced:
                yield MemoryPhase("weight sync", (awake, *copies, *_reload(engine), *_overhead()))
            return
    for model in models:
        others = [entry for other in models if other is not model for entry in other.idle()]
        beside = [awake] if engine is not None and engine.shares and model.scores_beside_engine else asleep
        for name, work in model.phases():
            yield MemoryPhase(name, (*work, *others, *beside, *copies, *_overhead()))

    def gathered(*, adapter_alone: bool) -> list[Entry]:
        found = [model.largest_gathered(adapter_alone=adapter_alone) for model in models if model.trained]
        return [Entry("a whole tensor", max(found), Column.WEIGHTS, certain=False)] if found else []

    if engine is not None and engine.shares:
        weights = Entry("engine weights", engine.weights, Column.ENGINE)
        half_awake = [weights, _asleep()] if engine.sleeps else [awake]
        # Offloaded shards stay in host memory; each one comes to the device in turn.
        yield MemoryPhase(
            "weight sync",
            (
                *idle,
                *half_awake,
                *copies,
                *_reload(engine),
                *gathered(adapter_alone=engine.sent < engine.weights),
                *_overhead(),
            ),
        )
    if saves and any(model.trained for model in models):
        # State is written from where it lies; the tensors of the folder `hf` are gathered one by one.
        now = [awake] if engine is not None and engine.shares else []
        yield MemoryPhase("checkpoint", (*idle, *now, *copies, *gathered(adapter_alone=True), *_overhead()))


def _host(pools: list[_Pool], *, saves: bool) -> Ledger:
    """Return the ledger of the memory beside the GPUs of a node."""
    always = [Entry("driver and Ray", _DRIVER_BYTES, certain=False)]
    copies, loading = [], []
    for pool in pools:
        always.append(Entry("ranks' libraries", pool.processes * _RANK_BYTES, certain=False))
        for model in pool.models:
            always += [e._replace(num_bytes=pool.processes * e.num_bytes) for e in model.offloaded()]
            loading.append(Entry(f"{model.name} as rank 0 loads it", model.read, Column.WEIGHTS, certain=False))
            if saves and model.trained:
                written = pool.processes * (model.trained_weights + model.moments)
                copies.append(Entry(f"{model.name} checkpoint being written", written, certain=False))
                copies += model.exported()
        if (engine := pool.engine) is not None:
            always.append(Entry("engine's libraries", pool.engines * _ENGINE_BYTES, certain=False))
            if engine.sleeps and engine.sent < engine.weights:  # those that no sync would bring again
                always.append(Entry("engine weights asleep", pool.processes * engine.weights, Column.ENGINE))
    phases = [MemoryPhase("model loads", (*always, max(loading, key=lambda entry: entry.num_bytes)))] if loading else []
    phases.append(MemoryPhase("training", tuple(always)))
    if copies:
        phases.append(MemoryPhase("checkpoint", (*always, *copies)))
    return Ledger("host memory of a node", tuple(phases), is_host=True)


def _reload(engine: EngineMemory) -> Iterator[Entry]:
    """Yield the buffers for loading new weights, which are outside the share that vLLM has reserved.

    A tensor larger than a bucket is assembled whole, and the layer that loads it is created a second time.
    """
    yield Entry("buffers", engine.buckets, Column.OTHER)
    yield Entry("a tensor and its layer as they load", 2 * engine.largest_tensor, Column.OTHER, certain=False)


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
    base, engines = [Entry("driver and Ray", _DRIVER_BYTES, certain=False)], []
    for pool in pools:
        base.append(Entry("ranks' libraries", pool.processes * _RANK_BYTES, certain=False))
        base += [Entry(e.label, pool.processes * e.num_bytes, e.column) for model in pool.models for e in model.idle()]
        if pool.engine is not None:
            base.append(Entry("engine's libraries", pool.engines * _ENGINE_BYTES, certain=False))
            engines.append(Entry("engine weights", pool.engines * pool.engine.weights, Column.ENGINE))
            engines.append(Entry("KV cache", pool.engines * pool.engine.cache, Column.ENGINE))
            if pool.engine.is_synced:  # through memory that is kept
                engines.append(Entry("weights on their way", pool.engine.sent))
    base += engines
    phases = [MemoryPhase("generation", tuple(base))] if engines else []
    for pool in pools:
        for model in pool.models:
            resident = {entry.label for entry in model.idle()}
            copies = model.trained_weights + model.moments
            for name, work in model.phases():
                added = [entry for entry in work if entry.label not in resident]
                if saves and name == f"{model.name} backward":
                    label = f"{model.name} checkpoint being written"
                    added.append(Entry(label, copies, certain=False))
                scaled = [entry._replace(num_bytes=pool.processes * entry.num_bytes) for entry in added]
                if saves and name == f"{model.name} backward":
                    scaled += model.exported()
                phases.append(MemoryPhase(name, (*base, *scaled)))
    return Ledger("this machine", tuple(phases))


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
