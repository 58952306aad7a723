"""What the two ends of a weight sync agree on: the manifest, how bytes lie in a bucket, its seal, reports, deadlines.

A bucket is one flat run of bytes::

    | piece 0 | pad | piece 1 | pad | ... | seal: magic, version, bucket, checksum 0, checksum 1, ... |

A piece is a whole tensor, unless the tensor is larger than a bucket. Such a tensor is cut into pieces that fill buckets
of their own, so that no buffer is larger than a bucket; `Assembler` joins them again.

The seal travels with the data. So a receiver can tell, whatever the transport, that the bucket is the right one, of the
right version, and that each tensor arrived as it was written. Every tensor of every sync is checked, because a fault
has to be found at its own sync. In host memory the checksums are XXH3, which reads faster than a copy does and takes
half a microsecond for a small tensor; on a GPU they are weighted sums of mixed words.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

from hrl.errors import HrlError


class WeightSyncError(HrlError, RuntimeError):
    """Weights did not arrive, or not as they were sent. The message names the tensor, the bucket or the receiver."""


class Deadline:
    """A point in time and what has to be done by then."""

    def __init__(self, seconds: float, what: str) -> None:
        self.seconds = seconds
        self.what = what
        self._end = time.monotonic() + seconds

    def remaining_s(self, doing: str) -> float:
        """Return the seconds that are left.

        Raises:
            WeightSyncError: None are.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.passed(doing)
        return left

    def wait(self, future: Future[Any], doing: str) -> Any:
        """Return the future's result, by the deadline."""
        try:
            return future.result(timeout=self.remaining_s(doing))
        except FutureTimeoutError:
            raise self.passed(doing) from None

    def passed(self, doing: str) -> WeightSyncError:
        """Return the error that says what was not done in time."""
        return WeightSyncError(f"{self.what} took longer than {self.seconds:g} s (weight_sync.timeout_s), at: {doing}")


@dataclass(frozen=True)
class ReceiverReport:
    """What one receiving process wrote.

    Attributes:
        receiver: Who, e.g. `"vllm worker 0 (pid 71)"`.
        version: Policy version that it now serves.
        tensors: Number of tensors that were received, verified against their checksums and written.
        nbytes: Bytes of these tensors.
        read_back: How many of them were also read back from the model, bit for bit.
    """

    receiver: str
    version: int
    tensors: int
    nbytes: int
    read_back: int


ALIGNMENT_BYTES = 256
"""Tensors start at multiples of this: any dtype can be viewed there, and copies are vectorised."""

_WORD_BYTES = 8
_SEAL_MAGIC = 0x68726C5F73796E63  # "hrl_sync"
_SEAL_WORDS = 3

_THREADED_ELEMENTS = 1 << 15
"""torch copies no more than these with one thread."""
_CACHED_BYTES = 1 << 20
"""What is read again from the processor's cache just after it was written."""
_THREADED_BYTES = 1 << 24
"""Bytes from which two threads compute checksums: both cores together read memory faster than one."""

_ROW_WORDS = 8192
_ROWS_AT_ONCE = 256  # 16 MiB, which a GPU's second-level cache holds
_MIX_FACTOR = 0x2545F4914F6CDD1D  # any large odd numbers
_COLUMN_FACTOR = 0x1E3779B97F4A7C15
_ROW_FACTOR = 0x42B2AE3D27D4EB4F


@dataclass(frozen=True)
class TensorSpec:
    """One tensor.

    Attributes:
        name: Its name in the checkpoint.
        dtype: Name of the torch dtype on the wire, e.g. `"bfloat16"`.
        shape: Of the full tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that `dtype` names."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class TensorPiece:
    """A run of a tensor's bytes, usually all of them, and its place in a bucket.

    Attributes:
        tensor: The tensor.
        start: First byte within the tensor; a multiple of `ALIGNMENT_BYTES`, so that no element is cut.
        offset: First byte within the bucket.
        nbytes: Length, without padding.
    """

    tensor: TensorSpec
    start: int
    offset: int
    nbytes: int

    @property
    def name(self) -> str:
        """Name of the tensor."""
        return self.tensor.name

    @cached_property
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
        """Return the piece within the bucket's bytes `(nbytes,) uint8`: the whole tensor, or `(elements,)` of it."""
        flat = bucket[self.offset : self.offset + self.nbytes].view(self.tensor.torch_dtype)
        return flat.view(self.tensor.shape) if self.is_whole else flat

    def words(self, bucket: Tensor) -> Tensor:
        """Return the piece's bytes, padding included, as int64 words."""
        return bucket[self.offset : self.offset + _round_up(self.nbytes, _WORD_BYTES)].view(torch.int64)


@dataclass(frozen=True)
class Bucket:
    """What travels together.

    Attributes:
        start: First byte, where all buckets lie one after another.
        pieces: In the order in which they lie there.
    """

    start: int
    pieces: tuple[TensorPiece, ...]

    @cached_property
    def places(self) -> tuple[slice, ...]:
        """Where the bytes of each piece lie."""
        return tuple(slice(piece.offset, piece.offset + piece.nbytes) for piece in self.pieces)

    @property
    def payload_bytes(self) -> int:
        """Bytes before the seal."""
        last = self.pieces[-1]
        return _round_up(last.offset + last.nbytes, ALIGNMENT_BYTES)

    @property
    def nbytes(self) -> int:
        """Bytes of payload and seal."""
        return self.payload_bytes + _WORD_BYTES * (_SEAL_WORDS + len(self.pieces))

    def within(self, data: Tensor) -> Tensor:
        """Return the bucket's bytes `(nbytes,)` in memory that holds all buckets one after another."""
        return data[self.start : self.start + self.nbytes]


@dataclass(frozen=True)
class Manifest:
    """Every tensor of the model, in buckets. Equal on both sides and from step to step.

    Attributes:
        tensors: What is sent, in order.
        limit_bytes: The most that a bucket holds.
        kept: Names of tensors that are not sent, because no update moves them: the receiver keeps its folder's.
    """

    tensors: tuple[TensorSpec, ...]
    limit_bytes: int
    kept: tuple[str, ...] = ()

    @classmethod
    def build(
        cls,
        specs: Iterable[tuple[str, torch.dtype, Sequence[int]]],
        bucket_bytes: int,
        kept: Iterable[str] = (),
    ) -> Manifest:
        """Lay tensors out in the given order.

        Args:
            specs: (name, dtype, shape) of every tensor, in the order in which the trainer will yield them.
            bucket_bytes: The most that a bucket holds, and at least `ALIGNMENT_BYTES`. A larger tensor is cut.
            kept: Names of what the trainer will not yield.

        Raises:
            WeightSyncError: A name occurs twice, or there is no tensor.
        """
        limit = max(bucket_bytes - bucket_bytes % ALIGNMENT_BYTES, ALIGNMENT_BYTES)
        tensors: dict[str, TensorSpec] = {}
        for name, dtype, shape in specs:
            if name in tensors:
                raise WeightSyncError(f"tensor {name!r} occurs twice in the list of weights")
            tensors[name] = TensorSpec(name, str(dtype).removeprefix("torch."), tuple(shape))
        if not tensors:
            raise WeightSyncError("the list of weights is empty")
        return cls(tuple(tensors.values()), limit, tuple(kept))

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """How the tensors are laid out."""
        contents: list[list[TensorPiece]] = [[]]
        end, limit = 0, self.limit_bytes
        for tensor in self.tensors:
            # A tensor without elements is one empty piece.
            for start in range(0, max(tensor.nbytes, 1), limit):
                nbytes = min(tensor.nbytes - start, limit)
                if contents[-1] and end + nbytes > limit:
                    contents.append([])
                    end = 0
                contents[-1].append(TensorPiece(tensor, start, end, nbytes))
                end = _round_up(end + nbytes, ALIGNMENT_BYTES)
        buckets: list[Bucket] = []
        end = 0
        for pieces in contents:
            buckets.append(Bucket(end, tuple(pieces)))
            end = _round_up(end + buckets[-1].nbytes, ALIGNMENT_BYTES)
        return tuple(buckets)

    @cached_property
    def pieces(self) -> tuple[TensorPiece, ...]:
        """All pieces in order."""
        return tuple(piece for bucket in self.buckets for piece in bucket.pieces)

    @cached_property
    def by_tensor(self) -> tuple[tuple[TensorSpec, tuple[TensorPiece, ...]], ...]:
        """Each tensor with its pieces, in order."""
        return tuple((tensor, tuple(pieces)) for tensor, pieces in groupby(self.pieces, attrgetter("tensor")))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensors, without padding and seals."""
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def largest_bucket_bytes(self) -> int:
        """Bytes of a buffer that takes one bucket after another."""
        return max(bucket.nbytes for bucket in self.buckets)

    @property
    def all_buckets_bytes(self) -> int:
        """Bytes of a buffer in which all buckets lie one after another."""
        return self.buckets[-1].start + self.buckets[-1].nbytes

    @cached_property
    def fingerprint(self) -> str:
        """A digest, equal for equal manifests."""
        return hashlib.sha256(self._json.encode()).hexdigest()

    def to_plain(self) -> dict[str, str]:
        """Return the manifest as strings; `from_plain` is the inverse."""
        # One string is sent, and left unread by who knows the fingerprint, at no cost for a tensor.
        return {"manifest": self._json, "fingerprint": self.fingerprint}

    @cached_property
    def _json(self) -> str:
        tensors = [[tensor.name, tensor.dtype, tensor.shape] for tensor in self.tensors]
        return json.dumps({"tensors": tensors, "limit_bytes": self.limit_bytes, "kept": self.kept})

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], known: Manifest | None = None) -> Manifest:
        """Undo `to_plain`; `known` is returned if it has the same fingerprint."""
        if known is not None and plain["fingerprint"] == known.fingerprint:
            return known
        parsed = json.loads(plain["manifest"])
        tensors = (TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in parsed["tensors"])
        return cls(tuple(tensors), parsed["limit_bytes"], tuple(parsed["kept"]))

    def difference(self, other: Manifest) -> list[str]:
        """Return how `other` differs: a phrase for each tensor that is missing, extra or different."""
        mine, theirs = ({spec.name: (spec.dtype, spec.shape) for spec in m.tensors} for m in (self, other))
        found = [f"{name!r} is missing" for name in mine.keys() - theirs.keys()]
        found += [f"{name!r} is extra" for name in theirs.keys() - mine.keys()]
        found += [
            f"{name!r} is {theirs[name][0]} {theirs[name][1]} instead of {mine[name][0]} {mine[name][1]}"
            for name in mine.keys() & theirs.keys()
            if mine[name] != theirs[name]
        ]
        return sorted(found)


def seal(data: Tensor, bucket: Bucket, index: int, version: int, checksums: Sequence[int] | None = None) -> None:
    """Write checksums, bucket number and version behind the payload.

    Args:
        data: `(bucket.nbytes,) uint8`, payload in place.
        bucket: What it holds.
        index: Its number in the manifest.
        version: Policy version of the weights.
        checksums: Of the pieces as `copy_to_host` returned them; None computes them here.
    """
    if data.is_cuda:
        for piece in bucket.pieces:  # padding may hold what another bucket left; it must not enter the checksum
            if piece.nbytes % _WORD_BYTES:
                data[piece.offset + piece.nbytes : piece.offset + _round_up(piece.nbytes, _WORD_BYTES)] = 0
    words = _seal_words(data, bucket)
    for place, word in enumerate((_SEAL_MAGIC, version, index)):
        words[place].fill_(word)  # on the device: a copy from the host would wait for the bucket
    words[_SEAL_WORDS:] = _checksums(data, bucket) if checksums is None else torch.from_numpy(_signed(checksums))


def open_sealed(data: Tensor, bucket: Bucket, index: int, version: int) -> list[int]:
    """Check a bucket's seal and return the checksums of its pieces, comparable with `tensor_checksums`.

    Raises:
        WeightSyncError: Another bucket, another version, or bytes that changed on the way; names the tensors.
    """
    found = _checksums(data, bucket)
    # Fetched together, because on a GPU every fetch waits for all that was queued before it.
    words = torch.cat([_seal_words(data, bucket), found]).tolist()
    sealed, checksums = words[_SEAL_WORDS : -len(found)], words[-len(found) :]
    if words[0] != _SEAL_MAGIC:
        raise WeightSyncError(f"bucket {index} was not written: there is no seal behind its payload")
    if words[1:_SEAL_WORDS] != [version, index]:
        raise WeightSyncError(
            f"expected bucket {index} of version {version}, found bucket {words[2]} of version {words[1]}"
        )
    broken = [piece.name for piece, want, got in zip(bucket.pieces, sealed, checksums, strict=True) if want != got]
    if broken:
        names = ", ".join(map(repr, broken))
        raise WeightSyncError(f"checksum of {names} differs from the sender's: corrupted on the way")
    return list(checksums)


class Assembler:
    """Joins tensors that came in pieces, on the device of the pieces, one tensor at a time."""

    # The pieces of a tensor follow each other, and a cut tensor begins a bucket.

    def __init__(self) -> None:
        self._unfinished: Tensor | None = None

    def join(self, bucket: Bucket, data: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for every tensor that is complete with a bucket's bytes `data (bucket.nbytes,)`."""
        for piece in bucket.pieces:
            view = piece.view(data)
            if piece.is_whole:
                yield piece.name, view
                continue
            if self._unfinished is None:
                self._unfinished = torch.empty(piece.tensor.shape, dtype=view.dtype, device=view.device)
            self._unfinished.view(-1)[piece.elements].copy_(view)
            if piece.is_last:
                finished, self._unfinished = self._unfinished, None
                yield piece.name, finished


def tensor_checksums(tensors: Sequence[Tensor], device: torch.device) -> list[int]:
    """Return the checksums of tensors, or of runs of their elements, as those of buckets on a device are."""
    if device.type != "cuda":
        return _signed(_digests([_host_bytes(tensor) for tensor in tensors])).tolist()
    return torch.stack([tensor_checksum(tensor) for tensor in tensors]).tolist() if tensors else []


def copy_to_host(source: Tensor, place: Tensor, written: memoryview) -> int:
    """Copy a tensor to its place in a bucket in host memory, cast it if it has another dtype, and return its checksum.

    Args:
        source: A tensor, or a run of its elements.
        place: Of the same shape.
        written: The bytes of `place`. The checksum is of these, not of the source.
    """
    is_large = source.numel() > _THREADED_ELEMENTS
    if not (is_large and source.is_cpu and source.dtype == place.dtype and source.is_contiguous()):
        place.copy_(source)
        return xxh3_64_intdigest(written)
    # One thread copies as fast as several. Those of torch would spin on while the engine copies on the same cores.
    target, taken, found = np.asarray(written), np.asarray(_host_bytes(source)), xxh3_64()
    for start in range(0, len(target), _CACHED_BYTES):
        part = slice(start, start + _CACHED_BYTES)
        np.copyto(target[part], taken[part])
        found.update(written[part])
    return found.intdigest()


def _checksums(data: Tensor, bucket: Bucket) -> Tensor:
    """Return the checksum of each of a bucket's pieces, `(pieces,)` int64 on the device of the data."""
    if data.is_cuda:
        return sums_of_pieces(data, bucket)
    raw = memoryview(data.numpy())
    return torch.from_numpy(_signed(_digests([raw[place] for place in bucket.places])))


def sums_of_pieces(data: Tensor, bucket: Bucket) -> Tensor:
    """Return the `checksum` of each of a bucket's pieces, `(pieces,)`; neighbours of one size are summed together.

    A mixture of experts has thousands of equal tensors, and starting kernels for each would take longer than reading.
    """
    words, found = data[: bucket.payload_bytes].view(torch.int64), list[Tensor]()
    for nbytes, group in groupby(bucket.pieces, attrgetter("nbytes")):
        equal = list(group)
        begin, stride = equal[0].offset // _WORD_BYTES, _round_up(nbytes, ALIGNMENT_BYTES) // _WORD_BYTES
        size = _round_up(nbytes, _WORD_BYTES) // _WORD_BYTES
        rows = words[begin : begin + len(equal) * stride].view(len(equal), stride)[:, :size]
        found += map(_sums_of_rows, rows.split(max(1, _ROWS_AT_ONCE * _ROW_WORDS // max(1, size))))
    return torch.cat(found)


def _sums_of_rows(rows: Tensor) -> Tensor:
    """Return the `checksum` of each of `(n, N)` int64 words, `(n,)`."""
    whole, tail = divmod(rows.shape[1], _ROW_WORDS)
    column_weights = _weights(_ROW_WORDS, _COLUMN_FACTOR, rows.device)
    row_weights = _weights(whole + 1, _ROW_FACTOR, rows.device)
    matrix = rows[:, : whole * _ROW_WORDS].unflatten(1, (whole, _ROW_WORDS))
    totals = rows.new_zeros(len(rows))
    step = max(1, _ROWS_AT_ONCE // max(1, len(rows)))
    for start in range(0, whole, step):
        block = matrix[:, start : start + step]
        totals += (_mixed(block).mul_(column_weights).sum(2) * row_weights[start : start + block.shape[1]]).sum(1)
    if tail:
        totals += _mixed(rows[:, whole * _ROW_WORDS :]).mul_(column_weights[:tail]).sum(1) * row_weights[whole]
    return totals


def _signed(digests: Sequence[int]) -> np.ndarray:
    return np.array(digests, dtype=np.uint64).view(np.int64)


def _digests(runs: Sequence[memoryview]) -> list[int]:
    """Return the checksum of each run of bytes."""
    ends = np.cumsum([len(run) for run in runs])
    if not len(runs) or ends[-1] < _THREADED_BYTES:
        return list(map(xxh3_64_intdigest, runs))
    half = int(np.searchsorted(ends, ends[-1] / 2)) + 1
    with ThreadPoolExecutor(1, "weight-checksums") as second_thread:
        first = second_thread.submit(list, map(xxh3_64_intdigest, runs[:half]))
        rest = list(map(xxh3_64_intdigest, runs[half:]))
        return first.result() + rest


def _host_bytes(tensor: Tensor) -> memoryview:
    host = tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.cpu().contiguous()
    host = host.detach() if host.requires_grad else host
    return memoryview((host if host.dim() else host.view(1)).view(torch.uint8).numpy().reshape(-1))


def checksum(words: Tensor) -> Tensor:
    """Return a checksum of int64 words `(N,)` as a 0-dim int64 tensor, at the speed of a GPU's memory.

    The words form a matrix. Each is mixed and multiplied by a weight of its column and a weight of its row; the
    checksum is the total modulo 2**64, the same on every device. Mixing can be undone and weights are odd, so a change
    of one word always changes the checksum. Other changes go unseen only where differences of mixed words happen to
    meet weights that cancel them. Unmixed, every even number of flipped signs would: a word's top bit times any odd
    weight is that bit.
    """
    return _sums_of_rows(words[None])[0]


def _mixed(words: Tensor) -> Tensor:
    """Return int64 words `(..., N)` mapped one to one to others, in which every bit has moved some of the lower ones.

    A factor carries a bit upwards, and the upper half is laid over the lower one.
    """
    product = words * _MIX_FACTOR
    halves = product.view(torch.int32)  # a shift of a signed word would fill in its sign
    halves[..., ::2] ^= halves[..., 1::2]
    return product


def tensor_checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of a tensor's bytes, filled up with zeros to a whole word."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    gap = -data.numel() % _WORD_BYTES
    if gap or data.storage_offset() % _WORD_BYTES:
        data = torch.nn.functional.pad(data, (0, gap)) if gap else data.clone()
    return checksum(data.view(torch.int64))


@cache  # a model has few sizes of tensors, and the weights of each are 1/8192 of its bytes
def _weights(count: int, factor: int, device: torch.device) -> Tensor:
    """Return odd numbers `(count,)` without a pattern, others for each factor."""
    return _mixed(torch.arange(1, count + 1, device=device) * factor) * factor | 1


def _seal_words(data: Tensor, bucket: Bucket) -> Tensor:
    return data[bucket.payload_bytes : bucket.nbytes].view(torch.int64)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
