"""FSDP2: one unit per decoder layer, weights that only rank 0 reads from disk; and the cut over tensor groups under it.

Without tensor groups there is one mesh, over which every parameter is sharded. With them a parameter that is cut lies
on a mesh with one dimension more: its part is sharded over the ranks that have the same part. What is not cut is
sharded over all ranks as ever. So each element of a model is on one rank of a sharded copy, whichever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hrl.models.dtypes import dtype_of
from hrl.models.loading import Loaded, decoder_layers
from hrl.models.ops.exchange import SequenceGroup
from hrl.models.ops.tensor_parallel import WeightGroup
from hrl.models.packed_model import PackedModel
from hrl.models.tensor_parallel import TensorParallelError, are_equal_shards
from hrl.models.towers import freeze, frozen_modules, unreachable_parameters
from hrl.workers.engine.casts import keeps_cast_parameters

if TYPE_CHECKING:
    from hrl.config.model import ForwardShardingConfig, FsdpConfig


def build_mesh(device: torch.device, fsdp_size: int) -> DeviceMesh:
    """Return the mesh of the whole world.

    Args:
        device: Of this rank.
        fsdp_size: Ranks that share one sharded copy; -1 is all. Fewer than all gives replicas of shards (HSDP).

    Raises:
        ValueError: `fsdp_size` does not divide the world size.
    """
    world = dist.get_world_size()
    if fsdp_size in (-1, world):
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    if fsdp_size < 1 or world % fsdp_size:
        raise ValueError(f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world} ranks of the pool")
    return init_device_mesh(device.type, (world // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard"))


@dataclass(frozen=True)
class WeightMesh:
    """Where the parameters lie that are cut: by tensor groups, or experts that are shared out.

    Attributes:
        group: Consecutive ranks with the parts of one weight.
        shards: Mesh of the ranks with the same part, over which FSDP2 shards it; of two dimensions with replicas.
        of_experts: Whether experts alone are cut, and ranks have rows of their own.
    """

    group: WeightGroup
    shards: DeviceMesh
    of_experts: bool


def build_weight_mesh(device: torch.device, fsdp_size: int, tensor: int, experts: int) -> WeightMesh | None:
    """Return the mesh of the parameters that are cut over several ranks; None where nothing is cut.

    Args:
        device: Of this rank.
        fsdp_size: Ranks that share one copy, cut and sharded; see `build_mesh`, which has checked it.
        tensor: Ranks of a tensor group.
        experts: Ranks to which experts are shared out; at most one of the two is above 1.

    Raises:
        ValueError: It does not divide the number of ranks that share a copy, or both are above 1.
    """
    if tensor == experts == 1:
        return None
    if tensor > 1 and experts > 1:
        raise ValueError("fsdp_config.tensor_parallel_size and expert_parallel_size are both above 1")
    degree, key = max(tensor, experts), "tensor_parallel_size" if tensor > 1 else "expert_parallel_size"
    world = dist.get_world_size()
    copy = world if fsdp_size == -1 else fsdp_size
    if copy % degree:
        raise ValueError(f"fsdp_config.{key}={degree} does not divide the {copy} ranks that share a copy of the model")
    shape, names = (world // copy, copy // degree, degree), ("replicate", "shard", "cut")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    shards = mesh[("replicate", "shard") if copy < world else "shard"]
    return WeightMesh(WeightGroup.of(mesh["cut"]), shards, experts > 1)


def build_sequence_group(device: torch.device, degree: int) -> SequenceGroup | None:
    """Return the consecutive ranks that run the same rows as this one; None where each runs rows of its own.

    It has nothing to do with the mesh over which parameters are sharded, and gradients summed: that is of all ranks.

    Args:
        device: Of this rank.
        degree: Ranks of a group.

    Raises:
        ValueError: `degree` does not divide the world size.
    """
    if degree == 1:
        return None
    world = dist.get_world_size()
    if degree < 1 or world % degree:
        raise ValueError(
            f"fsdp_config.ulysses_sequence_parallel_size={degree} does not divide the {world} ranks of the pool"
        )
    mesh = init_device_mesh(device.type, (world // degree, degree), mesh_dim_names=("data", "sequence"))
    of_rows = mesh["sequence"]
    return SequenceGroup(of_rows.get_group(), degree, of_rows.get_local_rank())


def offload_policy(fsdp: FsdpConfig | ForwardShardingConfig, device: torch.device) -> CPUOffloadPolicy | None:
    """Return how FSDP2 keeps weights and gradients in host memory; None where they are on the device."""
    return CPUOffloadPolicy(pin_memory=True) if fsdp.offload_policy and device.type != "cpu" else None


def build_sharded(
    load: Callable[[bool], Loaded],
    wrap: Callable[[PreTrainedModel], PackedModel],
    fsdp: FsdpConfig | ForwardShardingConfig,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    train: bool,
    freezes: Callable[[PreTrainedModel], Collection[str]] = unreachable_parameters,
    adapt: Callable[[PreTrainedModel], None] | None = None,
    weight_mesh: WeightMesh | None = None,
    policy: CPUOffloadPolicy | None = None,
) -> tuple[PackedModel, Loaded]:
    """Load, wrap and shard a model.

    With several ranks only rank 0 reads the weights. Every rank builds the structure without storage, shards it and
    receives its shards. So only rank 0 ever holds a whole model, and no GPU does.

    Args:
        load: `load(meta)` returns the model, without storage if `meta`.
        wrap: Turns the transformers model into the module whose `forward` runs.
        fsdp: `dtype` and `reshard_after_forward`.
        mesh: From `build_mesh`.
        device: Of this rank.
        train: Freeze what is not trained.
        freezes: Returns the names of what is not; by default what text does not reach, see `hrl.models.towers`.
        adapt: Puts an adapter into a model.
        weight_mesh: From `build_weight_mesh`.
        policy: From `offload_policy`: then the shards are in host memory, and only buffers are on the device.

    Returns:
        The sharded module, and how it was loaded on rank 0 (on other ranks, how its structure was).

    Raises:
        TensorParallelError: The model can't be cut or shared out so.
    """
    if mesh.size() == 1:
        loaded = load(False)
        loaded, towers = _frozen(loaded, freezes(loaded.model) if train else ())
        if adapt is not None:
            adapt(loaded.model)
        module = wrap(loaded.model)
        _shard(module, loaded, fsdp, mesh, towers, policy)
        if policy is None:
            return module.to(device), loaded
        _move_buffers(module, device)
        return module, loaded
    full = load(False) if dist.get_rank() == 0 else None
    loaded = load(True)
    untrained = () if full is None or not train else freezes(full.model)
    loaded, towers = _frozen(loaded, _broadcast_object(untrained))
    if adapt is not None:
        adapt(loaded.model)
        if full is not None:
            adapt(full.model)
    module = wrap(loaded.model)
    if weight_mesh is not None:
        share = module.share_out_experts if weight_mesh.of_experts else module.cut
        share(weight_mesh.group)
        _require_equal_shards(module, weight_mesh)
    _shard(module, loaded, fsdp, mesh, towers, policy, weight_mesh)
    tied = _tied_names(module)
    module.to_empty(device=device if policy is None else torch.device("cpu"))
    _tie(module, tied)
    whole = None if full is None else wrap(full.model)
    weights = {} if whole is None else whole.state_dict()
    set_model_state_dict(module, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    _tie(module, tied)
    _broadcast_buffers(module, whole)
    if policy is not None:
        _move_buffers(module, device)
    # What transformers converted when rank 0 read the weights, all ranks convert back.
    loaded.model._weight_conversions = _broadcast_object(None if full is None else full.model._weight_conversions)
    return module, loaded if full is None else replace(full, model=loaded.model, out_of_reach=loaded.out_of_reach)


def _require_equal_shards(module: nn.Module, weights: WeightMesh) -> None:
    """Check that the parts of a weight are sharded in pieces of one size, see `are_equal_shards`.

    Raises:
        TensorParallelError: They are not.
    """
    ranks, degree = weights.shards.size(weights.shards.ndim - 1), weights.group.size
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor) or not parameter.placements[0].is_shard(0):
            continue
        rows = len(parameter)
        if not are_equal_shards(rows, degree, ranks):
            raise TensorParallelError(
                f"the {rows} rows of {name} can't be shared by {degree} processes whose parts lie on {ranks} each",
                "Set it to 1, or fsdp_config.fsdp_size to twice the size of a group.",
            )


def _frozen(loaded: Loaded, names: Collection[str]) -> tuple[Loaded, list[nn.Module]]:
    """Freeze these parameters; return how the model was loaded, and the modules that train nothing."""
    freeze(loaded.model, names)
    reached = any(parameter.requires_grad for parameter in loaded.model.parameters())
    # An adapter freezes most modules later, but these run.
    return replace(loaded, out_of_reach=frozenset(names)), list(frozen_modules(loaded.model)) if reached else []


def _shard(
    module: nn.Module,
    loaded: Loaded,
    fsdp: FsdpConfig | ForwardShardingConfig,
    mesh: DeviceMesh,
    towers: Sequence[nn.Module] = (),
    offload: CPUOffloadPolicy | None = None,
    weight_mesh: WeightMesh | None = None,
) -> None:
    compute = dtype_of(fsdp.dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=torch.float64 if compute == torch.float64 else torch.float32,
        cast_forward_inputs=False,
    )
    where = OffloadPolicy() if offload is None else offload
    device = torch.device(mesh.device_type)
    reshard = fsdp.reshard_after_forward and not keeps_cast_parameters(mesh.size(), device, fsdp.reshard_after_forward)
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=where)
    if weight_mesh is not None:
        shard = partial(shard, mesh=weight_mesh.shards, shard_placement_fn=_placed_on(mesh))
    layers = decoder_layers(loaded.model)
    for layer in layers:
        shard(layer, reshard_after_forward=reshard)
    for end, keeps in _vocabulary_modules(loaded.model):
        shard(end, reshard_after_forward=reshard and not keeps)
    of_layers = {part for layer in layers for part in layer.modules()}
    for tower in towers:
        # A unit of its own, since one that never runs is never gathered. A layer's frozen parts run with the layer.
        if tower not in of_layers and not isinstance(tower, FSDPModule):
            shard(tower, reshard_after_forward=reshard)
    shard(module, reshard_after_forward=False)
    if mesh.size() > 1:
        # Losses are divided by global counts, so gradients are summed over ranks. Gloo has no scaled sum.
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.set_force_sum_reduction_for_comms(True)
                unit.set_gradient_divide_factor(1.0)


def _placed_on(mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Return where FSDP2 shards a parameter: on this mesh what is not cut, on the unit's own mesh what is.

    Raises:
        TensorParallelError: This torch has one mesh for all parameters of a unit.
    """
    placement = getattr(_fsdp_common, "ShardPlacementResult", None)
    if placement is None:
        raise TensorParallelError(
            f"torch {torch.__version__} shards all weights of a layer over the same processes; 2.12 is the first that "
            "need not"
        )
    of_all = _fsdp_common.FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else _fsdp_common.HSDPMeshInfo(mesh, 1, 0)
    return lambda parameter: None if isinstance(parameter, DTensor) else placement(None, of_all)


def _vocabulary_modules(model: PreTrainedModel) -> list[tuple[nn.Module, bool]]:
    """Return embedding and head, each with whether it is needed again right after its forward."""
    # They are a model's largest matrices. In the root's unit both would be whole from the first layer to the last. As
    # units of their own they are whole only while they run, the head until its backward, which comes next. A matrix
    # that both share is needed at both ends and stays with the root.
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        return [(embedding, False)]
    return [] if head.weight is embedding.weight else [(embedding, False), (head, True)]


def _tied_names(module: nn.Module) -> list[tuple[str, str]]:
    """Return `(name, first name)` of parameters that are registered under several names."""
    first: dict[int, str] = {}
    tied = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holder = first.setdefault(id(parameter), name)
        if holder != name:
            tied.append((name, holder))
    return tied


def _tie(module: nn.Module, tied: list[tuple[str, str]]) -> None:
    """Make them one parameter again, after `to_empty` has given each its own storage."""
    for name, holder in tied:
        parent, _, leaf = name.rpartition(".")
        module.get_submodule(parent)._parameters[leaf] = module.get_parameter(holder)


def _broadcast_buffers(module: nn.Module, source: nn.Module | None) -> None:
    """Send rank 0's buffers to all ranks. Those that no checkpoint holds (rotary frequencies) exist nowhere else."""
    values = {} if source is None else dict(source.named_buffers())
    for name, buffer in module.named_buffers():
        if source is not None:
            buffer.copy_(values[name])
        dist.broadcast(buffer, src=0)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(device)


def _broadcast_object(value: Any) -> Any:
    """Return rank 0's `value` on every rank."""
    record = [value]
    dist.broadcast_object_list(record, src=0)
    return record[0]
