"""The full tensors of a sharded module in its checkpoint's form: one at a time for the sync, all for an export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from hrl.models.checkpoint_form import CheckpointForm, saved_tensors

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
    module: nn.Module, form: CheckpointForm, dtype: torch.dtype, device: torch.device, *, skip: Collection[str] = ()
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
    """
    for name, tensor in saved_tensors(module):
        if name in skip:
            continue
        # Cast first and gathered second, so that half the bytes travel.
        shard = tensor.detach().to(device=device, dtype=_outgoing_dtype(tensor, dtype))
        full = shard.full_tensor() if isinstance(shard, DTensor) else shard
        yield from form.split(name.removeprefix(PREFIX), full)
        del shard, full  # before the next one is gathered


def _outgoing_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else tensor.dtype


def export_hf(
    tensors: Iterable[tuple[str, Tensor]], config: PretrainedConfig, folder: Path, dtype: torch.dtype
) -> None:
    """Write a folder that transformers and vLLM load: `config.json`, its companions and safetensors of at most 5 GB.

    Every rank takes part in gathering; rank 0 keeps the tensors and writes. Tokenizer files are left to the caller.

    Args:
        tensors: From `iter_full_params`.
        config: Of the transformers model, with `override_config` applied.
        folder: Created if missing.
        dtype: Of the tensors, for `config.json`.
    """
    writes = dist.get_rank() == 0
    kept = {}
    for name, tensor in tensors:
        if writes:
            kept[name] = tensor.to("cpu", copy=True)
        del tensor  # before the next one is gathered
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        write_config(config, dtype, folder)
        copy_companions(Path(config.name_or_path), folder, has_code=bool(getattr(config, "auto_map", None)))
        save_torch_state_dict(kept, folder)
    dist.barrier()


def describe_classifier(config: PretrainedConfig, model: nn.Module, pad_token_id: int) -> None:
    """Have a configuration name the classifier with one label that a model with a scalar head is."""
    config.architectures = [type(model).__name__]
    config.num_labels = 1
    config.pad_token_id = pad_token_id


def write_config(config: PretrainedConfig, dtype: torch.dtype, folder: Path) -> None:
    """Write `config.json`, even one that transformers would refuse to write."""
    # `save_pretrained` is stricter than `from_pretrained`. It refuses, for instance, a `config.json` that sets a
    # temperature, as many published ones do.
    config.dtype = dtype
    fields = json.loads(config.to_json_string())
    fields.pop("transformers_weights", None)  # names the file that was loaded; the export has other files
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def copy_companions(source: Path, folder: Path, *, has_code: bool) -> None:
    """Copy the companions byte for byte: transformers would refuse to write what some published ones contain."""
    code = sorted(file.name for file in source.glob("*.py")) if has_code else []
    for name in (*COMPANIONS, *code):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
