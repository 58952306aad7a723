"""Sharded checkpoint state: torch's distributed checkpoint, stored as safetensors.

torch's default storage keeps its metadata in a pickle. The safetensors storage uses the same planner, so a checkpoint
of two ranks loads on three, and reading a folder from anywhere executes nothing.

A folder holds `shard-*.safetensors` (every rank's parameters and moments), `rng-rank-*.safetensors` and `state.json`
(names, shapes, the step count of each parameter's moments, world size). The caller writes to a temporary folder and
renames it.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from hrl.workers.engine.optim import MOMENTS, Optimizer

logger = logging.getLogger(__name__)

CONTENTS = ("model", "optimizer", "extra")
STATE_FILE = "state.json"
FORMAT = 4
#: The format with one step count for all moments, that of the first parameter.
ONE_COUNT_FORMAT = 3


def save_state(folder: Path, module: nn.Module, optimizer: Optimizer, contents: Collection[str]) -> None:
    """Write this rank's part of the state.

    Args:
        folder: Created if missing; all ranks must see it.
        module: The sharded module.
        optimizer: Of its parameters.
        contents: Any of `model`, `optimizer` (moments and their step counts), `extra` (position in the learning rate's
            schedule, the global generators of Python, numpy and torch); other names are ignored.
    """
    tensors = _tensors(module, optimizer, contents)
    folder.mkdir(parents=True, exist_ok=True)
    if tensors:
        dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    if "extra" in contents:
        save_file(_rng_state(), _rng_file(folder))
    if dist.get_rank() == 0:
        state = {
            "format": FORMAT,
            "contents": [c for c in CONTENTS if c in contents],
            "world_size": dist.get_world_size(),
            "schedule_steps": optimizer.steps_taken,
            "moment_steps": optimizer.moment_steps,
            "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
        }
        (folder / STATE_FILE).write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")
    dist.barrier()


def load_state(folder: Path, module: nn.Module, optimizer: Optimizer, contents: Collection[str]) -> None:
    """Load what `save_state` wrote, on any number of ranks; names and shapes must be the same.

    The generators are restored if the number of ranks is the same; otherwise they are left alone, which is logged.

    Raises:
        FileNotFoundError: There is no checkpoint in `folder`.
        ValueError: It lacks what is asked for, or was written by another model.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no checkpoint of this model ({STATE_FILE} is missing)")
    state = json.loads(path.read_text())
    wanted = [c for c in CONTENTS if c in contents]
    lacking = [c for c in wanted if c not in state["contents"]]
    if state["format"] not in (FORMAT, ONE_COUNT_FORMAT):
        raise ValueError(
            f"{folder} has format {state['format']}, this version of hrl reads {FORMAT}: continue it with the version "
            "that wrote it, or start anew from the model in its hf folder"
        )
    if lacking:
        raise ValueError(f"{folder} holds {state['contents']}, but {wanted} was asked for")
    tensors = _tensors(module, optimizer, wanted)
    _compare(folder, {k: tuple(v) for k, v in state["tensors"].items()}, tensors, wanted)
    with torch.no_grad():
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    if "optimizer" in wanted:
        optimizer.set_moment_steps(_moment_steps(folder, state, optimizer))
    if "extra" in wanted:
        optimizer.steps_taken = state["schedule_steps"]
        if state["world_size"] == dist.get_world_size():
            _set_rng_state(load_file(_rng_file(folder)))
        else:
            logger.warning(
                "checkpoint of %d ranks loaded on %d: weights and moments resharded, RNG states not restored",
                state["world_size"],
                dist.get_world_size(),
            )
    dist.barrier()


def _moment_steps(folder: Path, state: dict[str, Any], optimizer: Optimizer) -> dict[str, int]:
    """Return, by parameter, how many steps its moments have seen; the older format has the first parameter's count."""
    counts: dict[str, int] | int = state["moment_steps"]
    if isinstance(counts, dict):
        return counts
    if counts == 0 and state["schedule_steps"] > 0:
        raise ValueError(
            f"{folder} was written by an older version of hrl, which lost the step count of AdamW's moments: the "
            "model's first parameter never had a gradient. Start anew from the model in its hf folder"
        )
    return dict.fromkeys(optimizer.names.values(), counts)


def _tensors(module: nn.Module, optimizer: Optimizer, contents: Collection[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    if "model" in contents:
        tensors |= {f"model.{name}": parameter.detach() for name, parameter in module.named_parameters()}
    if "optimizer" in contents:
        moments = ((name, optimizer.adamw.state[parameter]) for parameter, name in optimizer.names.items())
        tensors |= {f"{moment}.{name}": state[moment] for name, state in moments for moment in MOMENTS}
    return tensors


def _compare(folder: Path, saved: dict[str, tuple[int, ...]], mine: dict[str, Tensor], wanted: list[str]) -> None:
    prefixes = {"model": ("model.",), "optimizer": ("exp_avg.", "exp_avg_sq."), "extra": ()}
    asked = tuple(prefix for part in wanted for prefix in prefixes[part])
    saved = {name: shape for name, shape in saved.items() if name.startswith(asked)} if asked else {}
    wrong = sorted(
        name for name in saved.keys() | mine.keys() if name not in mine or saved.get(name) != tuple(mine[name].shape)
    )
    if wrong:
        name = wrong[0]
        here = tuple(mine[name].shape) if name in mine else "absent"
        raise ValueError(
            f"{folder} was written by another model: {len(wrong)} tensors differ, first {name} "
            f"(saved {saved.get(name, 'absent')}, here {here})"
        )


def _rng_file(folder: Path) -> Path:
    return folder / f"rng-rank-{dist.get_rank():05d}.safetensors"


def _rng_state() -> dict[str, Tensor]:
    """Return the state of every global generator that `seed_everything` seeds."""
    state = {
        "torch": torch.get_rng_state(),
        "python": _json_tensor(random.getstate()),
        "numpy": _json_tensor(np.random.get_state(legacy=False)),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    version, words, gauss = _from_json_tensor(state["python"])
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(_from_json_tensor(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _json_tensor(state: Any) -> Tensor:
    """Return numbers, exactly, as a tensor, because safetensors stores nothing else."""
    text = json.dumps(state, default=lambda array: array.tolist())
    return torch.tensor(list(text.encode("ascii")), dtype=torch.uint8)


def _from_json_tensor(stored: Tensor) -> Any:
    return json.loads(bytes(stored.tolist()))
