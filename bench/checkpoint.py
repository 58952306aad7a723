"""How long a step stands still for a checkpoint.

A model in float32 with AdamW's two moments, 100 to 400 MiB together, on one rank. hrl's is what its trainer does for
one: a new folder, sharded safetensors of model and optimizer with the generators' states, all of it on disk
(`fsync`), the folder renamed, and the one before removed; without the copy for transformers. The peer is `torch.save`
of the same model and optimizer, one file each, as verl's checkpoint manager calls it on a rank; it leaves the bytes
in the page cache. `dcp.async_save` is torch's with a stager that keeps its shared memory: the step waits for the
copy, and what follows in the background is not timed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from bench.harness import ROUNDS, Case, Comparison
from hrl.cluster.checkpoints import CheckpointStore
from hrl.config.model import OptimConfig
from hrl.workers.engine.checkpoint import CONTENTS, load_state, save_state
from hrl.workers.engine.optim import Optimizer
from hrl.workers.requests import Training

AXIS = "MiB of model and optimizer"
THREADS = 2
_TORCH, _ASYNC = "torch.save", "dcp.async_save"
_WIDTH = 1024  # of layers whose weight is 4 MiB, and 12 with its moments


def cases() -> Iterator[Case]:
    """Yield growth in bytes."""
    with tempfile.TemporaryDirectory(prefix="hrl-bench-") as name:
        folder = Path(name)
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            for mib in (100, 200, 400):
                state = _State(layers=round(mib / 12))
                ours, theirs = _Hrl(state, folder / f"hrl_{mib}"), _TorchSave(state, folder / f"torch_{mib}")
                rounds, last = (ROUNDS, mib == 400)
                others = (lambda ours=ours, state=state: _against_async(state, ours, folder / "dcp")) if last else None
                floor = 8.0 if last else None
                yield Case(f"{mib} MiB", _TORCH, ours, theirs, _equal, floor, mib, rounds=rounds, others=others)
        finally:
            dist.destroy_process_group()


class _State:
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
    """hrl's: called, it writes the next step's checkpoint and removes the one before."""

    def __init__(self, state: _State, folder: Path) -> None:
        self._state, self._store, self._step = state, CheckpointStore(folder, keep=1), 0

    def __call__(self) -> Callable[[], dict[str, Tensor]]:
        self._step += 1
        folder = self._store.begin(self._step)
        save_state(folder / "actor", self._state.module, self._state.optimizer, CONTENTS)
        final = self._store.commit(self._step, {"step": self._step})

        def load() -> dict[str, Tensor]:
            fresh = _State(layers=len(self._state.module))
            for tensor in fresh.tensors().values():
                tensor.zero_()
            load_state(final / "actor", fresh.module, fresh.optimizer, CONTENTS)
            return fresh.tensors()

        return load


class _TorchSave:
    """torch's: called, it writes two files, over those before."""

    def __init__(self, state: _State, folder: Path) -> None:
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


def _against_async(state: _State, ours: Callable[[], Any], folder: Path) -> Iterator[Comparison]:
    """Yield the stall beside that of torch's asynchronous save, without the first, which makes its memory."""
    options = StagingOptions(False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False)
    stager = DefaultStager(options)
    mine, others = [], []
    for round_ in range(1 + 3):
        started = time.perf_counter()
        ours()
        mine.append(time.perf_counter() - started)
        started = time.perf_counter()
        saved = dcp.async_save(state.tensors(), checkpoint_id=str(folder / str(round_)), async_stager=stager)
        others.append(time.perf_counter() - started)
        saved.result() if not hasattr(saved, "upload_completion") else saved.upload_completion.result()
    stager.close()
    yield Comparison("400 MiB", _ASYNC, "seconds", statistics.median(mine[1:]), statistics.median(others[1:]))
