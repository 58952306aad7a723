"""FSDP2: one mesh, one wrapped unit per decoder layer, weights that only rank 0 reads from disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from hrl.models.loading import Loaded, dtype_of
from hrl.models.towers import freeze, frozen_modules, unreachable_parameters


def build_mesh(device: torch.device, fsdp_size: int) -> DeviceMesh:
    """Return the mesh of the whole world.

    Args:
        device: Of this rank.
        fsdp_size: Ranks that share one sharded copy; -1 is all of them. Fewer than all gives replicas of shards (HSDP).

    Raises:
        ValueError: `fsdp_size` does not divide the world size.
    """
    world = dist.get_world_size()
    if fsdp_size in (-1, world):
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    if fsdp_size < 1 or world % fsdp_size:
        raise ValueError(f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world} ranks of the pool")
    return init_device_mesh(device.type, (world // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard"))


def keeps_cast_parameters(num_ranks: int, device: torch.device, reshard_after_forward: bool) -> bool:
    """Return whether the parameters' copies in the compute dtype stay from one forward to the next.

    With several ranks they are gathered from the others, and to keep them would be to hold the whole model. A rank of
    its own only casts. On a CPU that takes as long as it takes to read the weights, and memory is there; a GPU casts
    in no time, and the copies are half as large as float32 masters.
    """
    return num_ranks == 1 and (device.type == "cpu" or not reshard_after_forward)


def build_sharded(
    load: Callable[[bool], Loaded],
    wrap: Callable[[Any], nn.Module],
    fsdp: Any,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    train: bool,
) -> tuple[nn.Module, Loaded]:
    """Load, wraps and shards a model.

    In a world of several ranks only rank 0 reads the weights; every rank, rank 0 too, builds the structure without
    storage, shards it and receives its shards. So only rank 0 ever holds a whole model, and no device does.

    Args:
        load: `load(meta)` gives the model, with or without storage.
        wrap: From the transformers model to the module whose `forward` is run.
        fsdp: `dtype`, `reshard_after_forward`.
        mesh: From `build_mesh`.
        device: Of this rank.
        train: Freeze what cannot be trained, see `hrl.models.towers`.

    Returns:
        The sharded module, and rank 0's loading record (the structure's on other ranks).
    """
    if mesh.size() == 1:
        loaded = load(False)
        if train:
            freeze(loaded.model, unreachable_parameters(loaded.model))
        module = wrap(loaded.model)
        _shard(module, loaded, fsdp, mesh)
        return module.to(device), loaded
    full = load(False) if dist.get_rank() == 0 else None
    loaded = load(True)
    if train:
        freeze(loaded.model, _broadcast_object(() if full is None else unreachable_parameters(full.model)))
    module = wrap(loaded.model)
    _shard(module, loaded, fsdp, mesh)
    tied = _tied_names(module)
    module.to_empty(device=device)
    _tie(module, tied)
    source = {} if full is None else wrap(full.model).state_dict()
    set_model_state_dict(module, source, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    _tie(module, tied)
    _broadcast_buffers(module, full if full is None else wrap(full.model))
    _broadcast_conversions(loaded.model, full if full is None else full.model)
    return module, loaded if full is None else Loaded(loaded.model, full.source_config, full.fresh_head)


def _shard(module: nn.Module, loaded: Loaded, fsdp: Any, mesh: DeviceMesh) -> None:
    compute = dtype_of(fsdp.dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=torch.float64 if compute == torch.float64 else torch.float32,
        cast_forward_inputs=False,
    )
    device = torch.device(mesh.device_type)
    reshard = fsdp.reshard_after_forward and not keeps_cast_parameters(mesh.size(), device, fsdp.reshard_after_forward)
    layer_names = set(loaded.model._no_split_modules or ())
    layers = [m for m in module.modules() if type(m).__name__ in layer_names]
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for end, keeps in _vocabulary_modules(loaded.model):
        fully_shard(end, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard and not keeps)
    for tower in () if not any(p.requires_grad for p in module.parameters()) else frozen_modules(module):
        if not isinstance(tower, FSDPModule):  # never run, and so never gathered, apart from the root
            fully_shard(tower, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if mesh.size() > 1:
        # Losses are divided by global counts, so that gradients add up over ranks. Gloo has no scaled sum.
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.set_force_sum_reduction_for_comms(True)
                unit.set_gradient_divide_factor(1.0)


def _vocabulary_modules(model: PreTrainedModel) -> list[tuple[nn.Module, bool]]:
    """Embedding and head, and whether each is wanted again right after its forward.

    They are a model's largest matrices. In the root's unit both would be whole from the first layer to the last; on
    their own they are whole while they run, the head until its backward, which comes next. A matrix that both share
    belongs to one unit and is wanted at both ends, so it stays with the root.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        return [(embedding, False)]
    return [] if head.weight is embedding.weight else [(embedding, False), (head, True)]


def _tied_names(module: nn.Module) -> list[tuple[str, str]]:
    """`(name, name of the first holder)` of parameters that are another one's."""
    first: dict[int, str] = {}
    tied = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holder = first.setdefault(id(parameter), name)
        if holder != name:
            tied.append((name, holder))
    return tied


def _tie(module: nn.Module, tied: list[tuple[str, str]]) -> None:
    """Make them one parameter again: giving storage to a module gives it to each holder separately."""
    for name, holder in tied:
        parent, _, leaf = name.rpartition(".")
        module.get_submodule(parent)._parameters[leaf] = module.get_parameter(holder)


def _broadcast_buffers(module: nn.Module, source: nn.Module | None) -> None:
    """Rank 0's buffers to all; those that no checkpoint holds (rotary frequencies) exist nowhere else."""
    values = {} if source is None else dict(source.named_buffers())
    for name, buffer in module.named_buffers():
        if source is not None:
            buffer.copy_(values[name])
        dist.broadcast(buffer, src=0)


def _broadcast_conversions(model: PreTrainedModel, source: PreTrainedModel | None) -> None:
    """What transformers converted when it read rank 0's weights: a model without weights does not know."""
    model._weight_conversions = _broadcast_object(None if source is None else source._weight_conversions)


def _broadcast_object(value: Any) -> Any:
    """Rank 0's."""
    record = [value]
    dist.broadcast_object_list(record, src=0)
    return record[0]
