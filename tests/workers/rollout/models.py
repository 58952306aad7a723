"""Models that engines are tested with, and what transformers says about them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from hrl.models.checkpoint_form import CheckpointForm
from hrl.protocol import DataProto

VOCAB = 128


SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def save_tiny_llama(folder: Path, *, tied: bool = True) -> Path:
    """A random two-layer Llama in fp32 whose distributions are far from uniform."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).save_pretrained(folder)
    return folder


def save_eagle_head(folder: Path, target: Path) -> Path:
    """A head of random weights that drafts for a Llama as EAGLE does: of each token's embedding and last state."""
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(target)
    config.num_hidden_layers, config.architectures = 1, ["LlamaForCausalLM"]
    weights = {
        name.removeprefix("model."): weight.detach().clone()
        for name, weight in LlamaForCausalLM(config).named_parameters()
        if ".layers." in name and "input_layernorm" not in name
    }
    weights["fc.weight"] = 0.1 * torch.randn(config.hidden_size, 2 * config.hidden_size)
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    return folder


def save_tiny_mixture(folder: Path) -> Path:
    """The same with four experts, of which each token visits two."""
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)).save_pretrained(folder)
    return folder


def load(folder: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model as transformers has it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def response_logits(model: PreTrainedModel, out: DataProto) -> Tensor:
    """What each token of the responses was drawn from, ``(B, R, V)``, by one forward over whole rows."""
    batch, width = out.batch, out.batch["prompts"].shape[1]
    return model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
    ).logits[:, width - 1 : -1]


def log_probs_at(logits: Tensor, out: DataProto, temperature: float) -> Tensor:
    """Log-probs ``(B, R)`` of the responses."""
    log_probs = (logits.float() / temperature).log_softmax(-1)
    return log_probs.gather(-1, out.batch["responses"][..., None])[..., 0]


def response_log_probs(model: PreTrainedModel, out: DataProto, temperature: float) -> Tensor:
    """Both at once."""
    return log_probs_at(response_logits(model, out), out, temperature)


@torch.no_grad()
def routed_experts(model: PreTrainedModel, out: DataProto) -> list[np.ndarray]:
    """The experts ``(tokens, L, K)`` of each row's tokens but its last, by one forward of each, heard by hooks."""
    heard: list[Tensor] = []
    routers = [part for part in model.modules() if type(part).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(lambda _, __, output: heard.append(output[2])) for router in routers]
    rows = []
    for ids, mask in zip(out.batch["input_ids"], out.batch["attention_mask"].bool(), strict=True):
        heard.clear()
        model(input_ids=ids[mask][None, :-1])
        rows.append(torch.stack(heard, 1).numpy())
    for hook in hooks:
        hook.remove()
    return rows


@torch.no_grad()
def token_log_probs(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Log-probs ``(T - 1,)`` of tokens 1, 2, …"""
    ids = torch.tensor(token_ids)
    return model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def specs(model: PreTrainedModel, dtype: torch.dtype) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """What a trainer of this model announces."""
    form = CheckpointForm.of(model)
    return [(piece.name, dtype, piece.shape) for name, _ in model.named_parameters() for piece in form.pieces(name)]


def parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """What a trainer of this model sends."""
    form = CheckpointForm.of(model)
    return (piece for name, parameter in model.named_parameters() for piece in form.split(name, parameter.detach()))


@torch.no_grad()
def perturb(model: PreTrainedModel, amount: float, only: str = "") -> PreTrainedModel:
    """Multiplies weights whose name contains `only` with 1 ± `amount`, in place; bf16-representable afterwards."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if only in name:
            parameter.copy_((parameter * (1 + amount * noise)).bfloat16())
    return model
