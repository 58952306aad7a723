"""How long a step stands still for a checkpoint.

A model in float32 with AdamW's two moments, 100 to 400 MiB together, on one rank; what is saved goes on to change.
hrl's is what its trainer does: a new folder, the state taken down with the generators' and handed to the thread that
writes it; here the next optimizer step comes at once, so that everything not yet written is copied first. The peer is
`torch.save` of the same model and optimizer, one file each, as verl's checkpoint manager calls it on a rank; it leaves
the bytes in the page cache. Beside it: a step that comes when the thread is done, as after sampling; the seconds until
the checkpoint is whole, on disk (`fsync`), renamed, and the one before removed, against `torch.save` as it is; and
`dcp.async_save`, torch's own, with a stager that keeps its shared memory.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from bench.harness import Case, Comparison
from hrl.cluster.checkpoints import CheckpointStore
from hrl.cluster.pending_checkpoint import PendingCheckpoint
from hrl.config.model import OptimConfig
from hrl.workers.engine.background import BackgroundWriter
from hrl.workers.engine.checkpoint import CONTENTS, StateToSave, load_state, record_of
from hrl.workers.engine.optim import Optimizer
from hrl.workers.requests import Training

AXIS = "MiB of model and optimizer"
SECONDS = 35
THREADS = 2
_TORCH, _ASYNC = "torch.save", "dcp.async_save"
_WIDTH = 1024  # of layers whose weight is 4 MiB, and 12 with its moments


def cases() -> Iterator[Case]:
    """Yield growth in bytes."""
    with one_rank() as folder:
        for mib in (100, 200, 400):
            state = State(layers=round(mib / 12))
            ours, theirs = _Hrl(state, folder / f"hrl_{mib}"), _TorchSave(state, folder / f"torch_{mib}")
            others, floor = None, None
            if mib == 400:
                others, floor = partial(_others, state, ours, theirs, folder / "dcp"), 8.0
            yield Case(f"{mib} MiB", _TORCH, ours, theirs, _equal, floor, mib, settle=ours.publish, others=others)


@contextmanager
def one_rank() -> Iterator[Path]:
    """Be the only rank of a process group in the block, and have a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="hrl-bench-") as name:
        dist.init_process_group("gloo", init_method=f"file://{name}/rendezvous", rank=0, world_size=1)
        try:
            yield Path(name)
        finally:
            dist.destroy_process_group()


class State:
    """A model and its optimizer, with moments that are not zero."""

    def __init__(self, layers: int) -> None:
        generator = torch.Generator().manual_seed(layers)
        self.module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
        training = Training(optim=OptimConfig(), grad_clip=1.0, total_steps=10, seed=0, run_folder=None)
        self.optimizer = Optimizer(self.module, training, device=torch.device("cpu"))
        for tensor in self.tensors().values():
            tensor.normal_(generator=generator)

    def model(self) -> dict[str, Tensor]:
        """Return the parameters."""
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}

    def moments(self) -> dict[str, Tensor]:
        """Return the moments of all parameters."""
        states = ((self.optimizer.names[parameter], state) for parameter, state in self.optimizer.adamw.state.items())
        return {f"{name}.{moment}": state[moment] for name, state in states for moment in state}

    def tensors(self) -> dict[str, Tensor]:
        """Return all of it."""
        return self.model() | self.moments()


class _Hrl:
    """hrl's: called, it begins the next step's checkpoint, and takes what a step changes out of its way."""

    def __init__(self, state: State, folder: Path) -> None:
        self._state, self._store, self._step = state, CheckpointStore(folder, keep=1), 0
        self._writer, self._kept = BackgroundWriter(), dict[str, Tensor]()
        self._pending: PendingCheckpoint | None = None
        self._folder = folder
        self.stands_still_for_a_change = True

    def __call__(self) -> Callable[[], dict[str, Tensor]]:
        self._step += 1
        folder = self._store.begin(self._step) / "actor"
        saved = StateToSave(self._state.module, self._state.optimizer, CONTENTS, self._kept)
        record = record_of(folder)
        self._writer.begin(partial(saved.write, folder), record)
        self._pending = PendingCheckpoint(self._store, self._step, {"step": self._step}, [record], self._folder)
        if self.stands_still_for_a_change:
            saved.snapshot.detach()
        return self._load

    def publish(self) -> None:
        """Wait until the checkpoint is whole and the one before removed, if there is one on its way."""
        if self._pending is not None:
            self._writer.finish()
            assert self._pending.stop() is not None
            self._pending = None

    def _load(self) -> dict[str, Tensor]:
        self.publish()
        fresh = State(layers=len(self._state.module))
        for tensor in fresh.tensors().values():
            tensor.zero_()
        load_state(self._store.path(self._step) / "actor", fresh.module, fresh.optimizer, CONTENTS)
        return fresh.tensors()


class _TorchSave:
    """torch's: called, it writes two files, over those before."""

    def __init__(self, state: State, folder: Path) -> None:
        self._state, self._folder = state, folder
        folder.mkdir()

    def __call__(self) -> Callable[[], dict[str, Tensor]]:
        parts = {"model": self._state.model(), "optim": self._state.moments()}
        for name, tensors in parts.items():
            torch.save(tensors, self._folder / f"{name}_world_size_1_rank_0.pt")

        def load() -> dict[str, Tensor]:
            return {key: tensor for file in self._folder.iterdir() for key, tensor in torch.load(file).items()}

        return load


def _equal(ours: Callable[[], dict[str, Tensor]], theirs: Callable[[], dict[str, Tensor]]) -> None:
    """Check that both hold the same, bit for bit."""
    mine, others = ours(), theirs()
    assert mine.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in mine.items())


def _others(state: State, ours: _Hrl, theirs: _TorchSave, folder: Path) -> Iterator[Comparison]:
    """Yield what else there is to compare at 400 MiB, without the first round, which makes memory."""

    def whole() -> None:
        ours()
        ours.publish()

    label, later = "400 MiB", "400 MiB, next optimizer step later"
    ours.stands_still_for_a_change = False
    yield Comparison(label, _TORCH, "seconds until it is whole", _median(whole), _median(theirs))
    yield Comparison(later, _TORCH, "seconds", _median(ours, ours.publish), _median(theirs))
    ours.stands_still_for_a_change = True
    options = StagingOptions(False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False)
    stager, saved = DefaultStager(options), list[Any]()

    def torchs() -> None:
        name = str(folder / str(len(saved)))
        saved.append(dcp.async_save(state.tensors(), checkpoint_id=name, async_stager=stager))

    def wait() -> None:
        last = saved[-1]
        last.result() if not hasattr(last, "upload_completion") else last.upload_completion.result()

    yield Comparison(label, _ASYNC, "seconds", _median(ours, ours.publish), _median(torchs, wait))
    stager.close()


def _median(function: Callable[[], Any], settle: Callable[[], None] = lambda: None) -> float:
    """Return the seconds of a call without what is done after it."""
    seconds = []
    for _ in range(1 + 3):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
        settle()
    return statistics.median(seconds[1:])
