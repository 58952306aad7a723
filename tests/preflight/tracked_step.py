"""What the phases of a step take on a rank of a sharded model, without storage, as torch's own tracker counts it.

`python -m tests.preflight.tracked_step` prints the ledger of `hrl check` beside it, for models and numbers of ranks
that no machine here has. To be called in a process of its own, whose modules it changes. The process group is fake, so
that a machine without a GPU can play rank 0 of any number of ranks; tensors have sizes and nothing in them. Attention
stands in for the variable-length kernels, which keep queries, keys, values, output and log-sum-exps.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from hrl.config.model import LearnerConfig
from hrl.models import packed_model
from hrl.models.adapter import adapter_of, add_adapter
from hrl.models.footprint import Footprint, footprint
from hrl.models.loading import Loaded, ModelSource, load_causal_lm
from hrl.models.ops import attention, log_prob, residual
from hrl.models.packed_model import PackedMicroBatch, TokenRows, pack_micro_batch
from hrl.preflight.memory_ledger import ResidentModel
from hrl.workers.engine import casts, sharding
from tests.plan.models import SEVEN, SEVENTY, THIRTY_TWO

DEVICE = torch.device("cpu")
CARD = torch.device("cuda")  # whose rules hold
PHASES = ("log-probs", "actor forward", "actor backward")


@dataclass(frozen=True)
class Case:
    """A model on one of several ranks.

    Attributes:
        config: What its config.json has.
        ranks: That share it.
        tokens: Of a micro-batch.
        recompute: Whether layers are computed again in the backward pass.
        reshards: Whether weights are freed between forward and backward.
        lora_rank: Of the adapter that is trained in its place; 0 is none.
    """

    config: dict[str, Any]
    ranks: int
    tokens: int
    recompute: bool = True
    reshards: bool = True
    lora_rank: int = 0


class _Varlen(torch.autograd.Function):
    """What the kernels on CUDA keep and make, without the numbers."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _rows(tokens: int) -> TokenRows:
    """Four rows of `tokens` in all, every token of which but the first is scored."""
    length = tokens // 4
    ids, one = np.zeros((4, length), np.int64), np.ones((4, length), bool)
    return TokenRows(list(ids[:, :1]), ids, np.full(4, length), one)


def _without_storage(packed: PackedMicroBatch, fake: FakeTensorMode) -> PackedMicroBatch:
    """The same micro-batch as fake tensors."""
    given = {field.name: getattr(packed, field.name) for field in fields(packed)}
    return replace(packed, **{k: fake.from_tensor(v) for k, v in given.items() if isinstance(v, torch.Tensor)})


def _loaded(case: Case) -> tuple[Footprint, Loaded]:
    """The sizes of a model, and the model on the meta device."""
    adapter = adapter_of(LearnerConfig(lora_rank=case.lora_rank), 0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.config))
        source = ModelSource(folder, {}, case.recompute, share_prefix=True, trust_remote_code=False, max_model_len=4096)
        size = footprint(replace(source, adapter=adapter))
        loaded = load_causal_lm(source, torch.float32 if adapter is None else torch.bfloat16, meta=True)
    if adapter is not None:
        add_adapter(loaded.model, adapter, torch.float32)
    return size, loaded


def _give_fake_storage(module: nn.Module) -> None:
    given: dict[int, nn.Parameter] = {}  # a shared matrix stays one
    for holder in module.modules():
        for name, parameter in holder._parameters.items():
            if parameter is not None and id(parameter) not in given:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                given[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            holder._parameters[name] = None if parameter is None else given[id(parameter)]
        for name, buffer in holder._buffers.items():
            holder._buffers[name] = None if buffer is None else torch.empty(buffer.shape, dtype=buffer.dtype)


class _Tracker(FSDPMemTracker):
    """Torch's tracker, asked for one phase after the other."""

    @contextmanager
    def phase(self, peaks: dict[str, int], name: str) -> Iterator[None]:
        """Note the most bytes that there are in the block."""
        self._peak_mem[DEVICE] = 0
        self._peak_mem_snap.pop(DEVICE, None)
        yield
        peaks[name] = self.get_tracker_snapshot("peak")[DEVICE]["Total"]


def tracked_step(case: Case) -> tuple[Footprint, dict[str, int]]:
    """The footprint of a model, and the bytes at the worst moment of log-probs and of a second micro-batch's update."""
    attention.packed_attention = lambda query, key, value, *_, **__: _Varlen.apply(query, key.clone(), value.clone())
    residual._NARROW = ()  # the stream is wide on a CPU alone
    packed_model.default_chunk = lambda _: log_prob.CUDA_CHUNK
    sharding.keeps_cast_parameters = lambda ranks, _, reshards: casts.keeps_cast_parameters(ranks, CARD, reshards)
    size, loaded = _loaded(case)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    mesh = sharding.build_mesh(DEVICE, -1)
    module = packed_model.PackedCausalLM(loaded.model)
    rows = pack_micro_batch(_rows(case.tokens), (0, 1, 2, 3), share_prefix=False, wanted="next", device=DEVICE)
    peaks: dict[str, int] = {}
    with FakeTensorMode() as fake:
        _give_fake_storage(module)
        sharding._shard(module, loaded, SimpleNamespace(dtype="bfloat16", reshard_after_forward=case.reshards), mesh)
        packed = _without_storage(rows, fake)
        tracker = _Tracker(module)
        tracker.track_inputs((packed.input_ids,))
        with tracker:
            with torch.no_grad(), tracker.phase(peaks, "log-probs"):
                module(packed, 1.0, False)
            for unit in module.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()
            for _ in range(2):
                tracker.reset_mod_stats()
                with tracker.phase(peaks, "actor forward"):
                    statistics = module(packed, 1.0, True)
                    loss = statistics.log_prob.sum() + statistics.entropy.sum()
                with tracker.phase(peaks, "actor backward"):
                    loss.backward()
                del statistics, loss
    dist.destroy_process_group()
    return size, peaks


def said_of(case: Case, size: Footprint) -> dict[str, float]:
    """The ledger's bytes for the same phases; what is tracked has no optimizer."""
    model = ResidentModel(
        name="actor",
        size=size,
        trained=True,
        master_bytes=4,
        compute_bytes=2,
        wide_stream=False,
        shards=case.ranks,
        tensor=1,
        experts=1,  # the tracker takes one mesh for all parameters of a layer
        tokens=case.tokens,
        accumulates=True,
        recomputed=size.num_layers if case.recompute else 0,
        optimizer="adamw",
        keeps_cast=not case.reshards,
        param_offload=False,
        optimizer_offload=True,
        all_offload=False,
        activation_offload=False,
        has_head=True,
        chunk=log_prob.CUDA_CHUNK,
        forwards=("log-probs",),
    )
    phases = {name: sum(entry.num_bytes for entry in entries) for name, entries in model.phases()}
    return {name: phases[name] for name in PHASES}


def main() -> None:
    """Print a line for each model and phase."""
    cases = {"7B on 1": (SEVEN, 1), "7B on 8": (SEVEN, 8), "32B on 8": (THIRTY_TWO, 8), "70B on 64": (SEVENTY, 64)}
    for name, (config, ranks) in cases.items():
        case = Case(config, ranks, 8192)
        size, peaks = tracked_step(case)
        for phase, said in said_of(case, size).items():
            found = peaks[phase]
            sys.stdout.write(
                f"{name}, {phase}: ledger {said / 2**30:.2f}, tracked {found / 2**30:.2f} GiB, {said / found:.3f}\n"
            )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
