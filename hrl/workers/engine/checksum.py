"""A checksum of a model's weights: the same on any number of ranks, and another if a single bit of them is.

Bits flip in faulty memory, ranks that hold copies drift apart, and a checkpoint may come back in the wrong order; none
of these raises an error by itself. The checksum has two parts:

- the words of every tensor, added modulo 2^32 and multiplied by an odd number of the tensor's own. A flipped bit
  changes this sum, and so do tensors that change places;
- one element of `STRIDE`, mixed with its place in the whole tensor, which rows that change places move.

Both are sums over the elements, so the sums of the ranks add up to that of the whole model, however it is sharded. They
read memory as fast as it can be read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hrl.errors import HrlError
from hrl.workers.engine.host_memory import local
from hrl.workers.engine.update_rule import Place, place_of

#: One element of so many goes in with its place; a prime, so that it meets every column of a matrix.
STRIDE = 1021
#: Bits of the two parts, 52 together: JSON keeps whole numbers below 2^53.
_SUM_BITS, _PLACE_BITS = 32, 20
_FACTORS = 0x2545F4914F6CDD1D, 0x1E3779B97F4A7C15  # any large odd numbers
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class WeightsDifferError(HrlError, RuntimeError):
    """Weights are not what they have to be: they changed between two updates, or in a copy, or on their way to disk."""


@dataclass(frozen=True)
class Checksums:
    """Of one rank's part of a model.

    Attributes:
        names: Of the parameters.
        is_copy: For each, whether every rank has all of it.
        parts: Both parts of each.
    """

    names: tuple[str, ...]
    is_copy: tuple[bool, ...]
    parts: tuple[tuple[int, int], ...]

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Module, places: Mapping[str, Place]) -> Checksums:
        """Read this rank's part of weights, and wait for the sums once.

        Args:
            module: The sharded module.
            places: Which parameters; see `places_of`, which is called once because it takes longer than the sums.
        """
        named = {name: parameter for name, parameter in module.named_parameters() if name in places}
        found = torch.stack([_parts(name, parameter, places[name]) for name, parameter in named.items()]).tolist()
        alone = dist.get_world_size() == 1
        is_copy = tuple(not alone and not isinstance(parameter, DTensor) for parameter in named.values())
        return cls(tuple(named), is_copy, tuple(map(tuple, found)))

    def differ(self, other: Checksums) -> list[str]:
        """Return the names of the parameters whose checksums differ."""
        return [name for name, mine, theirs in zip(self.names, self.parts, other.parts, strict=True) if mine != theirs]

    def combined(self) -> tuple[int, int]:
        """Return the checksum of the shards, and that of the copies."""
        told = list(zip(self.parts, self.is_copy, strict=True))
        return _number(p for p, is_copy in told if not is_copy), _number(p for p, is_copy in told if is_copy)


def places_of(module: nn.Module) -> dict[str, Place]:
    """Return, by name, where this rank's share of a parameter lies in the whole parameter."""
    return {name: place_of(parameter) for name, parameter in module.named_parameters()}


def whole_checksum(mine: Checksums, mesh: DeviceMesh) -> int:
    """Return the checksum of the whole model, after comparing the ranks that hold copies of the same weights.

    Every rank calls it. One small collective.

    Args:
        mine: Of this rank.
        mesh: On which the model is sharded, and replicated if it has two dimensions.

    Raises:
        WeightsDifferError: Ranks have different copies; names them and the parameters.
    """
    shards, copies = mine.combined()
    if mesh.size() == 1:
        return shards
    ranks = mesh.mesh.view(-1, mesh.mesh.shape[-1]).tolist()  # a row of ranks has the whole model
    gathered = of_all_ranks(torch.tensor([shards, copies], device=mesh.device_type))
    of_shards = [[gathered[rank][0] for rank in row] for row in ranks]
    of_copies = {gathered[rank][1] for row in ranks for rank in row}
    if any(row != of_shards[0] for row in of_shards) or len(of_copies) > 1:
        _raise_difference(mine, mesh, ranks)
    return _number((number >> _PLACE_BITS, number) for number in (*of_shards[0], *of_copies))


def checksum_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Return the checksum of whole tensors, that of a module whose parameters they are; needs no process group.

    Args:
        tensors: Name and tensor of each, which is read before the next one is asked for.
    """
    return _number(tuple(_parts(name, each, place_of(nn.Parameter(each, False))).tolist()) for name, each in tensors)


def _raise_difference(mine: Checksums, mesh: DeviceMesh, ranks: Sequence[Sequence[int]]) -> NoReturn:
    """Name the ranks and the parameters; every rank knows the same."""
    all_parts = of_all_ranks(torch.tensor(mine.parts, device=mesh.device_type))
    found = []
    for index, (name, is_copy) in enumerate(zip(mine.names, mine.is_copy, strict=True)):
        holders = (
            [[rank for row in ranks for rank in row]]
            if is_copy
            else [list(group) for group in zip(*ranks, strict=True)]
        )
        for group in holders:
            sums = {rank: all_parts[rank][index] for rank in group}
            values = list(sums.values())
            usual = max(values, key=values.count)
            odd = [rank for rank in group if sums[rank] != usual]
            # With two copies nobody can tell which is right.
            found += [(name, odd if values.count(usual) > len(odd) else group)] if odd else []
    name, odd = found[0]
    who = (
        f"rank {odd[0]} has another copy"
        if len(odd) == 1
        else f"ranks {', '.join(map(str, odd))} have different copies"
    )
    raise WeightsDifferError(
        f"{who} of weights that should be the same: {len(found)} parameter(s), first {name}. Memory of a machine, or "
        "the network between machines, is faulty. Nothing was saved since; the same command continues from the newest "
        "checkpoint, better without that machine"
    )


def of_all_ranks(mine: Tensor) -> list[Any]:
    """Return the numbers of every rank; every rank calls it, with as many."""
    table = mine.new_zeros((dist.get_world_size(), *mine.shape))
    table[dist.get_rank()] = mine
    if len(table) > 1:
        dist.all_reduce(table)
    found: list[Any] = table.tolist()
    return found


def _parts(name: str, parameter: nn.Parameter, place: Place) -> Tensor:
    """Return both parts of this rank's share of a parameter, `(2,)` int64."""
    mine = local(parameter.detach())
    words = mine.contiguous().view(-1).view(_WORDS[min(mine.element_size(), 4)])
    words_each = mine.element_size() // words.element_size()
    bits = 8 * words.element_size()
    # In the words' own width, which is quickest. It wraps; narrow words count for the upper bits, so that the sums of
    # ranks still add up to that of the whole tensor.
    total = words.sum(dtype=words.dtype).long() << (_SUM_BITS - bits)
    if place.is_run:
        skipped = -place.first % STRIDE
        chosen = words[skipped * words_each :: STRIDE * words_each].long()
        places = torch.arange(len(chosen), device=mine.device) * STRIDE + (place.first + skipped)
    else:
        places, at = _chosen_of_block(mine, place)
        chosen = words[at * words_each].long()
    placed = ((chosen ^ (places * _FACTORS[1])) * _FACTORS[0] >> 32).sum()
    return torch.stack([total, placed]) * _factor(name)


def _chosen_of_block(mine: Tensor, place: Place) -> tuple[Tensor, Tensor]:
    """Return the places in the whole matrix that go in, and where in the block `(r, c)` of it they are, `(n,)` each."""
    begins = torch.arange(len(mine), device=mine.device) * place.width + place.first
    steps = torch.arange(-(-place.columns // STRIDE), device=mine.device) * STRIDE
    columns = (-begins % STRIDE)[:, None] + steps
    rows, which = torch.nonzero(columns < place.columns, as_tuple=True)
    inside = columns[rows, which]
    return begins[rows] + inside, rows * place.columns + inside


@cache
def _factor(name: str) -> int:
    """Return an odd number that belongs to a name."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 2 | 1


def _number(parts: Iterable[tuple[int, int]]) -> int:
    """Return the sums of both parts as one number."""
    total = placed = 0
    for one, other in parts:
        total, placed = total + one, placed + other
    return (total % (1 << _SUM_BITS)) << _PLACE_BITS | placed % (1 << _PLACE_BITS)
