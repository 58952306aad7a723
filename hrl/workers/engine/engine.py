"""The engine: a sharded module with its optimizer, where it lives, and the order of collectives in an update."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hrl.batching import MiniBatchPlan, RankPlan
from hrl.metrics import Metric
from hrl.models.checkpoint_form import CheckpointForm, saved_tensors
from hrl.models.flops import ModelFlops, peak_flops
from hrl.models.loading import Loaded, dtype_of
from hrl.models.micro_batch import PackedMicroBatch, TokenRows, Wanted, pack_micro_batch
from hrl.workers.engine.checkpoint import CONTENTS, load_state, save_state
from hrl.workers.engine.host_memory import HostCopies, local
from hrl.workers.engine.nonfinite import SkippedStep, Symptoms, names_of_nonfinite, skip
from hrl.workers.engine.optim import Optimizer, StepReport
from hrl.workers.engine.sharding import build_mesh, build_sharded, keeps_cast_parameters
from hrl.workers.engine.weights import PREFIX, ParamSpec, export_hf, iter_full_params, param_specs

if TYPE_CHECKING:
    from hrl.protocol import DataProto


class Engine:
    """Runs packed micro-batches through one sharded model.

    Args:
        load: `load(meta)` gives the transformers model, with or without storage.
        wrap: From the transformers model to the module whose `forward` is run.
        share_prefix: Compute equal prompts of a micro-batch once.
        train: `optim` and `grad_clip`; `None` for a model that isn't trained.
        fsdp: The sharding's configuration.
        device: Of this rank.
        total_steps: Length of the run in optimizer steps.
        run_folder: Where batches are kept whose loss or gradient is not finite; `None` outside of a run.
        seed: Of the run, by which bfloat16 masters are rounded.
    """

    def __init__(
        self,
        load: Callable[[bool], Loaded],
        wrap: Callable[[Any], nn.Module],
        *,
        share_prefix: bool,
        train: Any | None,
        fsdp: Any,
        device: torch.device,
        total_steps: int | None,
        run_folder: Path | None = None,
        seed: int = 0,
    ) -> None:
        self.device = device
        self.run_folder = run_folder
        self.train_config = train
        self.share_prefix = share_prefix
        self.mesh = build_mesh(device, fsdp.fsdp_size)
        self.module, loaded = build_sharded(load, wrap, fsdp, self.mesh, device, train=train is not None)
        self.source_config = loaded.source_config
        self.form = CheckpointForm.of(loaded.model)
        self.flops = ModelFlops.of(loaded.model)
        self.frozen: frozenset[str] = frozenset()
        # On a CPU there is nothing to gain: the host's memory is the device's.
        movable = device.type != "cpu"
        self.optimizer: Optimizer | None = None
        if train is None:
            self.module.requires_grad_(False)
            self.module.eval()
        else:
            parameters = self.module.named_parameters()
            self.frozen = frozenset(name for name, parameter in parameters if not parameter.requires_grad)
            self.optimizer = Optimizer(
                self.module,
                train.optim,
                train.grad_clip,
                total_steps,
                device=device,
                offload=movable and fsdp.optimizer_offload,
                seed=seed,
            )
        self.host_copies = HostCopies(self.module, device) if movable and fsdp.param_offload else None
        self._keeps_cast = keeps_cast_parameters(self.mesh.size(), device, fsdp.reshard_after_forward)
        self._is_changed = False
        self._frees_memory = self.host_copies is not None or (
            self.optimizer is not None and self.optimizer.adamw.offload
        )
        self.offload()

    # ------------------------------------------------------------------ running

    def pack(self, rows: TokenRows, picked: tuple[int, ...], wanted: Wanted = "next") -> PackedMicroBatch:
        """Pack local rows for this engine."""
        return pack_micro_batch(rows, picked, share_prefix=self.share_prefix, wanted=wanted, device=self.device)

    @torch.no_grad()
    def forward(
        self,
        rows: TokenRows,
        plan: RankPlan | None,
        run: Callable[[PackedMicroBatch], tuple[Tensor, ...]],
        *,
        num_outputs: int,
        wanted: Wanted = "next",
    ) -> list[Tensor]:
        """Run every row once, without gradients.

        Args:
            rows: This rank's rows.
            plan: Exactly one mini-batch; `None` runs all rows in one micro-batch.
            run: From a packed micro-batch to `(N,)` results.
            num_outputs: How many results `run` gives.
            wanted: Which hidden states it needs.

        Returns:
            Float32 columns on the CPU: `(B, R)`, or `(B,)` for `wanted="last"`; zero where nothing was asked.
        """
        count, width = rows.responses.shape
        micro_batches = forward_micro_batches(plan, count)
        results: list[Tensor] = []
        with self.resident():
            for picked in micro_batches:
                packed = self.pack(rows, picked, wanted)
                outputs = torch.stack(run(packed)).float()
                assert len(outputs) == num_outputs, "`run` gives as many results as are asked for"
                if not packed.is_empty:
                    results.append(outputs)
            self._release_gathered()
            # Once for all micro-batches: to fetch is to wait until they are computed.
            found = torch.cat(results, 1).cpu() if results else torch.zeros(num_outputs, 0)
        columns = torch.zeros(num_outputs, count, 1 if wanted == "last" else width)
        # In the order of the micro-batches and of their rows, so came the results.
        order = [row for picked in micro_batches for row in picked]
        mask = torch.ones(count, 1, dtype=torch.bool) if wanted == "last" else torch.from_numpy(rows.trained)
        columns[:, order] = torch.zeros_like(columns).masked_scatter(mask[order].expand_as(columns), found)
        return [column.squeeze(1) if wanted == "last" else column for column in columns.unbind()]

    def update(
        self,
        plan: RankPlan,
        loss_of: Callable[[MiniBatchPlan, tuple[int, ...]], Tensor],
        *,
        name: str,
        batch: DataProto,
        meter: Meter,
    ) -> dict[str, Metric]:
        """Every optimizer step of the plan.

        Args:
            plan: This rank's part of the mini-batches.
            loss_of: From a mini-batch and a micro-batch's rows to what `step` wants of them.
            name: Of the update, in front of its metrics.
            batch: The rank's rows.
            meter: Takes the metrics of `loss_of`.

        Returns:
            The meter's metrics.

        Raises:
            NonFiniteStepError: Several steps in a row were not finite.
        """
        reports = []
        with self.resident():
            for index, mini_batch in enumerate(plan.mini_batches):
                report = self.step(mini_batch, partial(loss_of, mini_batch))
                reports.append(report)
                if not report.applied:
                    self._skip(report, name, index, batch, mini_batch, meter)
        return meter.metrics(name, reports)

    def step(self, micro_batches: MiniBatchPlan, loss_of: Callable[[tuple[int, ...]], Tensor]) -> StepReport:
        """One optimizer step: forward and backward of every micro-batch, then the update.

        Args:
            micro_batches: This rank's part of the mini-batch.
            loss_of: From a micro-batch's rows to its share of the mini-batch's loss, divided by the global counts.
        """
        optimizer = self._trained
        optimizer.zero_grad()
        losses = []
        last = len(micro_batches.micro_batches) - 1
        for index, picked in enumerate(micro_batches.micro_batches):
            self._keep_gathered(index != last)
            loss = loss_of(picked)
            loss.backward()
            losses.append(loss.detach())
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)
        report = optimizer.step(total, fill_missing=last < 0)
        self._is_changed |= report.applied
        return report if report.applied else replace(report, losses=tuple(map(float, losses)))

    @property
    def _trained(self) -> Optimizer:
        assert self.optimizer is not None, "this engine was built without a training configuration"
        return self.optimizer

    def _skip(
        self, report: StepReport, name: str, index: int, batch: DataProto, mini_batch: MiniBatchPlan, meter: Meter
    ) -> None:
        weights = {name: local(parameter.detach()) for name, parameter in self.module.named_parameters()}
        symptoms = Symptoms(
            report.grad_norm,
            report.lr,
            report.losses,
            meter.nonfinite(),
            report.nonfinite_gradients,
            names_of_nonfinite(weights),
        )
        step = batch.meta_info.get("step", self._trained.steps_taken + 1)
        in_a_row = self._trained.skipped_in_a_row
        skip(SkippedStep(name, step, index, in_a_row, batch, mini_batch, self.train_config, symptoms), self.run_folder)

    def _keep_gathered(self, keep: bool) -> None:
        """Where they may stay, the cast parameters stay until the weights change."""
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
        """The parameters are on the device inside the block, and offloaded afterwards where configured.

        Offloaded moments stay where they are: they visit the device a bucket at a time, see `AdamW`.
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
        """Take parameters to host memory, where the configuration says so."""
        if self.host_copies is not None:
            self.host_copies.offload(changed=self._is_changed)
            self._is_changed = False
        if self._frees_memory and self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------ state

    # Saved and loaded where it lies: next to an engine that is awake there is no room on the device.

    def save(self, folder: Path, contents: Collection[str] = CONTENTS) -> None:
        """Write the sharded state; every rank calls it."""
        save_state(folder, self.module, self.optimizer, contents)

    def load(self, folder: Path, contents: Collection[str] = CONTENTS) -> None:
        """Load what `save` wrote, on any number of ranks; every rank calls it."""
        load_state(folder, self.module, self.optimizer, contents)
        self._is_changed = True

    def export_hf(self, folder: Path) -> None:
        """Write a folder that transformers and vLLM load, in the dtype of the folder that was loaded."""
        own = self.source_config.dtype or torch.bfloat16
        dtype = dtype_of(own) if isinstance(own, str) else own
        everything = iter_full_params(self.module, self.form, dtype, self.device)
        export_hf(everything, self.source_config, folder, dtype)

    def param_specs(self, dtype: torch.dtype) -> list[ParamSpec]:
        """Name, dtype and shape of everything that `iter_full_params` yields, in its order."""
        return param_specs(self.module, self.form, dtype, skip=self.frozen)

    def iter_full_params(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """`(name, full tensor)` as the checkpoint has them, on the device and in a fixed order; it gathers.

        Left out is what was frozen at load, of which `frozen_names` gives the names.
        """
        return iter_full_params(self.module, self.form, dtype, self.device, skip=self.frozen)

    def frozen_names(self) -> list[str]:
        """Names in the checkpoint of what no update moves: whoever has the model's folder has it."""
        kept = {name for name, _ in saved_tensors(self.module)} & self.frozen
        return sorted(piece.name for name in kept for piece in self.form.pieces(name.removeprefix(PREFIX)))


def forward_micro_batches(plan: RankPlan | None, num_rows: int) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches of a plain forward.

    Raises:
        ValueError: The plan has not exactly one mini-batch, or does not cover every row once.
    """
    if plan is None:
        return (tuple(range(num_rows)),)
    if len(plan.mini_batches) != 1:
        raise ValueError(f"a forward's plan has one mini-batch, this one has {len(plan.mini_batches)}")
    micro_batches = plan.mini_batches[0].micro_batches
    if sorted(row for picked in micro_batches for row in picked) != list(range(num_rows)):
        raise ValueError(f"a forward's plan must cover each of the {num_rows} rows of this rank once")
    return micro_batches


def require_plan(plan: RankPlan | None) -> RankPlan:
    """Return an update needs the global counts, which only the driver knows.

    Raises:
        ValueError: There is no plan.
    """
    if plan is None:
        raise ValueError("an update needs a plan with the counts of the whole mini-batch: see hrl.batching.plan_update")
    return plan


#: `torch.quantile` takes no more numbers than this.
QUANTILE_LIMIT = 1 << 24


class Meter:
    """Collects (sum, count) pairs and the work done during one update."""

    def __init__(self, engine: Engine, world_size: int) -> None:
        self.engine = engine
        self.world_size = world_size
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._distances: dict[str, list[Tensor]] = {}
        self._flops = 0.0
        self._start = time.perf_counter()

    def add(self, name: str, total: Tensor, count: Tensor | float) -> None:
        """Add to a mean over tokens or rows."""
        total = total.detach()
        old = self._sums.get(name)
        if not isinstance(count, Tensor):  # filled in on the device, not copied to it
            count = torch.full((), float(count), dtype=total.dtype, device=total.device)
        count = count.to(total)
        self._sums[name] = (total, count) if old is None else (old[0] + total, old[1] + count)

    def add_share(self, name: str, share: Tensor, num_mini_batches: int) -> None:
        """Add a share of a mini-batch's loss: summed over micro-batches and ranks, averaged over mini-batches."""
        self.add(name, share, 0.0)
        total, _ = self._sums[name]
        self._sums[name] = (total, torch.full_like(total, num_mini_batches / self.world_size))

    def add_distances(self, name: str, distances: Tensor) -> None:
        """Collect distances `(n,)`, of which `name_mean`, `name_p99` and `name_max` are reported."""
        self._distances.setdefault(name, []).append(distances)

    def add_work(self, packed: PackedMicroBatch, *, with_head: bool) -> None:
        """Count the FLOPs of one forward and backward."""
        if not packed.is_empty and self.engine.flops is not None:
            head_tokens = packed.labels.numel() if with_head else 0
            self._flops += self.engine.flops.update(packed.layout.num_tokens, packed.layout.num_pairs, head_tokens)

    def nonfinite(self) -> tuple[str, ...]:
        """Names of what is not finite by now."""
        distances = {name: torch.cat(parts) for name, parts in self._distances.items()}
        return names_of_nonfinite({name: total for name, (total, _) in self._sums.items()} | distances)

    def metrics(self, prefix: str, reports: list[StepReport]) -> dict[str, Metric]:
        """Everything under `prefix/`, with `perf/mfu/<prefix>`."""
        elapsed_s = time.perf_counter() - self._start
        sums, spreads = self._on_host()
        metrics = {name: Metric.mean(total, count) for name, (total, count) in sums.items()}
        for name, (total, p99, largest, count) in spreads.items():
            metrics[f"{name}_mean"] = Metric.mean(total, int(count))
            # Over several ranks the largest of their 99th percentiles, which is not below that of all tokens.
            metrics[f"{name}_p99"] = Metric.max(p99)
            metrics[f"{name}_max"] = Metric.max(largest)
        applied = [report for report in reports if report.applied]
        metrics[f"{prefix}/grad_norm"] = Metric.mean(sum(r.grad_norm for r in applied), len(applied))
        if reports:
            metrics[f"{prefix}/lr"] = Metric.last(reports[-1].lr)
        # Every rank skips the same steps; each reports its part of the sum.
        metrics[f"{prefix}/skipped_steps"] = Metric.total((len(reports) - len(applied)) / self.world_size)
        peak = peak_flops(self.engine.device)
        if peak is not None and self._flops > 0:
            metrics[f"perf/mfu/{prefix}"] = Metric.mean(self._flops / elapsed_s / peak, 1.0)
        return metrics

    def _on_host(self) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Totals and counts; sums, 99th percentiles, largest and numbers of distances. One wait for all of them."""
        rows = {name: torch.stack(pair).double() for name, pair in self._sums.items()}
        spreads = {name: torch.cat(parts).double() for name, parts in self._distances.items()}
        for name, distances in spreads.items():
            if distances.numel() > 0:
                p99 = torch.quantile(distances[:QUANTILE_LIMIT], 0.99)
                number = torch.full_like(p99, distances.numel())
                rows[f"distances of {name}"] = torch.stack([distances.sum(), p99, distances.max(), number])
        if not rows:
            return {}, {}
        flat = torch.cat(list(rows.values())).tolist()
        found = {name: [flat.pop(0) for _ in range(row.numel())] for name, row in rows.items()}
        return (
            {name: found[name] for name in self._sums},
            {name: found[f"distances of {name}"] for name in spreads if f"distances of {name}" in found},
        )
