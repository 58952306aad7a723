"""Which token of a packed row attends to which.

A packed row holds many sequences without padding. It consists of *segments*: runs of consecutive tokens that attend
causally to themselves and, before that, to an optional *prefix*: the first tokens of the sequence that an earlier
segment, its *parent*, ends. A prompt with two sampled responses that share it is packed as::

    row       p0 p1 p2 | a0 a1 | b0
    segment   0        | 1     | 2
    parent    -        | 0     | 0
    prefix    -        | p0-p2 | p0-p2
    position  0  1  2  | 3  4  | 3

so that the prompt is computed once. A sequence of its own is one segment without a prefix.

Segments form a tree of any depth, and a prefix may end inside its parent's tokens. So three sequences of which the
second leaves the first behind `a0`, and the third the second behind `b0`, are three segments::

    row       p0 p1 a0 a1 | b0 b1       | c0 c1
    segment   0           | 1           | 2
    parent    -           | 0           | 1
    prefix    -           | p0 p1 a0    | p0 p1 a0 b0
    position  0  1  2  3  | 3  4        | 4  5

A segment's *path* is its whole sequence: the tokens of the row that a query in it may see.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)
T = TypeVar("T")

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


@cache
def has_triton() -> bool:
    """Return whether Triton's kernels can run on a GPU of this machine; if not, say once why.

    torch brings Triton where it has CUDA. To load a kernel Triton compiles a little C against Python's headers.
    """
    if importlib.util.find_spec("triton") is None:
        lacking = "Triton is not installed"
    elif not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        lacking = "Triton finds no C compiler (gcc, clang or the environment variable CC)"
    elif not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        lacking = f"Triton finds no Python.h in {sysconfig.get_paths()['include']}"
    else:
        return True
    logger.warning("log-probs and rounding run by torch's operators, which is right and slower: %s", lacking)
    return False


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
class AttentionLayout:
    """Segments of one packed row, in order and without gaps.

    Attributes:
        length: `(S,)` int64 tokens of each segment; segment s + 1 starts where s ends.
        parent: `(S,)` int64 an earlier segment, whose path begins with the prefix (any value where its length is 0).
        prefix_length: `(S,)` int64 tokens of the prefix; positions in the segment start there.

    Raises:
        ValueError: There is no segment, an empty one, or a prefix that is not the beginning of an earlier path.
    """

    length: np.ndarray
    parent: np.ndarray
    prefix_length: np.ndarray
    _made: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not len(self.length) or (self.length < 1).any():
            raise ValueError(f"a packed row needs at least one segment and no empty ones, got lengths {self.length}")
        (child,) = self.prefix_length.nonzero()
        parent, prefix = self.parent[child], self.prefix_length[child]
        if ((parent < 0) | (parent >= child)).any():
            raise ValueError(f"a prefix belongs to an earlier segment, got parents {self.parent}")
        if (prefix > (self.prefix_length + self.length)[parent]).any() or (prefix < 0).any():
            raise ValueError(f"a prefix is the beginning of its parent's path, got lengths {self.prefix_length}")

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

    def paths(self) -> list[np.ndarray]:
        """Return the path of every segment: the tokens `(K,)` of the row, in the order of their positions."""
        return self.once("paths", self._paths)

    def _paths(self) -> list[np.ndarray]:
        paths: list[np.ndarray] = []
        for start, length, parent, prefix in zip(
            self.start.tolist(), self.length.tolist(), self.parent.tolist(), self.prefix_length.tolist(), strict=True
        ):
            own = np.arange(start, start + length)
            paths.append(np.concatenate([paths[parent][:prefix], own]) if prefix else own)
        return paths

    def segments(self) -> Iterator[tuple[int, int, int, np.ndarray]]:
        """Yield first token, length, prefix length, and path, of every segment."""
        return zip(self.start.tolist(), self.length.tolist(), self.prefix_length.tolist(), self.paths(), strict=True)

    def once(self, name: object, make: Callable[[], T]) -> T:
        """Return the result of `make`, which is called once for each name: all layers share it."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]  # type: ignore[no-any-return]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the tokens as a model gets them, `(1, T)`."""
        return 1, self.num_tokens

    def full_mask(self, device: torch.device) -> Tensor:
        """Return `(1, T)` bool, all ones: nothing in a packed row is padding."""
        # Given a mask, transformers reads its shape alone. Without one it reads the position ids, and the host would
        # wait for them in every forward.
        return self.once("full_mask", lambda: torch.ones(1, self.num_tokens, dtype=torch.bool, device=device))


@dataclass(frozen=True)
class PaddedLayout:
    """Rows below each other, each by itself, filled up on the right to the length of the longest.

    For models whose layers carry a state along a row, which would go on into the next row of a packed one. Whatever
    such a layer computes of a token depends on those before it, and filling stands behind all of a row's tokens: so
    nothing has to be masked, and no layer has to know of it.

    Attributes:
        length: `(S,)` int64 tokens of each row.

    Raises:
        ValueError: There is no row, or an empty one.
    """

    length: np.ndarray

    def __post_init__(self) -> None:
        if not len(self.length) or (self.length < 1).any():
            raise ValueError(f"padded rows are at least one and none of them empty, got lengths {self.length}")

    @property
    def shape(self) -> tuple[int, int]:
        """Of the tokens as a model gets them, `(S, L)`."""
        return len(self.length), int(self.length.max())

    @property
    def num_tokens(self) -> int:
        """Tokens that a model computes, with filling."""
        rows, width = self.shape
        return rows * width

    @property
    def num_pairs(self) -> int:
        """Query–key pairs, with those of filling; see `AttentionLayout.num_pairs`."""
        rows, width = self.shape
        return rows * (width * (width + 1) // 2)

    def position_ids(self) -> np.ndarray:
        """`(S * L,)` int64 position of every token, row by row."""
        rows, width = self.shape
        return np.tile(np.arange(width), rows)

    def paths(self) -> list[np.ndarray]:
        """Return where each row's tokens `(K,)` are among those of all rows, one row after the other."""
        _, width = self.shape
        return [row * width + np.arange(length) for row, length in enumerate(self.length.tolist())]
