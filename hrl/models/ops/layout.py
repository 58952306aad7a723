"""Which token of a packed row attends to which.

A packed row holds many sequences without padding. It consists of *segments*: runs of consecutive tokens that attend
causally to themselves and, before that, to an optional *prefix*, another run of the same row. A prompt with two sampled
responses that share it is packed as::

    row       p0 p1 p2 | a0 a1 | b0
    segment   0        | 1     | 2
    prefix    -        | p0-p2 | p0-p2
    position  0  1  2  | 3  4  | 3

so that the prompt is computed once. A sequence of its own is one segment without a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")

#: Queries per block on a CPU: a causal block needs only the keys up to its last query.
MAX_BLOCK_QUERIES = 128
#: Query × key pairs of one stacked block on a CPU; times the heads, the scores held at once.
MAX_BLOCK_PAIRS = 1 << 19
#: A stack may waste at most this share of its pairs on padding.
MAX_PADDING_SHARE = 0.25
#: Position of a padded key: later than every query.
ABSENT = 1 << 40
#: Tensors that are copied together start at multiples of this, so that any dtype can be viewed there.
_ALIGNMENT_BYTES = 16


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Bring small host tensors to the device in one copy from pinned memory, without waiting for it.

    Args:
        tensors: On the CPU. For a CPU they are returned as they are.
        device: Where they are wanted.
    """
    if device.type == "cpu":
        return list(tensors)
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    # A copy from pageable memory would wait for all queued work. torch's allocator keeps pinned memory until its copy
    # is done.
    staged = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def places(buffer: Tensor) -> list[Tensor]:
        return [
            buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]

    for place, tensor in zip(places(staged), tensors, strict=True):
        place.copy_(tensor)
    return places(staged.to(device, non_blocking=True))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of products of this dtype are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Reach:
    """How far back a token sees, in tokens of its own sequence. Without either limit: to the first.

    Attributes:
        window: The last `window` tokens, itself included (sliding-window attention).
        chunk: Only tokens of its own chunk; a sequence is cut every `chunk` tokens (Llama 4).
    """

    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"an attention {name} is at least 1 token, not {size}")


@dataclass(frozen=True)
class Block:
    """Query runs of similar size, stacked with padding so that they run as one batched product.

    Attributes:
        query_index: `(N, Q)` int64 tokens of the row; padding repeats token 0.
        key_index: `(N, K)` int64 tokens of the row; padding repeats token 0.
        query_position: `(N, Q)` int64 positions in the sequence; padding is later than every key.
        key_position: `(N, K)` int64; padding is `ABSENT`.
        out_source: `(n,)` int64 flat positions in `(N, Q)` that hold real queries.
        out_target: `(n,)` int64 the tokens of the row these are.
    """

    query_index: Tensor
    key_index: Tensor
    query_position: Tensor
    key_position: Tensor
    out_source: Tensor
    out_target: Tensor

    def to(self, device: torch.device) -> Block:
        """Return the same block on `device`."""
        return Block(*to_device([getattr(self, f.name) for f in fields(self)], device))

    def visible(self, reach: Reach) -> Tensor:
        """Return `(N, Q, K)` bool: the key is at or before the query, and within its reach."""
        query, key = self.query_position[:, :, None], self.key_position[:, None, :]
        mask = key <= query
        # A padded query would see no key, and its softmax would be undefined. It sees all; nobody reads its result.
        if reach.window is not None:
            mask &= (key > query - reach.window) | (query >= ABSENT - 1)
        if reach.chunk is not None:
            mask &= (key // reach.chunk == query // reach.chunk) | (query >= ABSENT - 1)
        return mask


@dataclass(frozen=True)
class VarlenIndex:
    """The same segments in the form of variable-length attention kernels.

    Queries stay where they are in the row. Keys are gathered: prefix and segment of each query run, one after the
    other. These kernels align their causal mask to the last query and the last key, as a prefix needs it. A query run
    is a segment, or the part of one that lies in one chunk.

    Attributes:
        query_offsets: `(runs + 1,)` int32.
        key_offsets: `(runs + 1,)` int32.
        max_query: The longest query run, in tokens.
        max_key: The most keys of a run.
        key_index: `(sum of key lengths,)` int64 tokens of the row; `None` where the keys are the queries.
    """

    query_offsets: Tensor
    key_offsets: Tensor
    max_query: int
    max_key: int
    key_index: Tensor | None

    @property
    def runs(self) -> tuple[Tensor, Tensor, int, int]:
        """Offsets and longest runs, in the order in which every kernel takes them."""
        return self.query_offsets, self.key_offsets, self.max_query, self.max_key


@dataclass(frozen=True)
class AttentionLayout:
    """Segments of one packed row, in order and without gaps.

    Attributes:
        length: `(S,)` int64 tokens of each segment; segment s + 1 starts where s ends.
        prefix_start: `(S,)` int64 first token of the prefix (any value where its length is 0).
        prefix_length: `(S,)` int64 tokens of the prefix; positions in the segment start there.
    """

    length: np.ndarray
    prefix_start: np.ndarray
    prefix_length: np.ndarray
    _made: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not len(self.length) or (self.length < 1).any():
            raise ValueError(f"a packed row needs at least one segment and no empty ones, got lengths {self.length}")

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return int(self.length.sum())

    @property
    def start(self) -> np.ndarray:
        """`(S,)` first token of each segment."""
        return np.cumsum(self.length) - self.length

    @property
    def num_pairs(self) -> int:
        """Query–key pairs that attend to each other: what attention costs, per head and layer."""
        length, prefix = self.length.astype(np.int64), self.prefix_length.astype(np.int64)
        return int((length * prefix + length * (length + 1) // 2).sum())

    def position_ids(self) -> np.ndarray:
        """`(T,)` int64 position of every token in its own sequence."""
        return np.concatenate(
            [np.arange(p, p + n) for p, n in zip(self.prefix_length.tolist(), self.length.tolist(), strict=True)]
        )

    def once(self, name: object, make: Callable[[], T]) -> T:
        """Return the result of `make`, which is called once for each name: all layers share it."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]  # type: ignore[no-any-return]

    def blocks(self, device: torch.device) -> list[Block]:
        """Return the stacked blocks for devices without variable-length kernels."""
        return self.once("blocks", lambda: [block.to(device) for block in _stack_blocks(_query_runs(self))])

    def varlen(self, device: torch.device, chunk: int | None = None) -> VarlenIndex:
        """Return offsets and key index for variable-length kernels."""
        return self.once(("varlen", chunk), lambda: _varlen_index(self, chunk, device))

    def full_mask(self, device: torch.device) -> Tensor:
        """Return `(1, T)` bool, all ones: nothing in a packed row is padding."""
        # Given a mask, transformers reads its shape alone. Without one it reads the position ids, and the host would
        # wait for them in every forward.
        return self.once("full_mask", lambda: torch.ones(1, self.num_tokens, dtype=torch.bool, device=device))


@dataclass(frozen=True)
class _QueryRun:
    """At most `MAX_BLOCK_QUERIES` consecutive queries of a segment with the keys they can see."""

    start: int
    length: int
    first_position: int
    keys: np.ndarray


def _segments(layout: AttentionLayout) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """Yield first token, length, prefix length, and the tokens `(K,)` of prefix and segment, of every segment."""
    for start, length, prefix_start, prefix in zip(
        layout.start.tolist(),
        layout.length.tolist(),
        layout.prefix_start.tolist(),
        layout.prefix_length.tolist(),
        strict=True,
    ):
        keys = np.concatenate([np.arange(prefix_start, prefix_start + prefix), np.arange(start, start + length)])
        yield start, length, prefix, keys


def _query_runs(layout: AttentionLayout) -> list[_QueryRun]:
    runs = []
    for start, length, prefix, keys in _segments(layout):
        for offset in range(0, length, MAX_BLOCK_QUERIES):
            count = min(MAX_BLOCK_QUERIES, length - offset)
            runs.append(_QueryRun(start + offset, count, prefix + offset, keys[: prefix + offset + count]))
    return runs


def _stack_blocks(runs: list[_QueryRun]) -> list[Block]:
    """Group runs of similar shape, largest first, within the limits on padding and on size."""
    ordered = sorted(runs, key=lambda run: (len(run.keys), run.length), reverse=True)
    blocks: list[Block] = []
    stack: list[_QueryRun] = []
    queries = keys = used = 0
    for run in ordered:
        wide, long = max(queries, run.length), max(keys, len(run.keys))
        pairs = wide * long * (len(stack) + 1)
        used_with = used + run.length * len(run.keys)
        if stack and (pairs > MAX_BLOCK_PAIRS or used_with < (1 - MAX_PADDING_SHARE) * pairs):
            blocks.append(_pad(stack, queries, keys))
            stack, wide, long, used_with = [], run.length, len(run.keys), run.length * len(run.keys)
        stack.append(run)
        queries, keys, used = wide, long, used_with
    blocks.append(_pad(stack, queries, keys))
    return blocks


def _pad(stack: list[_QueryRun], queries: int, keys: int) -> Block:
    query_index = np.zeros((len(stack), queries), np.int64)
    key_index = np.zeros((len(stack), keys), np.int64)
    query_position = np.full((len(stack), queries), ABSENT - 1, np.int64)
    key_position = np.full((len(stack), keys), ABSENT, np.int64)
    real = np.zeros((len(stack), queries), bool)
    for row, run in enumerate(stack):
        query_index[row, : run.length] = np.arange(run.start, run.start + run.length)
        query_position[row, : run.length] = np.arange(run.first_position, run.first_position + run.length)
        key_index[row, : len(run.keys)] = run.keys
        key_position[row, : len(run.keys)] = np.arange(len(run.keys))
        real[row, : run.length] = True
    source = np.flatnonzero(real.reshape(-1))
    return Block(
        *map(
            torch.from_numpy,
            (query_index, key_index, query_position, key_position, source, query_index.reshape(-1)[source]),
        )
    )


def _varlen_index(layout: AttentionLayout, chunk: int | None, device: torch.device) -> VarlenIndex:
    query_length: list[int] = []
    keys: list[np.ndarray] = []
    for _, length, prefix, seen in _segments(layout):
        position, end = prefix, prefix + length
        while position < end:
            first = 0 if chunk is None else position // chunk * chunk
            after = end if chunk is None else min(end, first + chunk)
            query_length.append(after - position)
            keys.append(seen[first:after])
            position = after
    key_length = [len(part) for part in keys]
    key_index = np.concatenate(keys)
    is_identity = len(key_index) == layout.num_tokens and bool((key_index == np.arange(len(key_index))).all())
    return VarlenIndex(
        query_offsets=_offsets(query_length, device),
        key_offsets=_offsets(key_length, device),
        max_query=max(query_length),
        max_key=max(key_length),
        key_index=None if is_identity else to_device([torch.from_numpy(key_index)], device)[0],
    )


def _offsets(lengths: list[int], device: torch.device) -> Tensor:
    return to_device([torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))], device)[0]
