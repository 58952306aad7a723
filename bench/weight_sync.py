"""Handing new weights to the sampler, through this machine's memory.

What SmolLM2-135M has, 272 tensors and 269 MB in bfloat16, goes from the process that trains to one that copies it
into a model of its own. Each way uses its package's released code at both ends, with its defaults. hrl's: a manifest,
one bucket that is kept from sync to sync, a checksum of every tensor at both ends, a commit, and each tensor read
back from the model. verl's: a bucket of 2 GiB made anew for each sync, ZeroMQ messages, no check. The order to
receive goes through a pipe in both, and the clock stops when the receiver has answered. The other cases cut the same
bytes into fewer and more tensors. What hrl's three checks cost is shown apart: with a checksum in their place that
reads nothing, both ends do what verl's do.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

from bench.harness import ROUNDS, Case, Comparison
from bench.peers import VERL, importable, without_its_package
from hrl.workers.weight_sync import wire
from hrl.workers.weight_sync.receiver import WeightReceiver
from hrl.workers.weight_sync.sender import WeightSync
from hrl.workers.weight_sync.shared_memory import SharedMemorySender
from hrl.workers.weight_sync.wire import Manifest, ReceiverReport

AXIS = "tensors"
SECONDS = 35
THREADS = 2
_BUCKET_MIB = 2048  # verl's default
_LAYERS, _HIDDEN, _MLP, _KV, _VOCABULARY = 30, 576, 1536, 192, 49152

Named = list[tuple[str, Tensor]]


def cases() -> Iterator[Case]:
    """Yield the model as it is, then the same bytes in fewer and more tensors."""
    weights = _smollm2()
    total = sum(tensor.numel() for _, tensor in weights)
    with _sampler() as sampler, _sampler() as verls:
        for label, named in {
            "SmolLM2-135M": weights,
            "30 tensors": _cut(total, 30),
            "1,000 tensors": _cut(total, 1_000),
            "10,000 tensors": _cut(total, 10_000),
        }.items():
            shapes = [(name, tuple(tensor.shape)) for name, tensor in named]
            for process in (sampler, verls):
                process.send(("model", shapes))
                process.recv()
            ours, theirs = _Hrl(named, sampler), _Verl(named, verls)
            floor, others = None, None
            if label == "SmolLM2-135M":
                floor, others = 5.0, partial(_unchecked, label, ours, theirs)
            yield Case(label, VERL, ours, theirs, _equal, floor, len(named), others=others)


def _unchecked(label: str, ours: _Hrl, theirs: _Verl) -> Iterator[Comparison]:
    """Yield the seconds of both if hrl checks nothing."""
    mine, verls = list[float](), list[float]()
    with ours.unchecked():
        ours()
        for _ in range(ROUNDS):
            for function, seconds in ((ours, mine), (theirs, verls)):
                started = time.perf_counter()
                function()
                seconds.append(time.perf_counter() - started)
    medians = statistics.median(mine), statistics.median(verls)
    yield Comparison(f"{label}, nothing checked", VERL, "seconds", *medians, rounds=(ROUNDS, ROUNDS))


def _smollm2() -> Named:
    """Return tensors with the names and shapes of SmolLM2-135M, whose head is its embedding."""
    shapes = {"model.embed_tokens.weight": (_VOCABULARY, _HIDDEN), "model.norm.weight": (_HIDDEN,)}
    for layer in range(_LAYERS):
        of_layer = {
            "self_attn.q_proj": (_HIDDEN, _HIDDEN),
            "self_attn.k_proj": (_KV, _HIDDEN),
            "self_attn.v_proj": (_KV, _HIDDEN),
            "self_attn.o_proj": (_HIDDEN, _HIDDEN),
            "mlp.gate_proj": (_MLP, _HIDDEN),
            "mlp.up_proj": (_MLP, _HIDDEN),
            "mlp.down_proj": (_HIDDEN, _MLP),
            "input_layernorm": (_HIDDEN,),
            "post_attention_layernorm": (_HIDDEN,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return [(name, _random(*shape)) for name, shape in shapes.items()]


def _cut(elements: int, count: int) -> Named:
    """Return `count` tensors of equal size with about `elements` elements together."""
    return [(f"model.layers.{number}.weight", _random(elements // count)) for number in range(count)]


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 1 << 15, shape, generator=generator).to(torch.int16).view(torch.bfloat16)


def _equal(ours: Callable[[], str], theirs: Callable[[], str]) -> None:
    """Check that both samplers hold the same bytes now."""
    assert ours() == theirs()


# ---- the process that samples ------------------------------------------------------------------------------------


class _Model:
    """Weights in use, with what hrl's receiver asks of a model."""

    def __init__(self, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        self.tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes}
        self._written: set[str] = set()

    def begin(self) -> None:
        """Expect every tensor."""
        self._written = set()

    def write(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Copy tensors into the model."""
        for name, tensor in weights:
            self.tensors[name].copy_(tensor)
            self._written.add(name)

    def finish(self, kept: Sequence[str] = ()) -> None:
        """Check that every tensor came."""
        assert self._written == self.tensors.keys()

    def cancel(self) -> None:
        """Leave what was written."""

    def read_back(self, name: str) -> Tensor:
        """Return a tensor as the model has it."""
        return self.tensors[name]

    def digest(self) -> str:
        """Return a digest of all names and bytes."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            found.update(name.encode())
            found.update(tensor.view(torch.uint8).numpy())
        return found.hexdigest()


def _sample(orders: Connection) -> None:
    """Follow orders: `model` with shapes, and of it a method of hrl's receiver, `verl` with a socket, or `digest`."""
    importable()
    answer: Any
    while True:
        what, *given = orders.recv()
        if what == "end":
            return
        if what == "model":
            model = _Model(given[0])
            receiver, answer = WeightReceiver(model, "sampler"), None
        elif what == "begin":
            manifest, handle, version = given
            answer = receiver.begin(receiver.manifest_of(manifest), handle, version)
        elif what == "verl":
            verl_receiver = _verl().BucketedWeightReceiver(given[0], torch.device("cpu"), use_shm=True)
            answer = verl_receiver.receive_weights(lambda weights, is_last, model=model: model.write(weights))
        elif what == "digest":
            answer = model.digest()
        elif what == "check":
            answer = _check(given[0])
        else:
            answer = getattr(receiver, what)(*given)
        orders.send(answer)


@contextmanager
def _sampler() -> Iterator[Connection]:
    """Yield the pipe to a process that samples."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_sample, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        ours.send(("end",))
        process.join(10)


# ---- the process that trains -------------------------------------------------------------------------------------


class _Hrl:
    """hrl's: called, it sends the weights as `RolloutHost.push_weights` does to an engine on CPUs."""

    def __init__(self, named: Named, sampler: Connection) -> None:
        self._named, self._sampler, self._version = named, sampler, 0
        self._thread = ThreadPoolExecutor(1)
        specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
        manifest = Manifest.build(specs, sys.maxsize)
        self._sync = WeightSync(manifest, SharedMemorySender(manifest), self, timeout_s=60)

    def __call__(self) -> Callable[[], str]:
        self._version += 1
        report = self._sync.push(self._version, iter(self._named))
        assert report.receivers[0].read_back == len(self._named)
        return lambda: self._order("digest").result()

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Let checksums of both processes read nothing in the block."""
        _check(False)
        self._order("check", False).result()
        try:
            yield
        finally:
            _check(True)
            self._order("check", True).result()

    def _order(self, *order: Any) -> Future[Any]:
        def ask() -> Any:
            self._sampler.send(order)
            return self._sampler.recv()

        return self._thread.submit(ask)

    def weights_begin(self, manifest: Manifest, handle: dict[str, Any], version: int) -> Future[None]:
        """Announce a sync."""
        return self._order("begin", manifest.to_plain(), handle, version)

    def weights_load(self, index: int) -> Future[None]:
        """Have a bucket taken."""
        return self._order("load", index)

    def weights_commit(self) -> Future[list[ReceiverReport]]:
        """Have the new weights served."""
        report = self._order("commit")
        return self._thread.submit(lambda: [report.result()])

    def weights_abort(self, reason: str) -> Future[None]:
        """Have the sync dropped."""
        return self._order("abort")


class _Verl:
    """verl's: called, it sends the weights as its vLLM server adapter does where there is no CUDA IPC."""

    def __init__(self, named: Named, sampler: Connection) -> None:
        self._named, self._sampler = named, sampler
        self._socket = f"ipc://{tempfile.gettempdir()}/hrl-bench-{os.getpid()}.sock"
        self._module = _verl()

    def __call__(self) -> Callable[[], str]:
        self._sampler.send(("verl", self._socket))
        sender = self._module.BucketedWeightSender(self._socket, bucket_size_mb=_BUCKET_MIB, use_shm=True)
        asyncio.run(sender.async_send_weights(iter(self._named)))
        self._sampler.recv()
        return self._digest

    def _digest(self) -> str:
        self._sampler.send(("digest",))
        return str(self._sampler.recv())


def _verl() -> ModuleType:
    """Return verl's module of both ends."""
    module = without_its_package("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer")
    # verl has no platform without an accelerator: there is nothing to wait for, and no cache to empty.
    device = SimpleNamespace(synchronize=_nothing, empty_cache=_nothing)
    module.get_torch_device, module.is_support_ipc = lambda: device, lambda: False  # type: ignore[attr-defined]
    return module


def _nothing() -> None:
    pass


def _check(checked: bool) -> None:
    """Have the checksums of this process read what they are of, or nothing."""
    wire.xxh3_64_intdigest = xxh3_64_intdigest if checked else _no_checksum
    wire.xxh3_64 = xxh3_64 if checked else partial(SimpleNamespace, update=_no_checksum, intdigest=partial(int, 1))


def _no_checksum(_: object) -> int:
    return 1
