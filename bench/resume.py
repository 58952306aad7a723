"""Reading weights and moments back from a checkpoint.

A part of resuming: a run that goes on also starts its processes, loads its model and wakes its engine, which is not in
here. A model in float32 with AdamW's two moments, 100 to 400 MiB together, on one rank, is read into a model and an
optimizer that are there already. hrl's is what `Engine.load` calls: names and shapes are compared, then every shard is
read to its place, with the step counts and the generators. The peer is what verl's checkpoint manager and
transformers' `Trainer` do of it on a rank: `torch.load` of both files, then `load_state_dict` of the model and of
torch's AdamW. The files are in the page cache, so it is not the disk that is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from bench.checkpoint import State, one_rank
from bench.harness import Case
from hrl.workers.engine.checkpoint import CONTENTS, StateToSave, load_state

AXIS = "MiB of model and optimizer"
SECONDS = 10
THREADS = 2
_TORCH = "torch.load"


def cases() -> Iterator[Case]:
    """Yield growth in bytes."""
    with one_rank() as folder:
        for mib in (100, 200, 400):
            layers = round(mib / 12)
            saved = State(layers)
            ours, theirs = folder / f"hrl_{mib}", folder / f"torch_{mib}"
            list(StateToSave(saved.module, saved.optimizer, CONTENTS, {}, checksum=0).write(ours))
            yield Case(f"{mib} MiB", _TORCH, _Hrl(ours, layers), _Torch(theirs, saved), _equal, None, mib)


class _Hrl:
    """hrl's: called, it loads into the same model and optimizer."""

    def __init__(self, folder: Path, layers: int) -> None:
        self._folder, self._state = folder, State(layers)
        for tensor in self._state.tensors().values():
            tensor.zero_()

    def __call__(self) -> Callable[[], dict[str, Tensor]]:
        load_state(self._folder, self._state.module, self._state.optimizer, CONTENTS)
        return self._state.tensors


class _Torch:
    """torch's: called, it loads into the same model and torch's own AdamW."""

    def __init__(self, folder: Path, saved: State) -> None:
        folder.mkdir()
        self._files = [folder / f"{part}_world_size_1_rank_0.pt" for part in ("model", "optim")]
        self._module = saved.module
        self._adamw = torch.optim.AdamW(self._module.parameters())
        for parameter, moments in saved.optimizer.adamw.state.items():
            self._adamw.state[parameter] = {"step": torch.tensor(0.0)} | {k: v.clone() for k, v in moments.items()}
        for file, part in zip(self._files, (self._module, self._adamw), strict=True):
            torch.save(part.state_dict(), file)

    def __call__(self) -> Callable[[], dict[str, Tensor]]:
        for file, part in zip(self._files, (self._module, self._adamw), strict=True):
            part.load_state_dict(torch.load(file, weights_only=False))
        return self._tensors

    def _tensors(self) -> dict[str, Tensor]:
        parameters = {name: parameter.detach() for name, parameter in self._module.named_parameters()}
        states = ((name, self._adamw.state[parameter]) for name, parameter in self._module.named_parameters())
        moments = {f"{name}.{key}": state[key] for name, state in states for key in ("exp_avg", "exp_avg_sq")}
        return parameters | moments


def _equal(ours: Callable[[], dict[str, Tensor]], theirs: Callable[[], dict[str, Tensor]]) -> None:
    """Check that both hold the same now, bit for bit."""
    mine, others = ours(), theirs()
    assert mine.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in mine.items())
