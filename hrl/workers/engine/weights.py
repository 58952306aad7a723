"""The full tensors of a sharded module in its checkpoint's form: one at a time for the sync, all for an export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PretrainedConfig

from hrl.errors import system_error
from hrl.files import naming
from hrl.models.adapter import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapted_layers,
    merged,
    name_in_file,
    parts_of,
    plain_config,
    scaling_of,
)
from hrl.models.checkpoint_form import CheckpointForm, saved_tensors
from hrl.models.four_bit import dequantised, layers_in_4bit
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


class Merge(NamedTuple):
    """What is added to a weight: `scaling · B A`."""

    a: Tensor
    b: Tensor
    scaling: float


def merges_of(module: nn.Module) -> dict[str, Merge]:
    """Return what an adapter adds to which weights, by their names in memory."""
    parameters, found = dict(module.named_parameters()), dict[str, Merge]()
    for layer_name, layer in adapted_layers(module).items():
        name = f"{layer_name}.base_layer.weight"
        a, b = parts_of(name) or ("", "")
        found[name] = Merge(parameters[a], parameters[b], scaling_of(layer))
    return found


def _held_in_4bit(module: nn.Module) -> dict[str, int]:
    """Return the names in memory of weights that are held in 4 bits, and how many inputs their layers have."""
    return {name: layer.in_features for name, layer in layers_in_4bit(module)}


def iter_trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of what is trained; tied parameters once."""
    yield from ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def param_specs(
    module: nn.Module, form: CheckpointForm, dtype: torch.dtype, *, skip: Collection[str] = ()
) -> list[ParamSpec]:
    """Return what `iter_full_params` will yield, in its order."""
    packed = _held_in_4bit(module)
    return [
        ParamSpec(piece.name, dtype if name in packed else _outgoing_dtype(tensor, dtype), piece.shape)
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
    merges: Mapping[str, Merge] | None = None,
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
        merges: What is added to which of the weights.
    """
    packed = _held_in_4bit(module)
    for name, tensor in saved_tensors(module):
        if name in skip:
            continue
        merge = (merges or {}).get(name)
        if merge is not None or name in packed:
            full = _gathered(tensor, tensor.dtype, device)
            if name in packed:
                full = dequantised(full, packed[name], dtype if merge is None else torch.float32)
            if merge is not None:
                a, b = (_gathered(part, part.dtype, device) for part in (merge.a, merge.b))
                full = merged(full, a, b, merge.scaling, dtype if name in packed else _outgoing_dtype(tensor, dtype))
                del a, b
            yield from form.split(name.removeprefix(PREFIX), full)
            del full
            continue
        # Cast first and gathered second, so that half the bytes travel.
        is_whole = not isinstance(tensor, DTensor) or tensor.device_mesh.size() == 1
        outgoing = tensor.dtype if cast_by_reader and is_whole else _outgoing_dtype(tensor, dtype)
        full = _gathered(tensor, outgoing, device)
        yield from form.split(name.removeprefix(PREFIX), full)
        del full  # before the next one is gathered


def _gathered(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Offloaded shards are moved before they are cast: a GPU casts in no time, and one call for both would have the
    # host cast into pageable memory, from which copies are slow. The next use of the stream waits for the copy.
    shard = tensor.detach().to(device, non_blocking=True).to(dtype)
    return whole(shard) if isinstance(shard, DTensor) else shard


def whole(tensor: DTensor) -> Tensor:
    """Return the full tensor on every rank."""
    # A dimension of the mesh at a time, the outermost first: within what a tensor group has cut, FSDP2 sharded.
    placements = list(tensor.placements)
    for dim in range(len(placements)):
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


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


@dataclass(frozen=True)
class AdapterToWrite:
    """An adapter in host memory, to be written as a folder that peft and vLLM load.

    Attributes:
        tensors: Copies, by name in the file.
        config: For `adapter_config.json`.
        beside: For the header of the weights: what tells the model that it was trained beside, see `hrl export`.
    """

    tensors: dict[str, Tensor]
    config: Mapping[str, Any]
    beside: Mapping[str, str]

    @classmethod
    def gather(cls, module: nn.Module, device: torch.device, beside: Mapping[str, str]) -> AdapterToWrite | None:
        """Return rank 0's copies of what is trained; None on others, which help to gather."""
        writes, kept = dist.get_rank() == 0, dict[str, Tensor]()
        for name, parameter in iter_trained(module):
            full = _gathered(parameter, parameter.dtype, device)
            if writes:
                kept[name_in_file(name.removeprefix(PREFIX))] = full.to("cpu", copy=True)
        return cls(kept, plain_config(module.model), beside) if writes else None  # type: ignore[arg-type]

    def write(self, folder: Path) -> Iterator[Written]:
        """Write the folder, without tokenizer, and yield the files."""
        folder.mkdir(parents=True, exist_ok=True)
        config, weights = folder / CONFIG_FILE, folder / WEIGHTS_FILE
        config.write_text(json.dumps(self.config, indent=2, sort_keys=True) + "\n")
        try:
            save_file(self.tensors, weights, metadata={"format": "pt", **self.beside})
        except SafetensorError as error:
            told = system_error(error)
            raise error if told is None else naming(told, folder) from error
        finally:
            self.tensors.clear()
        yield from map(Written.by_reading, (config, weights))


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
