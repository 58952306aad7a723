"""The full tensors of a sharded module as its checkpoint has them: one at a time for the sync, all for an export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from hrl.models.checkpoint_form import CheckpointForm, saved_tensors

#: The wrapper's attribute that holds the transformers model.
PREFIX = "model."
#: What a model's folder says of its use beside `config.json`: training changes nothing of it.
COMPANIONS = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


class ParamSpec(NamedTuple):
    """What one tensor of the checkpoint will look like."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def param_specs(
    module: nn.Module, form: CheckpointForm, dtype: torch.dtype, *, skip: Collection[str] = ()
) -> list[ParamSpec]:
    """Names as the checkpoint has them, in the order of `iter_full_params`; tied parameters once."""
    return [
        ParamSpec(piece.name, _outgoing_dtype(tensor, dtype), piece.shape)
        for name, tensor in saved_tensors(module)
        if name not in skip
        for piece in form.pieces(name.removeprefix(PREFIX))
    ]


def iter_full_params(
    module: nn.Module, form: CheckpointForm, dtype: torch.dtype, device: torch.device, *, skip: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield `(name, full tensor)` as the checkpoint has them, in a fixed order on every rank; tied parameters once.

    Shards are cast first and gathered second, so that half the bytes travel. A shard that lies in host memory comes to
    the device by itself, and goes with its turn. Every rank must run the iterator to its end: it gathers.

    Args:
        module: The sharded module.
        form: The checkpoint's.
        dtype: Of what is yielded; buffers keep theirs, which their model chose for a reason.
        device: Where tensors are gathered.
        skip: Names in memory of what is left out.
    """
    for name, tensor in saved_tensors(module):
        if name in skip:
            continue
        shard = tensor.detach().to(device=device, dtype=_outgoing_dtype(tensor, dtype))
        full = shard.full_tensor() if isinstance(shard, DTensor) else shard
        yield from form.split(name.removeprefix(PREFIX), full)


def _outgoing_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else tensor.dtype


def export_hf(
    tensors: Iterable[tuple[str, Tensor]],
    config: PretrainedConfig,
    folder: Path,
    dtype: torch.dtype,
    max_shard: str = "5GB",
) -> None:
    """Write a folder that transformers and vLLM load: `config.json`, its companions and safetensors.

    Every rank takes part in gathering; rank 0 keeps the tensors and writes. Tokenizer files are the caller's.

    Args:
        tensors: From `iter_full_params`.
        config: Of the transformers model, with what `override_config` changed in it.
        folder: Created if missing.
        dtype: Of the tensors, for `config.json`.
        max_shard: Largest file.
    """
    writes = dist.get_rank() == 0
    kept = {}
    for name, tensor in tensors:
        if writes:
            kept[name] = tensor.to("cpu", copy=True).contiguous()
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(config, dtype, folder)
        _copy_companions(Path(config.name_or_path), folder, has_code=bool(getattr(config, "auto_map", None)))
        plan = split_torch_state_dict_into_shards(kept, max_shard_size=max_shard)
        for file, names in plan.filename_to_tensors.items():
            save_file({name: kept[name] for name in names}, folder / file, metadata={"format": "pt"})
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    dist.barrier()


def _write_config(config: PretrainedConfig, dtype: torch.dtype, folder: Path) -> None:
    """Write `config.json`, whatever stands in it.

    `save_pretrained` is stricter than `from_pretrained`: a folder that loads and trains could not be exported, for
    instance because its `config.json` sets a temperature, as many published ones do.
    """
    config.dtype = dtype
    fields = json.loads(config.to_json_string())
    fields.pop("transformers_weights", None)  # the name of the file that was loaded; the export has other files
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _copy_companions(source: Path, folder: Path, *, has_code: bool) -> None:
    """Copy them byte for byte: to read and write them again would refuse what some published ones say."""
    code = sorted(file.name for file in source.glob("*.py")) if has_code else []
    for name in (*COMPANIONS, *code):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
