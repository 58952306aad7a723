"""How long a step stands still for a checkpoint.

A model in float32 with AdamW's two moments, 100 to 400 MiB together, on one rank; what is saved goes on to change.
hrl's is what its trainer does: a new folder, the state taken down with the generators' and handed to the thread that
writes it; here the next optimizer step comes at once, so that everything not yet written is copied first. The peer is
`torch.save` of the same model and optimizer, one file each, as verl's checkpoint manager calls it on a rank; it leaves
the bytes in the page cache, which are written to the disk before the next round begins. Beside it: a step that comes
when the thread is done, as after sampling; the seconds until the checkpoint is whole, on disk (`fsync`), renamed, and
the one before removed, against `torch.save` as it is; and `dcp.async_save`, torch's own, with a stager that keeps its
shared memory. These have none of what hrl's trainer saves besides by default: a folder in bfloat16 that transformers
loads, gathered while the step waits, and the tokenizer. `default contents` has all of it, for a Llama under FSDP2; the
peer is verl's `FSDPCheckpointManager.save_checkpoint` with its own default, in which the tokenizer is, and that folder
is not.
"""

from __future__ import annotations

import os
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
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bench.harness import Case, Comparison
from bench.peers import VERL, VERL_NEEDS, stand_ins
from hrl.cluster.checkpoints import CheckpointStore
from hrl.cluster.pending_checkpoint import PendingCheckpoint
from hrl.config.model import FsdpConfig, OptimConfig
from hrl.models.loading import ModelSource
from hrl.models.source import resolve_model
from hrl.workers.engine.background import BackgroundWriter
from hrl.workers.engine.checkpoint import CONTENTS, StateToSave, load_state, record_of
from hrl.workers.engine.optim import Optimizer
from hrl.workers.policy import Policy
from hrl.workers.requests import Training

AXIS = "MiB of model and optimizer"
SECONDS = 40
THREADS = 2
_TORCH, _ASYNC = "torch.save", "dcp.async_save"
_ROUNDS = 3  # of what is compared besides
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
            yield Case(f"{mib} MiB", _TORCH, ours, theirs, _equal, floor, mib, settle=ours.settle, others=others)
        model = _llama(folder / "llama")
        mine, other = _HrlDefault(model, folder / "hrl_default"), _VerlDefault(model, folder / "verl_default")
        yield Case("400 MiB, default contents", VERL, mine, other, _equal_defaults, settle=mine.settle)


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


class _Saves:
    """A run's checkpoints, of which the last may be on its way."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._store, self._step = folder, CheckpointStore(folder, keep=1), 0
        self._pending: PendingCheckpoint | None = None

    def begin(self) -> Path:
        """Return the folder of the next step's checkpoint."""
        self._step += 1
        return self._store.begin(self._step)

    def publish_after(self, records: list[Path]) -> None:
        """Have the checkpoint published when these are there."""
        self._pending = PendingCheckpoint(
            self._store,
            self._step,
            {"step": self._step},
            records,
            self._folder,
            make_log_durable=lambda: None,  # there is no log
            deadline_s=600.0,
        )

    def publish(self) -> Path:
        """Wait until the last checkpoint is whole and the one before removed, and return its folder."""
        if self._pending is not None:
            self.finish()
            assert self._pending.stop() is not None
            self._pending = None
        return self._store.path(self._step)

    def settle(self) -> None:
        """Wait until nothing is left to be written, by the peer either: the disk's work would take a core from both."""
        self.publish()
        os.sync()

    def finish(self) -> None:
        """Wait until everything is written."""
        raise NotImplementedError


class _Hrl(_Saves):
    """hrl's: called, it begins the next step's checkpoint, and takes what a step changes out of its way."""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(folder)
        self._state, self._writer, self._kept = state, BackgroundWriter(), dict[str, Tensor]()
        self.stands_still_for_a_change = True

    def __call__(self) -> Callable[[], dict[str, Tensor]]:
        folder = self.begin() / "actor"
        saved = StateToSave(self._state.module, self._state.optimizer, CONTENTS, self._kept, checksum=0)
        record = record_of(folder)
        self._writer.begin(partial(saved.write, folder), record)
        self.publish_after([record])
        if self.stands_still_for_a_change:
            saved.snapshot.detach()
        return self._load

    def finish(self) -> None:
        """Wait for the writer."""
        self._writer.finish()

    def _load(self) -> dict[str, Tensor]:
        folder = self.publish()
        fresh = State(layers=len(self._state.module))
        for tensor in fresh.tensors().values():
            tensor.zero_()
        load_state(folder / "actor", fresh.module, fresh.optimizer, CONTENTS)
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


def _llama(folder: Path) -> Path:
    """Return the folder of a Llama in bfloat16 that takes 400 MiB in training, with SmolLM2's tokenizer."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=9,
        num_attention_heads=6,
        num_key_value_heads=6,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_model("bundled:smollm2-135m-instruct")).save_pretrained(folder)
    return folder


class _HrlDefault(_Saves):
    """hrl's with its default contents: called, it begins a checkpoint as its trainer and its workers do."""

    def __init__(self, model: Path, folder: Path) -> None:
        super().__init__(folder)
        training = Training(optim=OptimConfig(), grad_clip=1.0, total_steps=10, seed=0, run_folder=None)
        source = ModelSource(str(model), {}, False, True, False, 128)
        self._engine = Policy(source, training, FsdpConfig(dtype="bf16"), device=torch.device("cpu")).engine
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def __call__(self) -> Callable[[], Saved]:
        folder = self.begin()
        records = [self._engine.begin_save(folder / "actor"), folder / "written-hf.json"]
        self._engine.begin_export(folder / "hf", records[-1])
        self._tokenizer.save_pretrained(folder / "hf")
        self.publish_after(records)
        assert self._engine._snapshot is not None
        self._engine._snapshot.detach()
        return self._load

    def finish(self) -> None:
        """Wait for the engine's writer."""
        self._engine.finish_save()

    def _load(self) -> Saved:
        folder = self.publish()
        shards = [load_file(file) for file in (folder / "actor").glob("shard-*")]
        elements = sum(tensor.numel() for shard in shards for tensor in shard.values())
        return load_file(folder / "hf" / "model.safetensors"), elements, (folder / "hf" / "tokenizer.json").read_text()


class _VerlDefault:
    """verl's: called, it writes its checkpoint, over the one before."""

    def __init__(self, model: Path, folder: Path) -> None:
        with stand_ins(*VERL_NEEDS):
            from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

        self._folder = folder
        module = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        for part in (*module.model.layers, module):
            fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
        adamw = torch.optim.AdamW(module.parameters(), lr=0.0)
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        adamw.step()  # moments are made by the first step
        adamw.zero_grad()
        self._manager = FSDPCheckpointManager(module, adamw, None, AutoTokenizer.from_pretrained(model))

    def __call__(self) -> Callable[[], Saved]:
        self._manager.save_checkpoint(str(self._folder), global_step=1)
        return self._load

    def _load(self) -> Saved:
        model, optimizer = (
            torch.load(self._folder / f"{part}_world_size_1_rank_0.pt", weights_only=False)
            for part in ("model", "optim")
        )
        model = {name: tensor.to_local() for name, tensor in model.items() if name != "lm_head.weight"}  # which is tied
        moments = [state[moment] for state in optimizer["state"].values() for moment in ("exp_avg", "exp_avg_sq")]
        elements = sum(tensor.numel() for tensor in (*model.values(), *moments))
        of_tokenizer = (self._folder / "huggingface" / "tokenizer.json").read_text()
        return {name: tensor.bfloat16() for name, tensor in model.items()}, elements, of_tokenizer


Saved = tuple[dict[str, Tensor], int, str]
"""The model in bfloat16, the number of elements of weights and moments together, and the tokenizer."""


def _equal_defaults(ours: Callable[[], Saved], theirs: Callable[[], Saved]) -> None:
    """Check that both hold the same model, bit for bit, moments of as many elements, and the same tokenizer."""
    (mine, *rest), (others, *their_rest) = ours(), theirs()
    assert mine.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in mine.items())
    assert rest == their_rest


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
    compared = partial(Comparison, rounds=(_ROUNDS, _ROUNDS))
    yield compared(label, _TORCH, "seconds until it is whole", _median(whole), _median(theirs))
    yield compared(later, _TORCH, "seconds", _median(ours, ours.settle), _median(theirs, os.sync))
    ours.stands_still_for_a_change = True
    options = StagingOptions(False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False)
    stager, saved = DefaultStager(options), list[Any]()

    def torchs() -> None:
        name = str(folder / str(len(saved)))
        saved.append(dcp.async_save(state.tensors(), checkpoint_id=name, async_stager=stager))

    def wait() -> None:
        last = saved[-1]
        last.result() if not hasattr(last, "upload_completion") else last.upload_completion.result()
        os.sync()

    yield compared(label, _ASYNC, "seconds", _median(ours, ours.settle), _median(torchs, wait))
    stager.close()


def _median(function: Callable[[], Any], settle: Callable[[], Any] = lambda: None) -> float:
    """Return the seconds of a call without what is done after it."""
    seconds = []
    for _ in range(1 + _ROUNDS):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
        settle()
    return statistics.median(seconds[1:])
