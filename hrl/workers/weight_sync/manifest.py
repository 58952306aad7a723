"""What travels in a weight sync, and how its bytes lie: tensors in buckets, every bucket sealed with checksums.

A bucket is one flat run of bytes::

    | piece 0 | pad | piece 1 | pad | ... | seal: magic, version, bucket, checksum 0, checksum 1, ... |

A piece is a whole tensor, unless the tensor is larger than a bucket: then it is cut into pieces that fill buckets of
their own, so that no buffer is larger than a bucket, however large the embedding. `Assembler` joins them again.

The seal travels with the data, so a receiver can tell on its own, whatever the transport, that the bucket is the right
one, of the right version, and that each tensor arrived as it was written.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from hrl.errors import HrlError


class WeightSyncError(HrlError, RuntimeError):
    """Weights did not arrive, or not as they were sent. The message names the tensor, the bucket or the receiver."""


ALIGNMENT_BYTES = 256
"""Tensors start at multiples of this: any dtype can be viewed there, and copies are vectorised."""

_WORD_BYTES = 8
_SEAL_MAGIC = 0x68726C5F73796E63  # "hrl_sync"
_SEAL_WORDS = 3

_ROW_WORDS = 8192
_ROWS_AT_ONCE = 32
_COLUMN_FACTOR = 0x1E3779B97F4A7C15  # any large odd numbers
_ROW_FACTOR = 0x42B2AE3D27D4EB4F


@dataclass(frozen=True)
class TensorSpec:
    """One tensor.

    Attributes:
        name: As transformers (and so the checkpoint) calls it.
        dtype: Name of the torch dtype on the wire, e.g. `"bfloat16"`.
        shape: Of the full tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that `dtype` names."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes of a tensor, mostly all of them, and their place in a bucket.

    Attributes:
        tensor: That they are of.
        start: First byte in the tensor; a multiple of `ALIGNMENT_BYTES`, so that no element is cut.
        offset: First byte in the bucket.
        nbytes: Without padding.
    """

    tensor: TensorSpec
    start: int
    offset: int
    nbytes: int

    @property
    def name(self) -> str:
        """Name of the tensor."""
        return self.tensor.name

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the tensor."""
        return self.nbytes == self.tensor.nbytes

    @property
    def is_last(self) -> bool:
        """Whether the tensor ends here."""
        return self.start + self.nbytes == self.tensor.nbytes

    @property
    def elements(self) -> slice:
        """Where the piece lies in the flattened tensor."""
        size = self.tensor.torch_dtype.itemsize
        return slice(self.start // size, (self.start + self.nbytes) // size)

    def view(self, bucket: Tensor) -> Tensor:
        """Return a view of the bucket's bytes `(nbytes,) uint8`: the tensor, or `(elements,)` of it."""
        flat = bucket[self.offset : self.offset + self.nbytes].view(self.tensor.torch_dtype)
        return flat.view(self.tensor.shape) if self.is_whole else flat

    def words(self, bucket: Tensor) -> Tensor:
        """Return the piece's bytes, padding included, as int64 words."""
        return bucket[self.offset : self.offset + _round_up(self.nbytes, _WORD_BYTES)].view(torch.int64)


@dataclass(frozen=True)
class Bucket:
    """What travels together.

    Attributes:
        pieces: In the order of writing.
        payload_bytes: Bytes before the seal.
    """

    pieces: tuple[Piece, ...]
    payload_bytes: int

    @property
    def nbytes(self) -> int:
        """Payload and seal."""
        return self.payload_bytes + _WORD_BYTES * (_SEAL_WORDS + len(self.pieces))


@dataclass(frozen=True)
class Manifest:
    """Every tensor of the model, in buckets. Equal on both sides and from step to step.

    Attributes:
        buckets: What is sent.
        kept: Names of tensors that are not sent, because no update moves them: the receiver keeps its folder's.
    """

    buckets: tuple[Bucket, ...]
    kept: tuple[str, ...] = ()

    @classmethod
    def build(
        cls,
        specs: Iterable[tuple[str, torch.dtype, Sequence[int]]],
        bucket_bytes: int,
        kept: Iterable[str] = (),
    ) -> Manifest:
        """Lays tensors out in their given order.

        Args:
            specs: (name, dtype, shape) of every tensor, in the order in which the trainer will yield them.
            bucket_bytes: The most that a bucket holds, and at least `ALIGNMENT_BYTES`. A larger tensor is cut.
            kept: Names of what the trainer will not yield.

        Raises:
            WeightSyncError: A name stands twice, or there is no tensor.
        """
        limit = max(bucket_bytes - bucket_bytes % ALIGNMENT_BYTES, ALIGNMENT_BYTES)
        buckets: list[Bucket] = []
        pieces: list[Piece] = []
        seen: set[str] = set()
        end = 0
        for name, dtype, shape in specs:
            if name in seen:
                raise WeightSyncError(f"tensor {name!r} stands twice in the list of weights")
            seen.add(name)
            tensor = TensorSpec(name, str(dtype).removeprefix("torch."), tuple(shape))
            # A tensor without elements is one empty piece.
            for start in range(0, max(tensor.nbytes, 1), limit):
                nbytes = min(tensor.nbytes - start, limit)
                if pieces and (end + nbytes > limit or (tensor.nbytes > limit and start == 0)):
                    buckets.append(Bucket(tuple(pieces), end))
                    pieces, end = [], 0
                pieces.append(Piece(tensor, start, end, nbytes))
                end = _round_up(end + nbytes, ALIGNMENT_BYTES)
        if not pieces:
            raise WeightSyncError("the list of weights is empty")
        buckets.append(Bucket(tuple(pieces), end))
        return cls(tuple(buckets), tuple(kept))

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces in order."""
        return tuple(piece for bucket in self.buckets for piece in bucket.pieces)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors in order."""
        return tuple(piece.tensor for piece in self.pieces if piece.start == 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, without padding and seals."""
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def largest_bucket_bytes(self) -> int:
        """What a transport's buffer must hold."""
        return max(bucket.nbytes for bucket in self.buckets)

    def offsets(self) -> tuple[tuple[int, ...], int]:
        """First byte of every bucket, and the size, when all buckets lie one after another."""
        starts, end = [], 0
        for bucket in self.buckets:
            starts.append(end)
            end = _round_up(end + bucket.nbytes, ALIGNMENT_BYTES)
        return tuple(starts), end

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal manifests."""
        return hashlib.sha256(json.dumps(self.to_plain(), sort_keys=True).encode()).hexdigest()

    def to_plain(self) -> dict[str, Any]:
        """List, strings and integers only; `from_plain` turns it back."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Manifest:
        """Turn `to_plain` back, also after JSON or msgpack made lists of its tuples."""
        return cls(
            tuple(
                Bucket(tuple(map(_piece_from_plain, bucket["pieces"])), bucket["payload_bytes"])
                for bucket in plain["buckets"]
            ),
            tuple(plain["kept"]),
        )

    def difference(self, other: Manifest) -> list[str]:
        """Return what `other` lacks, has too much or has differently, one sentence a tensor."""
        mine, theirs = ({spec.name: (spec.dtype, spec.shape) for spec in m.tensors} for m in (self, other))
        found = [f"{name!r} is missing" for name in mine.keys() - theirs.keys()]
        found += [f"{name!r} is extra" for name in theirs.keys() - mine.keys()]
        found += [
            f"{name!r} is {theirs[name][0]} {theirs[name][1]} instead of {mine[name][0]} {mine[name][1]}"
            for name in mine.keys() & theirs.keys()
            if mine[name] != theirs[name]
        ]
        return sorted(found)


def _piece_from_plain(plain: Mapping[str, Any]) -> Piece:
    tensor = plain["tensor"]
    return Piece(
        TensorSpec(tensor["name"], tensor["dtype"], tuple(tensor["shape"])),
        plain["start"],
        plain["offset"],
        plain["nbytes"],
    )


def seal(data: Tensor, bucket: Bucket, index: int, version: int) -> None:
    """Write checksums, bucket number and version behind the payload.

    Args:
        data: `(bucket.nbytes,) uint8`, payload in place.
        bucket: What it holds.
        index: Its number in the manifest.
        version: Policy version of the weights.
    """
    for piece in bucket.pieces:  # what another bucket left there is no part of the tensor, and so of its checksum
        data[piece.offset + piece.nbytes : piece.offset + _round_up(piece.nbytes, _WORD_BYTES)] = 0
    checksums = torch.stack([checksum(piece.words(data)) for piece in bucket.pieces])
    head = torch.tensor([_SEAL_MAGIC, version, index], dtype=torch.int64)
    words = _seal_words(data, bucket)
    words[:_SEAL_WORDS].copy_(head)
    words[_SEAL_WORDS:].copy_(checksums)


def open_sealed(data: Tensor, bucket: Bucket, index: int, version: int) -> list[tuple[Piece, Tensor]]:
    """Return the pieces of a bucket with their views of `data` (`Piece.view`), after its seal was checked.

    Raises:
        WeightSyncError: Not this bucket, not this version, or bytes that changed on the way; names the tensors.
    """
    words = _seal_words(data, bucket).tolist()
    if words[0] != _SEAL_MAGIC:
        raise WeightSyncError(f"bucket {index} was not written: there is no seal behind its payload")
    if words[1:_SEAL_WORDS] != [version, index]:
        raise WeightSyncError(
            f"expected bucket {index} of version {version}, found bucket {words[2]} of version {words[1]}"
        )
    found = torch.stack([checksum(piece.words(data)) for piece in bucket.pieces]).tolist()
    broken = [
        piece.name for piece, want, got in zip(bucket.pieces, words[_SEAL_WORDS:], found, strict=True) if want != got
    ]
    if broken:
        names = ", ".join(map(repr, broken))
        raise WeightSyncError(f"checksum of {names} differs from the sender's: corrupted on the way")
    return [(piece, piece.view(data)) for piece in bucket.pieces]


class Assembler:
    """Joins the tensors that came in pieces, where the pieces are.

    It holds one tensor at a time: the pieces of a tensor follow each other, and a cut tensor begins a bucket.
    """

    def __init__(self) -> None:
        self._unfinished: Tensor | None = None

    def join(self, pieces: Iterable[tuple[Piece, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every tensor that ends in these pieces of a bucket; whole ones are passed on."""
        for piece, view in pieces:
            if piece.is_whole:
                yield piece.name, view
                continue
            if self._unfinished is None:
                self._unfinished = torch.empty(piece.tensor.shape, dtype=view.dtype, device=view.device)
            self._unfinished.view(-1)[piece.elements].copy_(view)
            if piece.is_last:
                finished, self._unfinished = self._unfinished, None
                yield piece.name, finished


def sealed_checksums(data: Tensor, bucket: Bucket) -> list[int]:
    """Return the checksum that the sender gave each of the bucket's pieces, comparable to `tensor_checksum`."""
    checksums: list[int] = _seal_words(data, bucket)[_SEAL_WORDS:].tolist()
    return checksums


def checksum(words: Tensor) -> Tensor:
    """Return a checksum of int64 words `(N,)` that runs at the speed of memory on CPU and GPU; a 0-dim int64 tensor.

    Words are laid out as a matrix; the checksum is the sum of every word times a weight of its column plus a weight of
    its row, modulo 2**64. Column weights are odd and row weights even, so every weight is odd and invertible: any
    change of a single word changes the checksum, and moved words do, unless their weights agree.
    """
    whole, tail = divmod(words.numel(), _ROW_WORDS)
    column_weights = _column_weights(words.device)
    row_weights = _row_weights(whole + 1, words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    matrix = words[: whole * _ROW_WORDS].view(whole, _ROW_WORDS)
    # On a CPU the two sums share one pass over memory: the second finds its rows in the cache.
    step = max(whole, 1) if words.is_cuda else _ROWS_AT_ONCE
    for start in range(0, whole, step):
        block = matrix[start : start + step]
        total += (block.sum(0) * column_weights).sum()
        total += (block.sum(1) * row_weights[start : start + block.shape[0]]).sum()
    if tail:
        last = words[whole * _ROW_WORDS :]
        total += (last * column_weights[:tail]).sum() + last.sum() * row_weights[whole]
    return total


def tensor_checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of a tensor that lies anywhere: that of its bytes, with zeros up to a whole word."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    gap = -data.numel() % _WORD_BYTES
    if gap or data.storage_offset() % _WORD_BYTES:
        data = torch.nn.functional.pad(data, (0, gap)) if gap else data.clone()
    return checksum(data.view(torch.int64))


@cache
def _column_weights(device: torch.device) -> Tensor:
    return torch.arange(1, 1 + 2 * _ROW_WORDS, 2, dtype=torch.int64, device=device) * _COLUMN_FACTOR


def _row_weights(count: int, device: torch.device) -> Tensor:
    return torch.arange(2, 2 + 2 * count, 2, dtype=torch.int64, device=device) * _ROW_FACTOR


def _seal_words(data: Tensor, bucket: Bucket) -> Tensor:
    return data[bucket.payload_bytes : bucket.nbytes].view(torch.int64)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
