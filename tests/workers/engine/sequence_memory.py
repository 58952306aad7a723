"""What a micro-batch takes on one rank of a sequence group: `python -m tests.workers.engine.sequence_memory`.

A Llama of four layers runs one row of 2,048 tokens forward and backward, by itself and as one of 2 and of 4 ranks. The
peak of all tensors is counted by torch's memory tracker; weights and gradients, which sharding divides anyway, are
taken off.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import LlamaConfig, LlamaForCausalLM

from hrl.models.loading import prepare
from hrl.models.ops.attention import ATTENTION_NAME
from hrl.models.ops.exchange import SequenceGroup
from hrl.models.packed_model import PackedCausalLM, TokenRows, pack_micro_batch
from hrl.workers.engine.sharding import build_sequence_group
from tests.models.tiny import run_ranks

CPU = torch.device("cpu")
DEGREES = (1, 2, 4)
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
PROMPT_TOKENS = 512


def model_of(tokens: int, *, recompute: bool) -> LlamaForCausalLM:
    """A random Llama for rows of so many tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, max_position_embeddings=tokens, attn_implementation=ATTENTION_NAME)
    model = LlamaForCausalLM(config)
    prepare(model, max_model_len=tokens, recompute=recompute)
    return model


def peak_bytes(model: LlamaForCausalLM, tokens: int, group: SequenceGroup | None) -> int:
    """The most bytes of tensors in a forward and backward of one row, less weights and gradients."""
    rng = np.random.default_rng(0)
    prompt, response = (
        rng.integers(0, SHAPE["vocab_size"], PROMPT_TOKENS),
        rng.integers(0, SHAPE["vocab_size"], (1, tokens - PROMPT_TOKENS)),
    )
    rows = TokenRows([prompt], response, np.array([response.shape[1]]), np.ones_like(response, bool))
    module: nn.Module = PackedCausalLM(model)
    model.zero_grad(set_to_none=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tracker = MemTracker()
    tracker.track_external(model, *(parameter.grad for parameter in model.parameters()))
    with tracker:
        packed = pack_micro_batch(rows, (0,), share_prefix=True, wanted="next", device=CPU, group=group)
        packed.join(tuple(module(packed, 1.0, False))[:1])[0].sum().backward()
    weights = 2 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return int(tracker.get_tracker_snapshot("peak")[CPU]["Total"]) - weights


def measured(rank: int, tokens: int) -> dict[str, dict[int, int]]:
    """By whether layers are computed again, and by degree."""
    groups = {degree: build_sequence_group(CPU, degree) for degree in DEGREES}
    found: dict[str, dict[int, int]] = {}
    for name, recompute in (("activations kept", False), ("recomputed", True)):
        model = model_of(tokens, recompute=recompute)
        found[name] = {degree: peak_bytes(model, tokens, group) for degree, group in groups.items()}
    dist.barrier()
    return found


def most_of_a_rank(folder: Path, tokens: int) -> dict[str, dict[int, int]]:
    """The fullest rank's bytes, by whether layers are computed again, and by degree."""
    ranks = run_ranks(4, folder, measured, tokens)
    return {name: {degree: max(rank[name][degree] for rank in ranks) for degree in DEGREES} for name in ranks[0]}


def main() -> None:
    """Print a line for each degree."""
    with tempfile.TemporaryDirectory() as folder:
        found = most_of_a_rank(Path(folder) / "ranks", 2048)
    for degree in DEGREES:
        figures = ", ".join(f"{name} {of[degree] / 2**20:.0f} MiB" for name, of in found.items())
        sys.stdout.write(f"degree {degree}: {figures}\n")


if __name__ == "__main__":
    main()
