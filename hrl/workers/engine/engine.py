"""The engine: a sharded module with its optimizer, where it lives, and the order of collectives in an update."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hrl.algos.aggregation import Counts, aggregate
from hrl.batching.plan import MiniBatchPlan, RankPlan
from hrl.metrics import Meter, Metric
from hrl.models.adapter import BASE_CHECKSUM, BASE_DTYPES, IN_4_BITS, AdapterError, add_adapter, beside_of, is_part
from hrl.models.checkpoint_form import CheckpointForm, saved_tensors
from hrl.models.dtypes import dtype_of
from hrl.models.experts import RoutingPass, followed_experts
from hrl.models.flops import ModelFlops, peak_flops
from hrl.models.four_bit import hold_in_4bit
from hrl.models.head import backbone_of
from hrl.models.loading import Loaded, hidden_matrices
from hrl.models.ops.layout import to_device
from hrl.models.packed_model import PackedMicroBatch, TokenRows, Wanted, pack_micro_batch, take_columns
from hrl.models.pictures import PictureProcessor, Sight
from hrl.models.towers import unreachable_parameters
from hrl.profiling.spans import CHECKSUM, OPTIMIZER, span
from hrl.workers.engine.activations import ActivationOffload
from hrl.workers.engine.background import BackgroundWriter
from hrl.workers.engine.casts import keeps_cast_parameters
from hrl.workers.engine.checkpoint import (
    CONTENTS,
    Base,
    StateToSave,
    bytes_to_save,
    dtypes_of,
    load_state,
    record_of,
)
from hrl.workers.engine.checksum import (
    Checksums,
    WeightsDifferError,
    of_all_ranks,
    places_of,
    whole_checksum,
)
from hrl.workers.engine.host_memory import HostCopies, local
from hrl.workers.engine.load_balance import LoadBalance, LoadCounter
from hrl.workers.engine.nonfinite import SkippedStep, check_state, rows_of_nonfinite, skip
from hrl.workers.engine.optim import Optimizer, StepReport, names_of_nonfinite
from hrl.workers.engine.router_meter import RouterMeter
from hrl.workers.engine.sharding import (
    build_mesh,
    build_sequence_group,
    build_sharded,
    build_weight_mesh,
    offload_policy,
)
from hrl.workers.engine.snapshot import Snapshot
from hrl.workers.engine.weights import (
    PREFIX,
    AdapterToWrite,
    ExportToWrite,
    ParamSpec,
    iter_full_params,
    iter_trained,
    merges_of,
    param_specs,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hrl.config.model import ForwardShardingConfig, FsdpConfig
    from hrl.models.loading import ModelSource
    from hrl.protocol import DataProto
    from hrl.workers.requests import Training, Update

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateNames:
    """The names of an update and of its metrics.

    Attributes:
        update: Name in messages and of files.
        grad_norm: Mean norm of the gradients of the steps that were applied.
        lr: The rate of the last step.
        skipped_steps: Steps that were not finite.
        weights_checksum: Of all weights after the update.
        mfu: Share of the device's peak that forward and backward passes reached.
        with_experts: Measure what the routers of a mixture do, as `moe/...`, which only one model of a run may do.
    """

    update: str
    grad_norm: str
    lr: str
    skipped_steps: str
    weights_checksum: str
    mfu: str
    with_experts: bool = False


#: Of updates on a data set, or on pairs of samples.
FROM_DATA = UpdateNames(
    "train", "train/grad_norm", "train/lr", "train/skipped_steps", "train/weights_checksum", "perf/mfu/train", True
)


@dataclass(frozen=True)
class ForwardedMicroBatch:
    """One micro-batch of an update after its forward pass: b rows, r response columns.

    Attributes:
        batch: All rows of the rank.
        picked: Those of the micro-batch.
        packed: How they were run.
        flat: The model's results, `(N,)` each.
        mini_batch: Its counts are the divisors.
        width: Response columns of the batch.
        meter: Takes metrics.
        moved: A step of this update has moved the weights already.
    """

    batch: DataProto
    picked: tuple[int, ...]
    packed: PackedMicroBatch
    flat: tuple[Tensor, ...]
    mini_batch: MiniBatchPlan
    width: int
    meter: Meter
    moved: bool

    @property
    def mask(self) -> Tensor:
        """`(b, r)`, true at trained tokens."""
        return self.packed.mask

    def result(self, index: int = 0) -> Tensor:
        """Return one of the model's results, `(b, r)`; `(b, 1)` for one number per row."""
        return self.packed.unpack(self.flat[index])

    def rows(self, name: str) -> Tensor:
        """Return a column `(B,)`, as `(b,)` on the device."""
        return to_device([self.batch.batch[name][list(self.picked)]], self.mask.device)[0]

    def tokens(self, *names: str) -> dict[str, Tensor]:
        """Return columns `(B, R)`, as `(b, r)` on the device."""
        return take_columns(self.batch, names, self.picked, self.packed)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return the places of the chosen and the rejected row of each pair, `(N,)` each, on the device.

        Raises:
            ValueError: A pair is not whole in the micro-batch.
        """
        rows = list(self.picked)
        is_chosen = self.batch.batch["is_chosen"][rows].tolist()
        uids = self.batch.non_tensor_batch["uid"][rows].tolist()
        chosen = {uid: place for place, uid in enumerate(uids) if is_chosen[place]}
        rejected = {uid: place for place, uid in enumerate(uids) if not is_chosen[place]}
        if chosen.keys() != rejected.keys() or 2 * len(chosen) != len(uids):
            odd = next((uid for uid in uids if (uid in chosen) != (uid in rejected)), uids[0])
            raise ValueError(f"pair {odd} is not whole in its micro-batch: plan pairs by `plan_pairs` of hrl.batching")
        places = torch.tensor([list(chosen.values()), [rejected[uid] for uid in chosen]], dtype=torch.int64)
        here, there = to_device([places], self.mask.device)[0].unbind()
        return here, there

    def aggregate(self, loss_mat: Tensor, mode: str, norm: float | None, *, has_branches: bool = False) -> Tensor:
        """Return this micro-batch's share of the mini-batch's loss.

        Args:
            loss_mat: `(b, r)`.
            mode: How tokens become one number.
            norm: The constant divisor of one of the modes.
            has_branches: Whether `episode_tokens (B,)` has the trained tokens of each row's episode.
        """
        counted = Counts(self.mini_batch.num_tokens, self.mini_batch.num_sequences, self.mini_batch.num_groups)
        row_tokens = self.rows("episode_tokens") if has_branches else None
        return aggregate(loss_mat, self.mask, mode, counted, norm, row_tokens)


class Engine:
    """Runs packed micro-batches through one sharded model.

    Args:
        load: `load(source, dtype, meta=...)` gives the transformers model, on the meta device or with storage.
        wrap: From the transformers model to the module whose `forward` is run.
        source: Which model, and how it is loaded.
        training: How the model learns; `None` for a frozen one.
        fsdp: The sharding's configuration.
        device: Of this rank.
    """

    def __init__(
        self,
        load: Callable[..., Loaded],
        wrap: Callable[[Any], nn.Module],
        source: ModelSource,
        training: Training | None,
        fsdp: FsdpConfig | ForwardShardingConfig,
        *,
        device: torch.device,
    ) -> None:
        self.device = device
        self.training = training
        self._source, self._fsdp = source, fsdp
        self.share_prefix = source.share_prefix
        self.mesh = build_mesh(device, fsdp.fsdp_size)
        self.sequence_group = build_sequence_group(device, fsdp.ulysses_sequence_parallel_size)
        self.weight_mesh = build_weight_mesh(
            device, fsdp.fsdp_size, fsdp.tensor_parallel_size, fsdp.expert_parallel_size
        )
        self.degree = fsdp.ulysses_sequence_parallel_size * fsdp.tensor_parallel_size
        adapter = source.adapter
        trains_tower = source.shows_pictures and not source.freeze_vision_tower
        masters = dtype_of(fsdp.model_dtype)

        def adapt(model: PreTrainedModel) -> None:
            assert adapter is not None, "only a model that gets one is adapted"
            add_adapter(model, adapter, masters)
            if adapter.load_in_4bit:
                hold_in_4bit(model, device)

        # Of weights that are not trained no update reads more than matrix products do.
        dtype = masters if adapter is None else dtype_of(fsdp.dtype)
        # On a CPU there is nothing to gain: the host's memory is the device's.
        movable = device.type != "cpu"
        policy = offload_policy(fsdp, device)
        #: Where the sharded weights are while they are not at work.
        home = device if policy is None else torch.device("cpu")
        self.module, loaded = build_sharded(
            lambda meta: load(source, dtype, meta=meta),
            wrap,
            fsdp,
            self.mesh,
            device,
            train=training is not None,
            freezes=_nothing if trains_tower else unreachable_parameters,
            adapt=None if adapter is None else adapt,
            weight_mesh=self.weight_mesh,
            policy=policy,
        )
        self.experts = followed_experts(self.module)
        self.sight: Sight | None = None
        if source.shows_pictures:
            processor = PictureProcessor(source.path, trust_remote_code=source.trust_remote_code)
            self.sight = Sight(backbone_of(loaded.model), processor)
        self.has_adapter = adapter is not None
        self.source_config = loaded.source_config
        self.form = CheckpointForm.of(loaded.model)
        self.flops = ModelFlops.of(loaded.model)
        self.frozen: frozenset[str] = frozenset()
        self._out_of_reach = frozenset(PREFIX + name for name in loaded.out_of_reach)
        if movable and training is not None and source.enable_activation_offload:
            ActivationOffload(device).attach(self.module)
        self.optimizer: Optimizer | None = None
        if training is None:
            self.module.requires_grad_(False)
            self.module.eval()
        else:
            parameters = self.module.named_parameters()
            self.frozen = frozenset(name for name, parameter in parameters if not parameter.requires_grad)
            matrices = {id(matrix) for matrix in hidden_matrices(loaded.model)}
            self.optimizer = Optimizer(
                self.module,
                training,
                device=home,
                offload=movable and fsdp.optimizer_offload and policy is None,
                matrices={name for name, parameter in self.module.named_parameters() if id(parameter) in matrices},
            )
        moves = movable and fsdp.param_offload and policy is None
        self.host_copies = HostCopies(self.module, device) if moves else None
        self._keeps_cast = keeps_cast_parameters(self.mesh.size(), device, fsdp.reshard_after_forward)
        self._is_changed = False
        places = {} if training is None else places_of(self.module)
        # What stands beside an adapter never changes and is in the model's folder: it is looked at when a checkpoint is
        # written or read, and no update or checkpoint has to do with it.
        self._beside = {name: places[name] for name in self.frozen} if self.has_adapter else {}
        self._places = {name: place for name, place in places.items() if name not in self._beside}
        self._base_checksum: int | None = None
        self._base()
        if self._beside and adapter is not None and adapter.path is not None:
            self._require_base_of(Path(adapter.path))
        self._checksums: Checksums | None = None  # of the weights as the last update left them
        self._writer = BackgroundWriter()
        self._snapshot: Snapshot | None = None
        self._snapshot_memory: dict[str, Tensor] = {}
        self._frees_memory = (
            policy is not None
            or self.host_copies is not None
            or (self.optimizer is not None and self.optimizer.rule.offload)
        )
        self.offload()

    # ------------------------------------------------------------------ running

    def pack(
        self, rows: TokenRows, picked: tuple[int, ...], wanted: Wanted = "next", *, is_tree: bool = False
    ) -> PackedMicroBatch:
        """Pack local rows for this engine, or pad them; a sequence group's ranks get a slice each."""
        return pack_micro_batch(
            rows,
            picked,
            share_prefix=self.share_prefix,
            is_tree=is_tree,
            packs_rows=self._source.packs_rows,
            wanted=wanted,
            device=self.device,
            group=self.sequence_group,
            with_routing=len(self.experts) > 0,
            sight=None if rows.pictures is None else self.sight,
        )

    @torch.no_grad()
    def forward(
        self,
        rows: TokenRows,
        plan: RankPlan,
        run: Callable[[PackedMicroBatch], tuple[Tensor, ...]],
        *,
        num_outputs: int,
        wanted: Wanted = "next",
        routed: list[np.ndarray] | None = None,
    ) -> list[Tensor]:
        """Run every row once, without gradients.

        Args:
            rows: This rank's rows.
            plan: Exactly one mini-batch, which holds every row.
            run: From a packed micro-batch to `(N,)` results.
            num_outputs: How many results `run` gives.
            wanted: Which hidden states it needs.
            routed: Receives the experts that each row's tokens went to, `(tokens, L, K)` in the order of the rows.

        Returns:
            Float32 columns on the CPU: `(B, R)`, or `(B,)` for `wanted="last"`; zero where nothing was asked.
        """
        count, width = rows.responses.shape
        micro_batches = forward_micro_batches(plan, count)
        results: list[Tensor] = []
        follows = routed is not None or rows.routed is not None
        choices: dict[int, np.ndarray] = {}
        with self.resident():
            for index, picked in enumerate(micro_batches):
                with span(f"micro-batch {index}"):
                    packed = self.pack(rows, picked, wanted, is_tree=plan.is_tree)
                    with self.experts.following(packed.routing if follows else None) as routing:
                        outputs = torch.stack(packed.join(run(packed))).float()
                    if routed is not None and routing is not None:
                        choices |= self._choices(picked, packed, routing)
                assert len(outputs) == num_outputs, "`run` gives as many results as are asked for"
                if not packed.is_empty:
                    results.append(outputs)
            self._release_gathered()
            # Once for all micro-batches, because fetching blocks until they are computed.
            found = torch.cat(results, 1).cpu() if results else torch.zeros(num_outputs, 0)
        columns = torch.zeros(num_outputs, count, 1 if wanted == "last" else width)
        if routed is not None:
            routed.extend(choices[row] for row in range(count))
        # Results come in the order of the micro-batches and of their rows.
        order = [row for picked in micro_batches for row in picked]
        mask = torch.ones(count, 1, dtype=torch.bool) if wanted == "last" else torch.from_numpy(rows.trained)
        columns[:, order] = torch.zeros_like(columns).masked_scatter(mask[order].expand_as(columns), found)
        return [column.squeeze(1) if wanted == "last" else column for column in columns.unbind()]

    def _choices(
        self, picked: tuple[int, ...], packed: PackedMicroBatch, routing: RoutingPass
    ) -> dict[int, np.ndarray]:
        """Return the experts that the tokens of each picked row went to; every rank of a sequence group calls it."""
        chosen = routing.stacked(self.experts.dtype)
        if self.sequence_group is not None:
            # A sum of which each rank has a part: NCCL has no numbers of two bytes.
            slices = chosen.new_zeros((self.sequence_group.size, *chosen.shape), dtype=torch.int32)
            slices[self.sequence_group.place] = chosen
            dist.all_reduce(slices, group=self.sequence_group.processes)
            chosen = slices.flatten(0, 1).to(chosen.dtype)
        found = chosen.cpu().numpy()
        assert packed.routing is not None, "experts are followed"
        paths = zip(picked, packed.routing.paths, strict=True)
        return {row: found[:0] if path is None else found[path] for row, path in paths}

    @torch.no_grad()
    def _load_balance(
        self,
        mini_batch: MiniBatchPlan,
        pack: Callable[[tuple[int, ...]], PackedMicroBatch],
        run: Callable[[PackedMicroBatch], tuple[Tensor, ...]],
        coefficient: float,
    ) -> LoadBalance:
        """Return the loss that balances the load of experts over a mini-batch; every rank calls it."""
        counter = LoadCounter(self.experts.num_experts, self.device)
        packs = [pack(picked) for picked in mini_batch.micro_batches]
        known = [packed.routing for packed in packs if packed.routing is not None]
        lacks = torch.tensor([any(not routing.is_known for routing in known)], dtype=torch.int64, device=self.device)
        if any(lacking for (lacking,) in of_all_ranks(lacks)):  # all ranks, as a forward gathers weights
            with span("load of experts"):
                for packed, routing in zip(packs, known, strict=True):
                    with self.experts.following(routing) as following:
                        run(packed)
                    if following is not None:
                        counter.add(following.stacked(self.experts.dtype), routing.num_rows)
            self._release_gathered()
        else:
            for routing in known:
                if routing.replayed is not None:
                    counter.add(routing.replayed, routing.num_rows)
        return counter.result(coefficient, self.sequence_group, self._fsdp.tensor_parallel_size)

    def learn(
        self,
        batch: DataProto,
        request: Update[RankPlan],
        run: Callable[[PackedMicroBatch], tuple[Tensor, ...]],
        loss_of: Callable[[ForwardedMicroBatch], Tensor],
        names: UpdateNames,
        *,
        with_head: bool,
        wanted: Wanted = "next",
    ) -> dict[str, Metric]:
        """Take every optimizer step of the request's plan.

        Args:
            batch: The rank's rows.
            request: What is asked for.
            run: From a packed micro-batch to `(N,)` results.
            loss_of: From a micro-batch and its results to its share of the mini-batch's loss, divided by the counts of
                all ranks; it may add to the micro-batch's meter.
            names: Of the update and its metrics.
            with_head: Whether the results come from the language model's head, whose operations `mfu` counts then.
            wanted: Which hidden states `run` needs.

        Returns:
            What `loss_of` has measured, and the metrics of `names`.

        Raises:
            NonFiniteStepError: Several steps in a row were not finite.
        """
        plan, (optimizer, _) = request.plan, self._trained
        # Ranks that run the same rows measure the same, and one of them is asked.
        measuring = dist.get_world_size() // self.degree
        rows = TokenRows.of(batch, routed=request.replays_experts, pictures=request.with_pictures)
        meter, routers = Meter(measuring, len(plan.mini_batches)), RouterMeter(self.experts, self.device)
        start, steps_before, num_flops = time.perf_counter(), optimizer.steps_taken, 0.0
        broken = rows_of_nonfinite({name: column for name, column in batch.batch.items() if name in request.columns})

        balance: LoadBalance | None = None
        if request.router_aux_loss_coef:
            self.experts.require_balance()

        def share_of(mini_batch: MiniBatchPlan, picked: tuple[int, ...]) -> Tensor:
            nonlocal num_flops
            packed = self.pack(rows, picked, wanted, is_tree=plan.is_tree)
            # Until the backward pass, which computes layers again.
            routing = self.experts.follow(packed.routing)
            flat = packed.join(run(packed))
            if packed.is_empty:
                return flat[0].sum() * 0.0
            if routing is not None and packed.routing is not None:
                routers.add(routing, packed.routing.num_rows)
            aux_loss = None
            if balance is not None and routing is not None and packed.routing is not None:
                aux_loss = balance.share(routing, packed.routing.num_rows)
                meter.add_share("moe/aux_loss", aux_loss.detach())
            if self.flops is not None:
                sequence, tensor = self._fsdp.ulysses_sequence_parallel_size, self._fsdp.tensor_parallel_size
                head_tokens = flat[0].numel() / sequence if with_head else 0
                num_flops += self.flops.update(packed.layout.num_tokens, packed.layout.num_pairs, head_tokens) / tensor
            moved = optimizer.steps_taken != steps_before
            loss = loss_of(
                ForwardedMicroBatch(batch, picked, packed, flat, mini_batch, rows.responses.shape[1], meter, moved)
            )
            if balance is not None and aux_loss is not None:
                loss = loss + balance.coefficient * aux_loss
            # A loss may hide infinity: a clipped ratio does, and a margin that is won anyway.
            return loss if broken.isdisjoint(picked) else loss * math.nan

        reports = []
        with self.resident():
            self._check_unchanged()
            for index, mini_batch in enumerate(plan.mini_batches):
                if request.router_aux_loss_coef:
                    packs = partial(self.pack, rows, wanted=wanted, is_tree=plan.is_tree)
                    balance = self._load_balance(mini_batch, packs, run, request.router_aux_loss_coef)
                report = self.step(mini_batch, partial(share_of, mini_batch))
                reports.append(report)
                if not report.applied:
                    self._skip(report, names.update, index, batch, request, meter)
            self.experts.follow(None)
            checksum = self._after_update(f"update {names.update} of step {request.step}")
        elapsed_s = time.perf_counter() - start
        metrics = meter.metrics()
        if names.with_experts and len(self.experts):
            metrics |= routers.metrics()
        applied = [report for report in reports if report.applied]
        metrics[names.grad_norm] = Metric.mean(sum(r.grad_norm for r in applied), len(applied))
        if reports:
            metrics[names.lr] = Metric.last(reports[-1].lr)
        # All skip the same steps; each one that is asked reports its part of the sum.
        metrics[names.skipped_steps] = Metric.total((len(reports) - len(applied)) / meter.world_size)
        metrics[names.weights_checksum] = Metric.last(checksum)
        peak = peak_flops(self.device)
        if peak is not None and num_flops > 0:
            metrics[names.mfu] = Metric.mean(num_flops / elapsed_s / peak, 1.0)
        return metrics

    def step(self, micro_batches: MiniBatchPlan, loss_of: Callable[[tuple[int, ...]], Tensor]) -> StepReport:
        """Take one optimizer step: forward and backward of every micro-batch, then the update.

        Args:
            micro_batches: This rank's part of the mini-batch.
            loss_of: From a micro-batch's rows to its share of the mini-batch's loss, divided by the global counts.
        """
        optimizer, _ = self._trained
        optimizer.zero_grad()
        losses = []
        last = len(micro_batches.micro_batches) - 1
        for index, picked in enumerate(micro_batches.micro_batches):
            self._keep_gathered(index != last)
            with span(f"micro-batch {index}"):
                with span("forward"):
                    loss = loss_of(picked)
                with span("backward"):
                    loss.backward()
            losses.append(loss.detach())
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)
        if self._snapshot is not None:  # of which something may not be written yet
            self._snapshot.detach()
            self._snapshot = None
        with span(OPTIMIZER):
            report = optimizer.step(total, fill_missing=last < 0)
        self._is_changed |= report.applied
        self._checksums = None
        return report if report.applied else replace(report, losses=tuple(map(float, losses)))

    @property
    def _trained(self) -> tuple[Optimizer, Training]:
        assert self.optimizer is not None and self.training is not None, "this engine's model is frozen"
        return self.optimizer, self.training

    def _skip(
        self, report: StepReport, update: str, index: int, batch: DataProto, request: Update[RankPlan], meter: Meter
    ) -> None:
        weights = {name: local(parameter.detach()) for name, parameter in self.module.named_parameters()}
        optimizer, training = self._trained
        skipped = SkippedStep(
            update,
            request,
            index,
            optimizer.skipped_in_a_row,
            batch,
            training,
            report,
            place=(dist.get_rank() // self.degree, meter.world_size),
            metrics=names_of_nonfinite(meter.collected()),
            weights=names_of_nonfinite(weights),
            circumstances={
                "weights_checksum": self.weights_checksum(),
                "model": self._source,
                "fsdp": self._fsdp,
                "device": self.device.type,
                "num_threads": torch.get_num_threads(),
                "torch": torch.__version__,
            },
        )
        is_first = dist.get_rank() % self.degree == 0
        skip(skipped, training.run_folder if is_first else None)

    def weights_checksum(self) -> int:
        """Return a checksum of the whole model, the same on any number of ranks; every rank calls it.

        From now on the weights have to stay as they are until the next update.

        Raises:
            WeightsDifferError: Ranks that hold copies of the same weights have different ones.
        """
        self._checksums = Checksums.of(self.module, self._places)
        return whole_checksum(self._checksums, self.mesh)

    def _base(self) -> Base:
        """Return the weights beside the adapter, if there is one; every rank calls it.

        Raises:
            WeightsDifferError: They have changed since they were loaded.
        """
        if not self._beside:
            return Base()
        checksum = whole_checksum(Checksums.of(self.module, self._beside), self.mesh)
        if self._base_checksum not in (None, checksum):
            raise WeightsDifferError(
                f"the model beside the adapter had the checksum {self._base_checksum} and has {checksum} now, although "
                "nothing trains it: memory of a machine is faulty, or something else wrote to it. Nothing was saved "
                "since; the same command continues from the newest checkpoint, better on another machine"
            )
        self._base_checksum = checksum
        return Base(frozenset(self._beside), checksum, tuple(dtypes_of(self.module, self._places)))

    def _about_base(self) -> dict[str, str]:
        """Return what the header of an adapter's file says of the weights beside it; every rank calls it."""
        # Another kind of device may round one in a billion to the next value of NF4, so these are left out.
        in_full = {n: place for n, place in self._beside.items() if self.module.get_parameter(n).is_floating_point()}
        checksum = whole_checksum(Checksums.of(self.module, in_full), self.mesh)
        dtypes = dtypes_of(self.module, self._places)
        return {BASE_CHECKSUM: str(checksum), BASE_DTYPES: " ".join(dtypes)}

    def _require_base_of(self, folder: Path) -> None:
        """Refuse the adapter of a folder that was trained beside other weights; every rank calls it.

        Raises:
            AdapterError: It was.
        """
        checksum, dtypes = beside_of(folder)
        if checksum is None:  # others' software does not say
            return
        found = self._about_base()
        own = found[BASE_DTYPES].split()
        if (IN_4_BITS in dtypes) != (IN_4_BITS in own):
            was, now = ("in 4 bits", "in 16 or 32") if IN_4_BITS in dtypes else ("in 16 or 32 bits", "in 4")
            logger.warning(
                "%s was trained beside a model %s and goes on beside one %s: what it learnt to make good of rounding "
                "is another thing here. Its old load_in_4bit would keep it",
                folder,
                was,
                now,
            )
        elif dtypes != own:
            logger.warning("%s: the model beside the adapter is not compared with a checksum: another dtype", folder)
        elif found[BASE_CHECKSUM] != str(checksum):
            raise AdapterError(
                f"the adapter in {folder} was trained beside other weights than those of {self._source.path}: their "
                f"checksum was {checksum} and is {found[BASE_CHECKSUM]}. Name the model that it was trained beside, or "
                "begin with a new adapter (lora_rank)"
            )

    def _after_update(self, what: str) -> int:
        """Look at weights and moments, and return the checksum of the weights."""
        with span(CHECKSUM):
            check_state(self.module, self._trained[0], what)
            return self.weights_checksum()

    def _check_unchanged(self) -> None:
        """Refuse weights that are not those that the last update, or the checkpoint, left."""
        if self._checksums is None:
            return
        changed = self._checksums.differ(Checksums.of(self.module, self._places))
        if changed:
            raise WeightsDifferError(
                f"weights of rank {dist.get_rank()} changed outside of an update: {len(changed)} parameter(s), first "
                f"{changed[0]}. Memory of this machine is faulty, or something else wrote to it. Nothing was saved "
                "since; the same command continues from the newest checkpoint, better on another machine"
            )

    def _keep_gathered(self, keep: bool) -> None:
        """Let the cast parameters stay until the weights change, where that is configured."""
        if self._keeps_cast and isinstance(self.module, FSDPModule):
            self.module.set_reshard_after_backward(not keep)

    def _release_gathered(self) -> None:
        """Drop the cast copies that a forward without backward leaves behind: they would outlive the weights."""
        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()

    # ------------------------------------------------------------------ where it lives

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """Keep the parameters on the device inside the block, and offload them afterwards where configured.

        Offloaded moments stay in host memory; a step brings a bucket of them to the device at a time, see `AdamW`.
        """
        self.onload()
        try:
            yield
        finally:
            self.offload()

    def onload(self) -> None:
        """Bring offloaded parameters to the device."""
        if self.host_copies is not None:
            self.host_copies.onload()

    def offload(self) -> None:
        """Move parameters to host memory, if that is configured."""
        if self.host_copies is not None:
            self.host_copies.offload(changed=self._is_changed)
            self._is_changed = False
        if self._frees_memory and self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------ state

    # Saved and loaded where it lies: next to an engine that is awake there is no room on the device.

    def begin_save(self, folder: Path, contents: Collection[str] | None = None) -> Path:
        """Have the sharded state as it is now, or the named parts of it, written in the background.

        Every rank calls it, after `finish_save` if it began a save before. Training may go on at once.

        Returns:
            The file that will be there when this rank's part is on disk, see `write_record`.
        """
        self._check_unchanged()
        checksum = self.weights_checksum()
        state = StateToSave(
            self.module, self._trained[0], contents or CONTENTS, self._snapshot_memory, checksum, self._base()
        )
        self._snapshot = state.snapshot
        record = record_of(folder)
        self._writer.begin(partial(state.write, folder), record)
        return record

    def finish_save(self, *, wait: bool = True) -> None:
        """Wait until everything of this rank is on disk, or only look; raise what went wrong."""
        self._writer.finish(wait=wait)

    def abandon_save(self) -> None:
        """Wait until nothing of this rank is written any more, whatever became of it."""
        self._writer.abandon()

    def bytes_to_save(self, contents: Collection[str] | None = None) -> dict[str, int]:
        """Return how many bytes of tensors this rank writes in a save, by what a checkpoint holds."""
        return bytes_to_save(self.module, self._trained[0], contents or CONTENTS, skip=self._beside)

    def bytes_to_export(self) -> int:
        """Return how many bytes of weights the folder for transformers and vLLM has."""
        if self.has_adapter:
            return sum(parameter.numel() * parameter.itemsize for _, parameter in iter_trained(self.module))
        return sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in self.param_specs(self._export_dtype))

    def save(self, folder: Path, contents: Collection[str] | None = None) -> None:
        """Write the sharded state, or the named parts of it, and return when all ranks have; every rank calls it."""
        self.begin_save(folder, contents)
        self.finish_save()
        dist.barrier()

    def load(self, folder: Path, contents: Collection[str] | None = None) -> None:
        """Load what `save` wrote, on any number of ranks; every rank calls it.

        Raises:
            WeightsDifferError: The weights are not those that were saved.
        """
        self.finish_save()
        saved = load_state(folder, self.module, self._trained[0], contents or CONTENTS, self._base())
        self._is_changed = True
        checksum = self.weights_checksum()
        if saved not in (None, checksum):
            raise WeightsDifferError(
                f"the weights loaded from {folder} have the checksum {checksum}, those that were saved {saved}: the "
                "files, or memory of this machine, are damaged. Continue from an older checkpoint "
                "(trainer.resume_mode=resume_path trainer.resume_from_path=…/checkpoints/step_N), or on another machine"
            )

    def begin_export(self, folder: Path, record: Path | None = None) -> None:
        """Have a folder that transformers and vLLM load written in the background, in the dtype of the folder loaded.

        Of a model with an adapter it is the adapter's folder, which peft and vLLM load, in the dtype that is trained.

        Every rank takes part in gathering, which is done at once; rank 0 writes.

        Args:
            folder: Created if missing.
            record: The file that will be there when all of it is on disk, see `write_record`.
        """
        if self.has_adapter:
            adapter = AdapterToWrite.gather(self.module, self.device, self._about_base())
            if adapter is not None:
                self._writer.begin(partial(adapter.write, folder), record)
            return
        dtype = self._export_dtype
        everything = iter_full_params(self.module, self.form, dtype, self.device)
        export = ExportToWrite.gather(everything, self.module, self.source_config, dtype)
        if export is not None:
            self._writer.begin(partial(export.write, folder), record)

    @property
    def _export_dtype(self) -> torch.dtype:
        own = self.source_config.dtype or torch.bfloat16
        return dtype_of(own) if isinstance(own, str) else own

    def export_hf(self, folder: Path) -> None:
        """Write a folder that transformers and vLLM load, and return when it is there; every rank calls it."""
        self.begin_export(folder)
        self.finish_save()
        dist.barrier()

    def param_specs(self, dtype: torch.dtype) -> list[ParamSpec]:
        """Return name, dtype and shape of everything that `iter_full_params` yields, in its order."""
        return param_specs(self.module, self.form, dtype, skip=self._not_sent)

    def iter_full_params(self, dtype: torch.dtype, *, cast_by_reader: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield `(name, full tensor)` as the checkpoint has them, gathered on the device, in a fixed order.

        Parameters that were frozen at load are left out; `frozen_names` has their names. So of a model with an adapter
        the adapter alone is left, unless it is to be merged.

        Args:
            dtype: Of floating-point parameters.
            cast_by_reader: See `hrl.workers.engine.weights.iter_full_params`.
        """
        return iter_full_params(
            self.module,
            self.form,
            dtype,
            self.device,
            skip=self._not_sent,
            cast_by_reader=cast_by_reader,
            merges=merges_of(self.module) if self._merges else None,
        )

    @property
    def _merges(self) -> bool:
        return self._source.adapter is not None and self._source.adapter.merge

    @cached_property
    def _not_sent(self) -> frozenset[str]:
        """Names in memory of what engines do not get."""
        if not self._merges:
            return self.frozen
        return self._out_of_reach | {name for name, _ in self.module.named_parameters() if is_part(name)}

    def frozen_names(self) -> list[str]:
        """Return the names in the checkpoint of the parameters that no update moves and no sync sends."""
        kept = {name for name, _ in saved_tensors(self.module) if name in self._not_sent and not is_part(name)}
        return sorted(piece.name for name in kept for piece in self.form.pieces(name.removeprefix(PREFIX)))


def _nothing(model: Any) -> tuple[str, ...]:
    return ()


def forward_micro_batches(plan: RankPlan, num_rows: int) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches of a plain forward.

    Raises:
        ValueError: The plan has not exactly one mini-batch, or does not cover every row once.
    """
    if len(plan.mini_batches) != 1:
        raise ValueError(f"a forward's plan has one mini-batch, this one has {len(plan.mini_batches)}")
    micro_batches = plan.mini_batches[0].micro_batches
    if sorted(row for picked in micro_batches for row in picked) != list(range(num_rows)):
        raise ValueError(f"a forward's plan must cover each of the {num_rows} rows of this rank once")
    return micro_batches
