"""How much arithmetic a packed forward or backward is, and how much the device could do."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

#: Dense bfloat16 FLOP/s without sparsity, from the vendors' data sheets; the longest name in a card's name wins.
PEAK_FLOPS = {
    "A10": 125e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "H20": 148e12,
    "H800": 989e12,
    "L4": 121e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "RTX 5090": 209e12,
}
BACKWARD_OVER_FORWARD = 2.0


@dataclass(frozen=True)
class ModelFlops:
    """Forward cost of a transformer, from its config.

    Attributes:
        per_token: of one token through the layers, attention scores excluded.
        per_pair: of one query–key pair, over all layers and heads.
        per_head_token: of one token through the language-model head.
    """

    per_token: float
    per_pair: float
    per_head_token: float

    @classmethod
    def of(cls, config: Any) -> ModelFlops:
        """Counts multiplications and additions of all matrix products; of the experts those a token visits."""
        c = config.get_text_config()
        heads = c.num_attention_heads
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // heads
        kv_heads = getattr(c, "num_key_value_heads", None) or heads
        attention = c.hidden_size * head_dim * (2 * heads + 2 * kv_heads)
        experts = getattr(c, "num_experts_per_tok", None) or 1
        width = (getattr(c, "moe_intermediate_size", None) if experts > 1 else None) or c.intermediate_size
        mlp = 3 * c.hidden_size * width * experts
        return cls(
            per_token=2.0 * c.num_hidden_layers * (attention + mlp),
            per_pair=4.0 * c.num_hidden_layers * heads * head_dim,
            per_head_token=2.0 * c.hidden_size * c.vocab_size,
        )

    def forward(self, tokens: int, pairs: int, head_tokens: int) -> float:
        """FLOPs of one forward over a packed row."""
        return self.per_token * tokens + self.per_pair * pairs + self.per_head_token * head_tokens

    def update(self, tokens: int, pairs: int, head_tokens: int) -> float:
        """FLOPs of forward and backward, without what is recomputed to save memory."""
        return (1.0 + BACKWARD_OVER_FORWARD) * self.forward(tokens, pairs, head_tokens)


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of one device: from the table on CUDA (``None`` for an unknown card), measured once on a CPU."""
    if device.type == "cuda":
        return peak_flops_of_card(torch.cuda.get_device_name(device))
    return _measured_cpu_flops(torch.get_num_threads())


def peak_flops_of_card(name: str) -> float | None:
    """bfloat16 FLOP/s of a card by the name CUDA gives it; ``None`` for an unknown one.

    Only whole words count: an L40 is no L4, and an RTX A1000 no A100.
    """
    matches = [key for key in PEAK_FLOPS if re.search(rf"\b{re.escape(key)}\b", name)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


@cache
def _measured_cpu_flops(threads: int) -> float:
    """The best of a few square products in float32 and in bfloat16, whichever this CPU is faster at; about 0.2 s."""
    return max(_product_flops(dtype) for dtype in (torch.float32, torch.bfloat16))


def _product_flops(dtype: torch.dtype) -> float:
    size = 1024
    # A generator of its own: the global one is part of a checkpoint, and a resume must not draw what a run does not.
    a = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
