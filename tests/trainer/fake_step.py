"""One optimizer step of a sharded model without storage, and how much memory torch's own tracker saw it take.

To be called in a process of its own, whose modules it changes. The process group is fake, so that a machine without a
GPU can play rank 0 of any number of ranks; tensors have sizes and nothing in them. Attention stands in for the
variable-length kernels, which keep queries, keys, values, output and log-sum-exps.
"""

from __future__ import annotations

import tempfile
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config

from hrl.models import packed_model
from hrl.models.footprint import Footprint, footprint
from hrl.models.loading import ModelSource, load_causal_lm
from hrl.models.ops import attention, log_prob, residual
from hrl.models.packed_model import PackedMicroBatch, TokenRows, pack_micro_batch
from hrl.workers.engine import sharding

DEVICE = torch.device("cpu")


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
    """Four rows of ``tokens`` in all, every token of which but the first is scored."""
    length = tokens // 4
    ids, one = np.zeros((4, length), np.int64), np.ones((4, length), bool)
    return TokenRows(list(ids[:, :1]), ids, np.full(4, length), one)


def _without_storage(packed: PackedMicroBatch, fake: FakeTensorMode) -> PackedMicroBatch:
    """The same micro-batch as fake tensors."""
    given = {field.name: getattr(packed, field.name) for field in fields(packed)}
    return replace(packed, **{k: fake.from_tensor(v) for k, v in given.items() if isinstance(v, torch.Tensor)})


def fake_step(world: int, tokens: int, shape: dict[str, Any]) -> tuple[Footprint, int]:
    """The footprint of a Qwen2 of this shape, and bytes at the worst moment of an update on one of ``world``."""
    attention.packed_attention = lambda query, key, value, *_, **__: _Varlen.apply(query, key.clone(), value.clone())
    residual._NARROW = ()  # the stream is wide on a CPU alone
    packed_model.default_chunk = lambda _: log_prob.CUDA_CHUNK
    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(**shape, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
        source = ModelSource(folder, {}, True, share_prefix=True, trust_remote_code=False, max_model_len=4096)
        size = footprint(source)
        loaded = load_causal_lm(source, torch.float32, meta=True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    mesh = sharding.build_mesh(DEVICE, -1)
    module = packed_model.PackedCausalLM(loaded.model)
    rows = pack_micro_batch(_rows(tokens), (0, 1, 2, 3), share_prefix=False, wanted="next", device=DEVICE)
    with FakeTensorMode() as fake:
        for holder in module.modules():
            for store in (holder._parameters, holder._buffers):
                for name, tensor in store.items():
                    empty = None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype)
                    store[name] = (
                        torch.nn.Parameter(empty) if store is holder._parameters and tensor is not None else empty
                    )
        fsdp = SimpleNamespace(dtype="bfloat16", reshard_after_forward=True)
        sharding._shard(module, loaded, fsdp, mesh)
        packed = _without_storage(rows, fake)
        tracker = FSDPMemTracker(module)
        tracker.track_inputs((packed.input_ids,))
        with tracker:
            statistics = module(packed, 1.0, True)
            (statistics.log_prob.sum() + statistics.entropy.sum()).backward()
    dist.destroy_process_group()
    return size, tracker.get_tracker_snapshot("peak")[DEVICE]["Total"]
