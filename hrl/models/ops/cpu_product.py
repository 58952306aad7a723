"""Products of bfloat16 matrices on a CPU with float32 results, which torch offers for CUDA alone (`out_dtype`).

Logits need them: a bfloat16 result rounds them by 0.03 of a logit of 16, and a float32 product of the same numbers
takes twice the time, because oneDNN converts both sides at every call. oneDNN's micro-kernel has them, and torch's
attention on a CPU runs on it: `at::native::cpublas::brgemm` of ATen/native/CPUBlas.h. It has no name in Python, so it
is called by its symbol, which torch 2.13 exports. A torch without it makes float32 products.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

_SYMBOL = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
#: Rows of the weight in a block. A block and the rows that meet it stay in the second-level cache.
BLOCK = 64
#: Most rows of hidden states in one call. The kernel is generated once per number of rows, so that is a multiple of
#: `ROW_STEP`.
MAX_ROWS = 256
ROW_STEP = 32
#: Parts of the work for each thread.
PARTS = 8


@functools.cache
def wide_product() -> Callable[..., None] | None:
    """Return `brgemm(M, N, K, lda, ldb, ldc, add_C, A, B, C, is_vnni)`; None where `obstacle` names a reason."""
    return None if obstacle() else _exported()


def obstacle() -> str | None:
    """Return why the kernel is not called on this machine; None where it is.

    An error inside the kernel would end the process, so it is only called where its conditions are known to hold:
    bfloat16 instructions of AVX-512, and oneDNN neither switched off nor limited. With AMX its layout has other rules,
    which were not tried.
    """
    limits = [name for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA") if name in os.environ]
    if limits:
        return f"{limits[0]} limits oneDNN"
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return "torch is without oneDNN"
    if not torch.cpu._is_avx512_bf16_supported():
        return "the CPU has no bfloat16 instructions of AVX-512"
    if torch.cpu._is_amx_tile_supported():
        return "it was not tried on CPUs with AMX"
    return None if _exported() else f"torch {torch.__version__} does not export it"


def _exported() -> Callable[..., None] | None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    kernel = getattr(ctypes.CDLL(str(library)), _SYMBOL, None) if library.exists() else None
    if kernel is not None:
        kernel.argtypes = [ctypes.c_int64] * 6 + [ctypes.c_bool] + [ctypes.c_void_p] * 3 + [ctypes.c_bool]
        kernel.restype = None
    return kernel


def can_multiply(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether `PackedWeight.of(weight).product(hidden)` works here, and no gradient is wanted: it has none."""
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return False
    narrow = hidden.dtype == weight.dtype == torch.bfloat16 and hidden.device.type == weight.device.type == "cpu"
    return narrow and weight.shape[1] % 2 == 0 and wide_product() is not None


@dataclass(frozen=True)
class PackedWeight:
    """A weight in the kernel's layout.

    Attributes:
        blocks: `(ceil(V / BLOCK), H / 2, BLOCK, 2)` bfloat16: pairs of neighbouring inputs of `BLOCK` rows.
        rows: V.
    """

    blocks: Tensor
    rows: int

    @classmethod
    def of(cls, weight: Tensor) -> PackedWeight:
        """Return `weight (V, H)` packed; it takes about as long as the product with one row of hidden states."""
        rows, width = weight.shape
        pairs = _whole(weight, BLOCK).view(torch.int32).view(-1, BLOCK, width // 2)
        return cls(pairs.transpose(1, 2).contiguous().view(torch.bfloat16), rows)

    def product(self, hidden: Tensor) -> Tensor:
        """Return `hidden (T, H) @ weight.T` as `(T, V)` float32.

        A row of the result does not depend on the other rows, bit for bit.
        """
        return torch.ops.hrl.wide_mm(_whole(hidden, ROW_STEP), self.blocks)[: len(hidden), : self.rows]


def _wide_mm(states: Tensor, blocks: Tensor) -> Tensor:
    """Return the products of `states (T, H)` and the `blocks` of a weight, `(T, N * BLOCK)` float32."""
    kernel = wide_product()
    assert kernel is not None, "there is a kernel where a weight was packed"
    (count, width), num_blocks = states.shape, len(blocks)
    stride = num_blocks * BLOCK
    result = torch.empty(count, stride)
    # Threads take one part after the other, so that one which the system holds up does not hold up the rest.
    num_threads = torch.get_num_threads()
    step = max(1, num_blocks // (PARTS * num_threads))
    parts = iter(range(0, num_blocks, step))

    def multiply() -> None:
        for first in parts:
            for block in range(first, min(first + step, num_blocks)):
                right = blocks.data_ptr() + block * width * BLOCK * 2
                out = result.data_ptr() + block * BLOCK * 4
                for row in range(0, count, MAX_ROWS):
                    rows = min(MAX_ROWS, count - row)
                    left, to = states.data_ptr() + row * width * 2, out + row * stride * 4
                    kernel(rows, BLOCK, width, width, BLOCK, stride, False, left, right, to, True)

    # Calls release the interpreter's lock.
    others = [_pool(os.getpid(), num_threads - 1).submit(multiply) for _ in range(num_threads - 1)]
    multiply()
    for other in others:
        other.result()
    return result


# As an operator of torch it has a name on the traces of a profiler.
_OPERATORS = torch.library.Library("hrl", "FRAGMENT")
_OPERATORS.define("wide_mm(Tensor states, Tensor blocks) -> Tensor")
_OPERATORS.impl("wide_mm", _wide_mm, "CPU")
_OPERATORS.impl(
    "wide_mm", lambda states, blocks: states.new_empty(len(states), len(blocks) * BLOCK, dtype=torch.float32), "Meta"
)


def _refuse(context: Any, gradient: Tensor) -> NoReturn:
    raise RuntimeError("hrl::wide_mm has no gradient: call it under torch.no_grad()")


torch.library.register_autograd("hrl::wide_mm", _refuse, lib=_OPERATORS)


def _whole(matrix: Tensor, step: int) -> Tensor:
    """Return the matrix with zeros below, up to a multiple of `step` rows."""
    missing = -len(matrix) % step
    return functional.pad(matrix, (0, 0, 0, missing)) if missing else matrix.contiguous()


@functools.cache
def _pool(pid: int, threads: int) -> ThreadPoolExecutor:
    """Return the threads of this process: a fork does not take them along."""
    return ThreadPoolExecutor(threads, thread_name_prefix="hrl-product")
