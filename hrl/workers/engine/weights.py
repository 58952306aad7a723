"""The full tensors of a sharded module in its checkpoint's form: one at a time for the sync, all for an export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from hrl.errors import system_error
from hrl.files import naming
from hrl.models.checkpoint_form import CheckpointForm, saved_tensors
from hrl.workers.engine.digest import Written
from hrl.workers.engine.host_memory import local

#: The wrapper's attribute that holds the transformers model.
PREFIX = "model."
#: Files of a model's folder beside `config.json` that training does not change.
COMPANIONS = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


class ParamSpec(NamedTuple):
    """A tensor of the checkpoint, before it is made."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def param_specs(
    module: nn.Module, form: CheckpointForm, dtype: torch.dtype, *, skip: Collection[str] = ()
) -> list[ParamSpec]:
    """Return what `iter_full_params` will yield, in its order."""
    return [
        ParamSpec(piece.name, _outgoing_dtype(tensor, dtype), piece.shape)
        for name, tensor in saved_tensors(module)
        if name not in skip
        for piece in form.pieces(name.removeprefix(PREFIX))
    ]


def iter_full_params(
    module: nn.Module,
    form: CheckpointForm,
    dtype: torch.dtype,
    device: torch.device,
    *,
    skip: Collection[str] = (),
    cast_by_reader: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield `(name, full tensor)` in the checkpoint's form, in the same order on every rank; tied parameters once.

    Every rank must run the iterator to its end, because it gathers. A tensor is gone before the next one is gathered,
    unless the caller holds on to it (the variable of a `for` loop does).

    Args:
        module: The sharded module.
        form: The checkpoint's form.
        dtype: Of floating-point parameters; buffers keep their dtype, which the model chose for a reason.
        device: Where tensors are gathered.
        skip: Names in memory of what is left out.
        cast_by_reader: Tensors that need no gathering may come in the dtype that they are stored in, because the caller
            copies them to memory of the other dtype: casting to fresh memory before takes longer than both together.
    """
    for name, tensor in saved_tensors(module):
        if name in skip:
            continue
        # Cast first and gathered second, so that half the bytes travel.
        is_whole = not isinstance(tensor, DTensor) or tensor.device_mesh.size() == 1
        outgoing = tensor.dtype if cast_by_reader and is_whole else _outgoing_dtype(tensor, dtype)
        # Offloaded shards are moved before they are cast: a GPU casts in no time, and one call for both would have the
        # host cast into pageable memory, from which copies are slow. The next use of the stream waits for the copy.
        shard = tensor.detach().to(device, non_blocking=True).to(outgoing)
        full = shard.full_tensor() if isinstance(shard, DTensor) else shard
        yield from form.split(name.removeprefix(PREFIX), full)
        del shard, full  # before the next one is gathered


def _outgoing_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else tensor.dtype


@dataclass(frozen=True)
class ExportToWrite:
    """A whole model in host memory, to be written as a folder that transformers and vLLM load.

    Attributes:
        tensors: Copies, by name in the checkpoint.
        config: Of the transformers model, with `override_config` applied.
        dtype: Of the tensors, for `config.json`.
    """

    tensors: dict[str, Tensor]
    config: PretrainedConfig
    dtype: torch.dtype

    @classmethod
    def gather(
        cls, tensors: Iterable[tuple[str, Tensor]], live: nn.Module, config: PretrainedConfig, dtype: torch.dtype
    ) -> ExportToWrite | None:
        """Return rank 0's copies of the tensors of `iter_full_params`; None on others, which help to gather.

        Args:
            tensors: What to keep.
            live: The module, whose memory goes on to change.
            config: See above.
            dtype: See above.
        """
        writes = dist.get_rank() == 0
        changing = {local(tensor).untyped_storage().data_ptr() for _, tensor in saved_tensors(live)}
        kept = {}
        for name, tensor in tensors:
            if writes:
                storage = tensor.untyped_storage()
                is_own = tensor.is_cpu and storage.nbytes() == tensor.nbytes and storage.data_ptr() not in changing
                kept[name] = tensor if is_own else tensor.to("cpu", copy=True)
            del tensor  # before the next one is gathered
        return cls(kept, config, dtype) if writes else None

    def write(self, folder: Path) -> Iterator[Written]:
        """Write the folder, without tokenizer, and yield the files; safetensors have at most 5 GB each."""
        folder.mkdir(parents=True, exist_ok=True)
        source, has_code = Path(self.config.name_or_path), bool(getattr(self.config, "auto_map", None))
        files = [
            write_config(self.config, self.dtype, folder),
            *copy_companions(source, folder, has_code=has_code),
        ]
        try:
            save_torch_state_dict(self.tensors, folder)
        except SafetensorError as error:
            told = system_error(error)
            raise error if told is None else naming(told, folder) from error
        finally:
            self.tensors.clear()
        yield from map(Written.by_reading, (*files, *folder.glob("model*.safetensors*")))


def describe_classifier(config: PretrainedConfig, model: nn.Module, pad_token_id: int) -> None:
    """Have a configuration name the classifier with one label that a model with a scalar head is."""
    config.architectures = [type(model).__name__]
    config.num_labels = 1
    config.pad_token_id = pad_token_id


def write_config(config: PretrainedConfig, dtype: torch.dtype, folder: Path) -> Path:
    """Write `config.json`, even one that transformers would refuse to write, and return the file."""
    # `save_pretrained` is stricter than `from_pretrained`. It refuses, for instance, a `config.json` that sets a
    # temperature, as many published ones do.
    config.dtype = dtype
    fields = json.loads(config.to_json_string())
    fields.pop("transformers_weights", None)  # names the file that was loaded; the export has other files
    file = folder / "config.json"
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    return file


def copy_companions(source: Path, folder: Path, *, has_code: bool) -> list[Path]:
    """Copy the companions byte for byte: transformers would refuse to write what some published ones contain."""
    code = sorted(file.name for file in source.glob("*.py")) if has_code else []
    there = [name for name in (*COMPANIONS, *code) if (source / name).is_file()]
    return [Path(shutil.copyfile(source / name, folder / name)) for name in there]
