"""Full parameters of a sharded module: one at a time for the weight sync, all of them for an export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PretrainedConfig

#: The wrapper's attribute that holds the transformers model.
PREFIX = "model."


class ParamSpec(NamedTuple):
    """What one full parameter will look like."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def param_specs(module: nn.Module, dtype: torch.dtype) -> list[ParamSpec]:
    """Names as transformers has them, in the order of ``iter_full_params``; tied parameters once."""
    return [
        ParamSpec(
            name.removeprefix(PREFIX), dtype if parameter.is_floating_point() else parameter.dtype, (*parameter.shape,)
        )
        for name, parameter in module.named_parameters()
    ]


def iter_full_params(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields ``(name, full tensor)`` in a fixed order on every rank; tied parameters once.

    Shards are cast first and gathered second, so that half the bytes travel. Every rank must run the iterator to its
    end: each item is a collective.
    """
    for name, parameter in module.named_parameters():
        shard = parameter.detach()
        if shard.is_floating_point():
            shard = shard.to(dtype)
        yield name.removeprefix(PREFIX), shard.full_tensor() if isinstance(shard, DTensor) else shard


def export_hf(
    module: nn.Module, config: PretrainedConfig, folder: Path, dtype: torch.dtype, max_shard: str = "5GB"
) -> None:
    """Writes a folder that transformers and vLLM load: ``config.json`` and safetensors.

    Every rank takes part in gathering; rank 0 keeps the tensors and writes. Tokenizer files are the caller's.

    Args:
        module: the sharded module.
        config: of the transformers model, with what ``override_config`` changed in it.
        folder: created if missing.
        dtype: of the written tensors.
        max_shard: largest file.
    """
    writes = dist.get_rank() == 0
    tensors = {}
    for name, tensor in iter_full_params(module, dtype):
        if writes:
            tensors[name] = tensor.to("cpu", copy=True).contiguous()
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        config.dtype = dtype
        config.save_pretrained(folder)
        if Path(config.name_or_path, "generation_config.json").is_file():
            GenerationConfig.from_pretrained(config.name_or_path).save_pretrained(folder)
        plan = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard)
        for file, names in plan.filename_to_tensors.items():
            save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    dist.barrier()
