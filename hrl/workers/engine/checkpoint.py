"""Sharded checkpoint state: the format of torch's distributed checkpoint, stored as safetensors.

torch's default storage keeps its metadata in a pickle. Its safetensors storage does not: reading a folder from anywhere
executes nothing, and torch's planner loads a checkpoint of two ranks on three. Files are written here and not by torch,
which would first copy all of a rank's tensors into one string of bytes, and needs collectives to agree on a plan; what
follows from the sharding needs none, so a rank can write alone, in the background.

A folder holds `shard-*.safetensors` (every rank's parameters and optimizer state), `rng-rank-*.safetensors`,
`state.json` (names, shapes, which optimizer, the step count of each parameter's state, world size) and
`written-rank-*.json`, which a rank writes when everything else of its part is on disk. The driver writes to a temporary
folder and renames it when all ranks have.

Of a model with an adapter a folder holds what is trained. The rest is in the model's folder, and `state.json` has its
checksum, by which a run that continues knows that its model is the same.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from xxhash import xxh3_128

from hrl.processes.plain_data import first_problem
from hrl.workers.engine.background import PartError, read_part, recorded
from hrl.workers.engine.checksum import WeightsDifferError
from hrl.workers.engine.digest import DigestingFile, FileDigest, Written
from hrl.workers.engine.host_memory import local
from hrl.workers.engine.optim import Optimizer
from hrl.workers.engine.snapshot import Snapshot

logger = logging.getLogger(__name__)

CONTENTS = ("model", "optimizer", "extra")
STATE_FILE = "state.json"
FORMAT = 4
#: The format with one step count for all moments, that of the first parameter.
ONE_COUNT_FORMAT = 3
#: safetensors' names of the dtypes of parameters and of optimizers' state.
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}


@dataclass(frozen=True)
class Base:
    """The weights beside an adapter, which are in no checkpoint; none of a model that is trained itself.

    Attributes:
        names: Of these parameters.
        checksum: Of all of them.
        dtypes: Theirs.
    """

    names: frozenset[str] = frozenset()
    checksum: int | None = None
    dtypes: tuple[str, ...] = ()


class StateToSave:
    """This rank's part of the state as it is now; no collective is needed to write it.

    Args:
        module: The sharded module.
        optimizer: Of its parameters.
        contents: Any of `model`, `optimizer` (moments and their step counts), `extra` (position in the learning rate's
            schedule, how many steps in a row were skipped, the global generators of Python, numpy and torch); other
            names are ignored.
        kept: Host memory for `Snapshot`.
        checksum: Of the weights of the whole model, see `hrl.workers.engine.checksum`; of what is trained, if there is
            a base.
        base: What is left out.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        contents: Collection[str],
        kept: dict[str, Tensor],
        checksum: int,
        base: Base = Base(),
    ) -> None:
        tensors = _tensors(module, optimizer, contents, base.names)
        self._rank = dist.get_rank()
        self._shards = _shards_of(tensors, self._rank)
        self.snapshot = Snapshot({name: local(tensors[name]) for name in self._shards}, kept)
        self._rng = _rng_state() if "extra" in contents else None
        self._state = {
            "format": FORMAT,
            "contents": [c for c in CONTENTS if c in contents],
            "world_size": dist.get_world_size(),
            "optimizer": optimizer.name,
            "schedule_steps": optimizer.steps_taken,
            "skipped_in_a_row": optimizer.skipped_in_a_row,
            "moment_steps": optimizer.moment_steps,
            "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
            "weights_checksum": checksum,
            "weights_dtypes": dtypes_of(module, base.names),
            "base_checksum": base.checksum,
            "base_dtypes": list(base.dtypes),
        }

    def write(self, folder: Path) -> Iterator[Written]:
        """Write it to a folder, which is made if it is missing, and yield the files. May run in another thread."""
        folder.mkdir(parents=True, exist_ok=True)
        if self._shards:
            shards = _shard_file(folder, self._rank)
            with DigestingFile(shards) as file:
                file.write(_header(self._shards))
                for _, chunk in self.snapshot.read():
                    file.write(chunk)
            yield Written(shards, file.digest)
        if self._rng is not None:
            rng = _rng_file(folder, self._rank)
            with DigestingFile(rng) as file:
                file.write(to_safetensors(self._rng))
            yield Written(rng, file.digest)
        if self._rank == 0:
            with DigestingFile(folder / STATE_FILE) as file:
                file.write((json.dumps(self._state, indent=1, sort_keys=True) + "\n").encode())
            yield Written(file.path, file.digest)


def bytes_to_save(
    module: nn.Module, optimizer: Optimizer, contents: Collection[str], skip: Collection[str] = ()
) -> dict[str, int]:
    """Return how much of the tensors this rank writes, by what a checkpoint holds."""
    rank = dist.get_rank()
    return {
        content: sum(
            shard.nbytes
            for tensor in _tensors(module, optimizer, [content], skip).values()
            if (shard := _Shard.of(tensor, rank)) is not None
        )
        for content in ("model", "optimizer")
        if content in contents
    }


def record_of(folder: Path) -> Path:
    """Return the file in a checkpoint's folder that says that all of this rank's part is there."""
    return folder / f"written-rank-{dist.get_rank():05d}.json"


@dataclass(frozen=True)
class _Shard:
    """What this rank writes of a tensor.

    Attributes:
        dtype: In safetensors' spelling.
        shape: Of this part.
        offset: Of its first element in the whole tensor.
        nbytes: Of this part.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor, rank: int) -> _Shard | None:
        """Return the rank's part of a tensor; None if there is none, or another rank writes it."""
        mine = local(tensor)
        offset: tuple[int, ...] = (0,) * tensor.dim()
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            position = mesh.get_coordinate()
            assert position is not None, "a rank saves what it holds"
            _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
            is_copy = any(place.is_replicate() and at for place, at in zip(placements, position, strict=True))
            is_empty = mine.numel() == 0 and rank > 0
        else:
            is_copy = is_empty = rank > 0
        if is_copy or is_empty:
            return None
        return cls(_DTYPES[mine.dtype], tuple(mine.shape), tuple(offset), mine.nbytes)


def _shards_of(tensors: Mapping[str, Tensor], rank: int) -> dict[str, _Shard]:
    """Return what a rank writes, by name, in the order in which it does."""
    shards = {name: _Shard.of(tensor, rank) for name, tensor in tensors.items()}
    return {name: shard for name, shard in shards.items() if shard is not None}


def _shard_file(folder: Path, rank: int) -> Path:
    return folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def _header(shards: Mapping[str, _Shard]) -> bytes:
    """Return what a safetensors file begins with, with the offsets of shards as torch's reader looks for them."""
    offsets = {name: {"saved_offsets": shard.offset} for name, shard in shards.items()}
    about = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    header: dict[str, Any] = {"__metadata__": about}
    start = 0
    for name, shard in shards.items():
        end = start + shard.nbytes
        header[name] = {"dtype": shard.dtype, "shape": shard.shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def dtypes_of(module: nn.Module, skip: Collection[str] = ()) -> list[str]:
    """Return the dtypes of a module's parameters, of those with other names than `skip`."""
    return sorted({str(parameter.dtype) for name, parameter in module.named_parameters() if name not in skip})


def load_state(
    folder: Path, module: nn.Module, optimizer: Optimizer, contents: Collection[str], base: Base = Base()
) -> int | None:
    """Load what `StateToSave` wrote, on any number of ranks; names and shapes must be the same.

    The generators are restored if the number of ranks is the same; otherwise they are left alone, which is logged.

    Returns:
        The checksum that the weights must have now; None for a checkpoint without one, or of another dtype.

    Raises:
        FileNotFoundError: There is no checkpoint in `folder`.
        ValueError: It lacks what is asked for, or was written by another model, or optimizer, or beside another base.
        WeightsDifferError: Weights or moments are not those that this rank wrote.
    """
    state = _SavedState.read(folder)
    wanted = [c for c in CONTENTS if c in contents]
    lacking = [c for c in wanted if c not in state.contents]
    if lacking:
        raise ValueError(f"{folder} holds {state.contents}, but {wanted} was asked for")
    tensors = _tensors(module, optimizer, wanted, base.names)
    _require_base(folder, state, base)
    if "optimizer" in wanted and state.optimizer != optimizer.name:
        raise ValueError(
            f"{folder} holds the state of optim.name={state.optimizer}, and this run has optim.name={optimizer.name}: "
            f"set it to {state.optimizer}, or leave optimizer out of checkpoint.load_contents"
        )
    _compare(folder, {k: tuple(v) for k, v in state.tensors.items()}, tensors, wanted)
    with torch.no_grad():
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    if state.world_size == dist.get_world_size() and _with_tensors(wanted) == _with_tensors(state.contents):
        _check_loaded(folder, tensors)
    if "optimizer" in wanted:
        optimizer.set_moment_steps(_moment_steps(folder, state, optimizer))
    if "extra" in wanted:
        optimizer.steps_taken = state.schedule_steps
        optimizer.skipped_in_a_row = state.skipped_in_a_row
        if state.world_size == dist.get_world_size():
            _set_rng_state(load_file(_rng_file(folder, dist.get_rank())))
        else:
            logger.warning(
                "checkpoint of %d ranks loaded on %d: weights and moments resharded, RNG states not restored",
                state.world_size,
                dist.get_world_size(),
            )
    dist.barrier()
    if "model" not in wanted:
        return None
    if state.weights_dtypes != dtypes_of(module, base.names):
        logger.warning("%s: the weights are not compared with a checksum: there is none of this dtype", folder)
        return None
    return state.weights_checksum


class _SavedState(BaseModel):
    """What `state.json` says; what has a default is not in older checkpoints."""

    model_config = ConfigDict(strict=True, extra="allow")

    contents: list[str]
    world_size: PositiveInt
    schedule_steps: NonNegativeInt
    moment_steps: dict[str, NonNegativeInt] | NonNegativeInt
    tensors: dict[str, list[NonNegativeInt]]
    optimizer: str = "adamw"
    skipped_in_a_row: NonNegativeInt = 0
    weights_checksum: int | None = None
    weights_dtypes: list[str] | None = None
    base_checksum: int | None = None
    base_dtypes: list[str] = []

    @classmethod
    def read(cls, folder: Path) -> _SavedState:
        """Return what is in a folder.

        Raises:
            FileNotFoundError: There is no checkpoint.
            PartError: It is of another format, or is not what `StateToSave` writes.
        """
        path = folder / STATE_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no checkpoint of this model ({STATE_FILE} is missing)")
        plain = read_part(path)
        known = plain.get("format") if isinstance(plain, dict) else None
        if known not in (FORMAT, ONE_COUNT_FORMAT):
            raise PartError(
                f"{folder} has format {known!r:.40}, this version of hrl reads {FORMAT}: continue it with the version "
                "that wrote it, or start anew from the model in its hf folder"
            )
        try:
            return cls.model_validate(plain)
        except ValidationError as error:
            raise PartError(f"{path} is damaged: {first_problem(error)}") from error


def _require_base(folder: Path, state: _SavedState, base: Base) -> None:
    """Refuse weights that were trained beside others than are here."""
    if (state.base_checksum is None) != (base.checksum is None):
        if base.names:
            raise ValueError(
                f"{folder} holds the model itself, and this run trains an adapter: remove lora_rank, or start anew "
                "from the model in its hf folder"
            )
        raise ValueError(
            f"{folder} holds an adapter, and this run trains the model itself: set lora_rank to what it was, or start "
            "anew from the folder that `hrl export` makes of it"
        )
    if base.checksum is None or state.base_checksum == base.checksum:
        return
    if state.base_dtypes != list(base.dtypes):
        logger.warning(
            "%s: the model beside the adapter is not compared with a checksum: its dtype was another", folder
        )
        return
    raise ValueError(
        f"{folder} holds an adapter of another model: the weights of this one have the checksum {base.checksum}, those "
        f"that it was trained with {state.base_checksum}. Set the model's path to what it was"
    )


def _with_tensors(contents: Collection[str]) -> list[str]:
    return [content for content in ("model", "optimizer") if content in contents]


def _check_loaded(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Compare what this rank has in memory with the hash that it took when it wrote the same part.

    A rank reads all files, and may see others than the driver, which compared them before. Where this rank holds other
    parts than it wrote, or in another dtype, the checksum of the whole model has to do.
    """
    rank = dist.get_rank()
    file, record = _shard_file(folder, rank), record_of(folder)
    shards = _shards_of(tensors, rank)
    header = _header(shards)
    # A rank whose shards were copies of another's has written none.
    if not shards or not record.is_file() or not file.is_file() or not _begins_with(file, header):
        return
    loaded = _digest_of(header, Snapshot({name: local(tensors[name]) for name in shards}, {}))
    if loaded != recorded(record)[file]:
        raise WeightsDifferError(
            f"weights and moments that rank {rank} has loaded from {folder} are not those that were written to "
            f"{file.name}: this node sees another file, or its memory is faulty. Continue from an older checkpoint "
            "(trainer.resume_mode=resume_path trainer.resume_from_path=…/checkpoints/step_N), or on another machine"
        )


def _begins_with(file: Path, header: bytes) -> bool:
    with open(file, "rb") as opened:
        return opened.read(len(header)) == header


def _digest_of(header: bytes, snapshot: Snapshot) -> FileDigest:
    """Return the digest of the file that these tensors make."""
    xxh3, size = xxh3_128(header), len(header)
    for _, chunk in snapshot.read():
        xxh3.update(chunk)
        size += len(chunk)
    return FileDigest(size, xxh3.hexdigest())


def _moment_steps(folder: Path, state: _SavedState, optimizer: Optimizer) -> dict[str, int]:
    """Return, by parameter, how many steps its moments have seen; the older format has the first parameter's count."""
    counts = state.moment_steps
    if isinstance(counts, dict):
        return counts
    if counts == 0 and state.schedule_steps > 0:
        raise ValueError(
            f"{folder} was written by an older version of hrl, which lost the step count of AdamW's moments: the "
            "model's first parameter never had a gradient. Start anew from the model in its hf folder"
        )
    return dict.fromkeys(optimizer.names.values(), counts)


def _tensors(
    module: nn.Module, optimizer: Optimizer, contents: Collection[str], skip: Collection[str]
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    if "model" in contents:
        kept = ((name, parameter) for name, parameter in module.named_parameters() if name not in skip)
        tensors |= {f"model.{name}": parameter.detach() for name, parameter in kept}
    if "optimizer" in contents:
        tensors |= optimizer.state_tensors()
    return tensors


def _compare(folder: Path, saved: dict[str, tuple[int, ...]], mine: dict[str, Tensor], wanted: list[str]) -> None:
    saved = {name: shape for name, shape in saved.items() if _content_of(name) in wanted}
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


def _content_of(name: str) -> str:
    """Return to what a tensor of a checkpoint belongs; an optimizer's state begins with its own names."""
    return "model" if name.startswith("model.") else "optimizer"


def _rng_file(folder: Path, rank: int) -> Path:
    return folder / f"rng-rank-{rank:05d}.safetensors"


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
    return torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8)


def _from_json_tensor(stored: Tensor) -> Any:
    return json.loads(bytes(stored.tolist()))
