"""How many FLOPs a packed forward or update takes, and how many the device can do in a second."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hrl.models.four_bit import Linear4bit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Dense bfloat16 FLOP/s, from the vendors' data sheets. Of several names in a card's name the longest counts.
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
    "RTX 3090": 71e12,
    "RTX 4090": 165e12,
    "RTX 5090": 209e12,
}
BACKWARD_OVER_FORWARD = 2.0
#: Names of the number of experts that a token visits, in configurations.
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts")


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a transformer's forward.

    Attributes:
        per_token: For one token through the layers, without attention scores.
        per_pair: For one query–key pair, over all layers and heads.
        per_head_token: For one token through the language-model head.
        frozen_per_token: That part of `per_token` whose weights get no gradient.
        frozen_per_head_token: The same of `per_head_token`.
    """

    per_token: float
    per_pair: float
    per_head_token: float
    frozen_per_token: float = 0.0
    frozen_per_head_token: float = 0.0

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFlops | None:
        """Count two operations for each weight that a token of text is multiplied with, those of visited experts only.

        Attention scores are counted from the shapes of the modules that compute them, without sliding windows. Anything
        else that depends on the sequence (the states of linear attention) is small and left out.

        Args:
            model: On any device, sharded or without storage.

        Returns:
            None if the model can't be counted, because its experts or heads are not in the usual places.
        """
        text, config = model.get_decoder(), model.config.get_text_config()
        head = model.get_output_embeddings()
        weights = frozen = 0.0
        for name, module in text.named_modules():
            if isinstance(module, nn.Embedding) or module is head:
                continue
            share = _visited_share(text, config, name, module)
            if share is None:
                return None
            if isinstance(module, Linear4bit):  # whose parameter is bytes
                weights += share * module.in_features * module.out_features
                frozen += share * module.in_features * module.out_features
                continue
            matrices = [p for p in module.parameters(recurse=False) if p.ndim >= 2]
            weights += share * sum(p.numel() for p in matrices)
            frozen += share * sum(p.numel() for p in matrices if not p.requires_grad)
        per_pair = _per_pair(text, config)
        if per_pair is None:
            return None
        per_head_token = 0.0 if head is None else 2.0 * head.weight.numel()
        head_is_frozen = head is not None and not head.weight.requires_grad
        return cls(
            per_token=2.0 * weights,
            per_pair=per_pair,
            per_head_token=per_head_token,
            frozen_per_token=2.0 * frozen,
            frozen_per_head_token=per_head_token * head_is_frozen,
        )

    def forward(self, tokens: float, pairs: float, head_tokens: float) -> float:
        """Return the FLOPs of one forward over a packed row."""
        return self.per_token * tokens + self.per_pair * pairs + self.per_head_token * head_tokens

    def update(self, tokens: float, pairs: float, head_tokens: float) -> float:
        """Return the FLOPs of forward and backward, without what is recomputed to save memory."""
        # A weight takes part in two products of the backward pass, of which one gives its own gradient.
        spared = self.frozen_per_token * tokens + self.frozen_per_head_token * head_tokens
        return (1.0 + BACKWARD_OVER_FORWARD) * self.forward(tokens, pairs, head_tokens) - spared


def _visited_share(text: nn.Module, config: Any, name: str, module: nn.Module) -> float | None:
    """Return the share of a module's own weights that a token uses; None for experts that can't be counted."""
    parts = name.split(".")
    if "experts" not in parts or not any(p.ndim >= 2 for p in module.parameters(recurse=False)):
        return 1.0
    place = parts.index("experts")
    experts = text.get_submodule(".".join(parts[: place + 1]))
    is_list = isinstance(experts, nn.ModuleList)
    counts = {len(experts)} if is_list else {p.shape[0] for p in experts.parameters(recurse=False) if p.ndim == 3}
    visited = _experts_per_token(text.get_submodule(".".join(parts[:place])), config)
    if len(counts) != 1 or visited is None:
        return None
    return visited / counts.pop()


def _experts_per_token(block: nn.Module, config: Any) -> int | None:
    """Return the number of experts that a token visits, from the router beside them or else from the configuration."""
    for module in (block, *block.children()):
        if isinstance(getattr(module, "top_k", None), int):
            return module.top_k
    found = (getattr(config, name, None) for name in _EXPERTS_PER_TOKEN)
    return next((number for number in found if isinstance(number, int)), None)


def _per_pair(text: nn.Module, config: Any) -> float | None:
    """Return the FLOPs of a query–key pair: the score over the width of queries, the output over that of values."""
    total = 0.0
    for module in text.modules():
        if not isinstance(getattr(module, "is_causal", None), bool):
            continue  # transformers' attention modules say whether they are causal
        heads = getattr(module, "num_heads", None) or getattr(config, "num_attention_heads", None)
        widths = (getattr(module, name, None) for name in ("qk_head_dim", "head_dim", "head_size"))
        query = next((width for width in widths if width is not None), None)
        if not isinstance(heads, int) or not isinstance(query, int):
            return None
        value = getattr(module, "v_head_dim", None) or query
        total += 2.0 * heads * (query + value)
    return total


def peak_flops(device: torch.device) -> float | None:
    """Return the FLOP/s of a device: on CUDA from the table (None for an unknown card), on a CPU measured."""
    if device.type == "cuda":
        return peak_flops_of_card(torch.cuda.get_device_name(device))
    return _measured_cpu_flops(torch.get_num_threads())


def peak_flops_of_card(name: str) -> float | None:
    """Return the bfloat16 FLOP/s of a card by the name that CUDA gives it; None for an unknown card."""
    # Only whole words count: an L40 is no L4, and an RTX A1000 no A100.
    matches = [key for key in PEAK_FLOPS if re.search(rf"\b{re.escape(key)}\b", name)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


@cache
def _measured_cpu_flops(threads: int) -> float:
    """Return the rate of a square product in float32 or bfloat16, whichever is faster. Takes about 0.2 s."""
    return max(_product_flops(dtype) for dtype in (torch.float32, torch.bfloat16))


def _product_flops(dtype: torch.dtype) -> float:
    size = 1024
    # The global generator is part of a checkpoint: a resumed run must draw what an uninterrupted one draws.
    a = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
