"""How large a model is, from its config alone: it is built without storage, and one forward is run on it.

What a packed forward keeps for its backward is counted, not guessed from the names of config fields, so that it is
right for every family.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hrl.errors import HrlError
from hrl.models.head import backbone_of
from hrl.models.loading import ModelSource, load_causal_lm
from hrl.models.ops.layout import AttentionLayout

#: Tokens of that forward: enough that what does not grow with the tokens is small beside what does.
_PROBE_TOKENS = 256


class FootprintError(HrlError, ValueError):
    """A model's sizes can't be found from its config."""


@dataclass(frozen=True)
class Footprint:
    """Sizes of one model. Bytes are those of products in a dtype of two bytes.

    Attributes:
        parameters: Number of weights, tied ones once.
        embedding: Weights of the input embedding.
        head: Weights of the language-model head; 0 where it is tied to the embedding.
        largest_layer: Weights of the largest decoder layer.
        num_layers: Number of decoder layers.
        hidden_size: Width of the residual stream.
        vocab_size: Rows of the head.
        kept_bytes_per_token: What one layer keeps for its backward, per token, if activations are not recomputed.
        stream_bytes_per_token: What it keeps if they are: the residual stream between two layers, per token.
        kv_bytes_per_token: Keys and values of one token in all layers.
    """

    parameters: int
    embedding: int
    head: int
    largest_layer: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    kept_bytes_per_token: int
    stream_bytes_per_token: int
    kv_bytes_per_token: int


def footprint(source: ModelSource) -> Footprint:
    """Return the sizes of a causal language model.

    Args:
        source: Of its folder only config.json is read.

    Raises:
        FootprintError: The model can't be built or run without its weights.
    """
    try:
        loaded = load_causal_lm(replace(source, enable_gradient_checkpointing=False), torch.bfloat16, meta=True).model
        layers = _layers(loaded)
        with _kept_bytes(loaded, layers) as kept:
            streams = _forward(loaded, layers)
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, NotImplementedError) as error:
        name = Path(source.path).name
        raise FootprintError(f"{name} can't be sized without its weights ({type(error).__name__}: {error})") from error
    embedding, head = loaded.get_input_embeddings(), loaded.get_output_embeddings()
    tied = embedding.weight is head.weight
    text = loaded.config.get_text_config()
    return Footprint(
        parameters=_count(loaded),
        embedding=_count(embedding),
        head=0 if tied else _count(head),
        largest_layer=max(map(_count, layers)),
        num_layers=len(layers),
        hidden_size=text.hidden_size,
        vocab_size=head.weight.shape[0],
        kept_bytes_per_token=max(kept) // _PROBE_TOKENS,
        stream_bytes_per_token=max(streams) // _PROBE_TOKENS,
        kv_bytes_per_token=2 * 2 * len(layers) * _kv_width(text),
    )


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers, which are sharded as units of their own."""
    names = set(model._no_split_modules or ())  # type: ignore[arg-type]
    return [module for module in model.modules() if type(module).__name__ in names]


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _kv_width(text: Any) -> int:
    """Return the elements of one token's keys in one layer (its values are as many)."""
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int((getattr(text, "num_key_value_heads", None) or heads) * head_dim)


def _forward(model: Any, layers: list[nn.Module]) -> list[int]:
    """Run one packed row without storage; bytes of what every layer hands on."""
    streams: list[int] = []

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        streams.append(hidden.numel() * hidden.element_size())

    handles = [layer.register_forward_hook(note) for layer in layers]
    zeros, ids = np.zeros(1, np.int64), torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device="meta")
    layout = AttentionLayout(np.array([_PROBE_TOKENS]), zeros, zeros)
    try:
        mask = layout.full_mask(ids.device)
        backbone_of(model)(input_ids=ids, attention_mask=mask, position_ids=ids, packing=layout, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return streams


@contextmanager
def _kept_bytes(model: nn.Module, layers: list[nn.Module]) -> Iterator[list[int]]:
    """Yield a list that fills with the bytes which autograd keeps in each layer, weights not counted."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept = [0] * len(layers)
    running: list[int] = []
    seen: list[Tensor] = []  # kept alive, so that no storage's address is used twice
    storages: set[int] = set()

    def enter(index: int) -> Any:
        return lambda _module, _inputs: running.append(index)

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        running.pop()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if running and storage._cdata not in weights and storage._cdata not in storages:
            storages.add(storage._cdata)
            seen.append(tensor)
            kept[running[-1]] += storage.nbytes()
        return tensor

    handles = [layer.register_forward_pre_hook(enter(index)) for index, layer in enumerate(layers)]
    handles += [layer.register_forward_hook(leave) for layer in layers]
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield kept
    finally:
        for handle in handles:
            handle.remove()
