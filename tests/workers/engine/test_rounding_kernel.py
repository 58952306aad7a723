"""The Triton kernel of stochastic rounding: its numbers by the interpreter, and that it compiles for cards not here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, not a GPU")

PROGRAM = """
import torch
from hrl.workers.engine.rounding import by_kernel, round_stochastically, rounding_key

for count, first in ((1, 0), (5000, 3), (4096, 2**31 - 100), (3000, 2**32 - 7), (3000, 2**33 + 5)):
    wide = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 1e-2
    special = [torch.nan, torch.inf, -torch.inf, 3.4028e38, -3.4028e38, 0.0, -0.0, 1e-42]
    wide[: len(special)] = torch.tensor(special)[:count]
    for step in range(6):
        key = rounding_key(7, "w", step)
        got, want = by_kernel(wide, key, first), round_stochastically(wide, key, first)
        same = (got.view(torch.int16) == want.view(torch.int16)) | (got.isnan() & want.isnan())
        assert same.all(), (count, first, step, wide[~same], got[~same], want[~same])
        assert count < 3000 or (got != wide.bfloat16())[len(special) :].float().mean() > 0.1
"""


def test_every_number_is_rounded_as_on_a_cpu():
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles(capability, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from hrl.workers.engine import rounding_kernel

        arguments = {"wide": "*fp32", "out": "*bf16", "count": "i32", "key": "i32", "low": "i32", "BLOCK": "constexpr"}
        source = ASTSource(rounding_kernel._round, arguments, {"BLOCK": rounding_kernel._BLOCK})
        assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
