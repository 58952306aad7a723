"""What SGLang 0.5.23 calls of its own CPU kernels for a dense model on a CPU without AMX.

Its package of CPU kernels is on no index. Any other name can be imported here, and says its name when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LOW = np.uint64(0xFFFFFFFF)


def assign_req_to_token_pool_cpu(
    requests: Tensor, pool: Tensor, start: Tensor, end: Tensor, places: Tensor, width: int
) -> None:
    """Note where each request's new keys and values lie; `places` has those of all requests one after another."""
    taken = 0
    for row, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        pool[row, first:last] = places[taken : taken + last - first].to(pool.dtype)
        taken += last - first


@torch.library.custom_op("sgl_kernel::murmur_hash32_cpu", mutates_args=())
def murmur_hash32_cpu(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Return a number `(n, m)` for each seed with its position and each entry of the vocabulary, as the GPU kernel."""
    seed = seeds.view(torch.int64).numpy().view(np.uint64)[:, None]
    parts = (seed & _LOW, seed >> np.uint64(32), positions.numpy().astype(np.uint64)[:, None] & _LOW)
    found = np.zeros((len(seed), 1), np.uint64)
    for part in (*parts, columns.numpy().astype(np.uint64)[None] & _LOW):
        mixed = _turned(part * np.uint64(0xCC9E2D51) & _LOW, 15) * np.uint64(0x1B873593) & _LOW
        found = (_turned(found ^ mixed, 13) * np.uint64(5) + np.uint64(0xE6546B64)) & _LOW
    found ^= np.uint64(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        found ^= found >> np.uint64(shift)
        found = found * np.uint64(factor) & _LOW
    return torch.from_numpy((found ^ found >> np.uint64(16)).astype(np.uint32))


def _turned(value: Any, by: int) -> Any:
    return (value << np.uint64(by) | value >> np.uint64(32 - by)) & _LOW


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in here")

    return missing
