"""Which dtype `auto` is: the one in which this hardware multiplies matrices fastest without losing what is learnt.

GPUs, and CPUs with matrix instructions for bfloat16 (AMX, AVX512-BF16, Arm's), take bfloat16. Every other CPU has to
widen each product to float32 and round it back: there, bfloat16 takes two to three times as long as float32 and is
less exact.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from hrl.config.section import Section

SectionT = TypeVar("SectionT", bound=Section)

#: Names in `torch.cpu.get_capabilities()` of instructions that multiply bfloat16 matrices.
BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16")


def fastest_dtype(device: str) -> str:
    """Return `bfloat16` or `float32`, for `device` = `cpu` (this machine's) or `cuda`."""
    if device != "cpu":
        return "bfloat16"
    capabilities = torch.cpu.get_capabilities()
    return "bfloat16" if any(capabilities.get(name, False) for name in BF16_INSTRUCTIONS) else "float32"


def with_dtypes(config: SectionT, device: str) -> SectionT:
    """Return the configuration with a dtype in the place of every `dtype=auto`.

    Decided once, on the driver: ranks that decided for themselves could disagree, and then exchange bytes of two kinds.
    """
    changes: dict[str, object] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Section):
            changes[name] = with_dtypes(value, device)
        elif name == "dtype" and value == "auto":
            changes[name] = fastest_dtype(device)
    return config.model_copy(update=changes)
