"""How large a model is, from its config alone: the model is built without storage and run once.

What a packed forward keeps for its backward is counted, not guessed from the names of config fields, so it is right for
every family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hrl.errors import HrlError
from hrl.models.hf_config import head_width
from hrl.models.ops.layout import AttentionLayout, PaddedLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hrl.models.loading import ModelSource

#: Errors of a model's code that is given what it was not written for.
_FAILURES = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, NotImplementedError)
#: Tokens of that forward, enough to make what does not grow with their number negligible.
_PROBE_TOKENS = 256


class FootprintError(HrlError, ValueError):
    """A model's sizes can't be computed from its config."""


@dataclass(frozen=True)
class Footprint:
    """Sizes of a model. Bytes are for matrix products in a dtype of two bytes.

    Attributes:
        parameters: Number of weights; tied weights count once.
        embedding: Number of weights of the input embedding.
        head: Number of weights of the language-model head; 0 if it is tied to the embedding.
        largest_layer: Number of weights of the largest decoder layer.
        num_layers: Number of decoder layers.
        hidden_size: Width of the residual stream.
        vocab_size: Rows of the head.
        kept_bytes_per_token: What one layer keeps for its backward if activations are not recomputed.
        stream_bytes_per_token: What it keeps if they are recomputed: the residual stream between two layers.
        wide_kept_bytes_per_token: The same where the stream is in float32, see `hrl.models.ops.residual`.
        wide_stream_bytes_per_token: The same.
        kv_bytes_per_token: Keys and values of all layers.
        kv_heads: Heads of keys and values, of which each rank of an engine caches one at least; 1 where the cache has a
            latent vector for all heads.
        adapter: Number of weights of the adapter that is trained instead of the others; 0 if there is none.
        adapted_layers: Number of layers' matrices that it is added to.
        experts: Of `parameters`, those of a mixture's experts; 0 if it is none.
        layer_experts: Of `largest_layer`, likewise.
        routed_bytes_per_token: The residual stream of a token, once for each expert of a layer that it goes to.
        in_4_bits: Number of the weights beside it that are held in 4 bits.
        largest_tensor: Number of weights of the largest tensor that is trained.
        largest_matrix: The same of the layers' matrices, those that are stacked in one tensor each for itself.
        shorter_side: Of that matrix, the smaller of the numbers of rows and columns.
        largest_stack: Number of weights of the largest such stack that is trained; 0 if there is none.
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
    wide_kept_bytes_per_token: int
    wide_stream_bytes_per_token: int
    kv_bytes_per_token: int
    kv_heads: int
    adapter: int = 0
    adapted_layers: int = 0
    experts: int = 0
    layer_experts: int = 0
    routed_bytes_per_token: int = 0
    in_4_bits: int = 0
    largest_tensor: int = 0
    largest_matrix: int = 0
    shorter_side: int = 0
    largest_stack: int = 0

    @property
    def trained(self) -> int:
        """Number of weights that have gradients and moments."""
        return self.adapter or self.parameters

    def cache_share(self, ranks: int) -> float:
        """Return the share of a token's cache that one of an engine's ranks has: whole heads of keys and values."""
        return max(1.0 / ranks, 1.0 / self.kv_heads)


def footprint(source: ModelSource) -> Footprint:
    """Return the sizes of a causal language model.

    Args:
        source: Only config.json is read from its folder.

    Raises:
        FootprintError: The model can't be built or run without its weights.
        AdapterError: The adapter does not fit the model.
    """
    from hrl.models.adapter import AdapterError, adapted_layers, add_adapter, decoder_linears, is_part
    from hrl.models.loading import decoder_layers, hidden_matrices, load_causal_lm  # imports transformers
    from hrl.models.ops.residual import widen_residual
    from hrl.models.tensor_parallel import holds_experts

    of_layers: list[tuple[list[int], list[int]]] = []
    for packs_rows in (True, False):
        try:
            own = replace(source, enable_gradient_checkpointing=False, packs_rows=packs_rows)
            loaded = load_causal_lm(own, torch.bfloat16, meta=True).model
            if source.adapter is not None:
                add_adapter(loaded, source.adapter, torch.bfloat16)  # as FSDP2 casts it for its products
            layout = _packed() if packs_rows else PaddedLayout(np.array([_PROBE_TOKENS]))
            of_layers = [_bytes_of_layers(loaded, decoder_layers(loaded), layout)]
            widen_residual(loaded, "meta")
            of_layers.append(_bytes_of_layers(loaded, decoder_layers(loaded), layout))
            break
        except AdapterError:
            raise
        except (
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
            NotImplementedError,
        ) as error:
            if packs_rows:
                continue  # what can't run a packed row, as a layer that carries a state, may run a padded one
            name = Path(source.path).name
            raise FootprintError(
                f"{name} can't be sized without its weights ({type(error).__name__}: {error})"
            ) from error
    (kept, streams), (wide_kept, wide_streams) = of_layers
    holds_4_bits = source.adapter is not None and source.adapter.load_in_4bit
    embedding, head = loaded.get_input_embeddings(), loaded.get_output_embeddings()
    tied = embedding.weight is head.weight
    text = loaded.config.get_text_config()
    layers = [layer for layer, stream in zip(decoder_layers(loaded), streams, strict=True) if stream]  # not a tower's
    adapter = sum(parameter.numel() for name, parameter in loaded.named_parameters() if is_part(name))
    largest = max(layers, key=_count)
    mixtures = [module for module in loaded.modules() if holds_experts(module)]
    visited = (getattr(text, "num_experts_per_tok", None) or 1) if mixtures else 0
    trained = {id(p): p for name, p in loaded.named_parameters() if not adapter or is_part(name)}
    matrices = [p for p in hidden_matrices(loaded) if id(p) in trained]
    one = max((p.shape[-2:] for p in matrices), key=lambda shape: shape.numel(), default=torch.Size([0, 0]))
    return Footprint(
        parameters=_count(loaded) - adapter,
        embedding=_count(embedding),
        head=0 if tied else _count(head),
        largest_layer=_count(largest),
        num_layers=len(layers),
        hidden_size=text.hidden_size,
        vocab_size=head.weight.shape[0],
        kept_bytes_per_token=max(kept) // _PROBE_TOKENS,
        stream_bytes_per_token=max(streams) // _PROBE_TOKENS,
        wide_kept_bytes_per_token=max(wide_kept) // _PROBE_TOKENS,
        wide_stream_bytes_per_token=max(wide_streams) // _PROBE_TOKENS,
        kv_bytes_per_token=2 * _num_caches(text, len(layers)) * _cache_width(text),
        kv_heads=_kv_heads(text),
        adapter=adapter,
        adapted_layers=len(adapted_layers(loaded)),
        experts=sum(map(_count, mixtures)),
        layer_experts=sum(_count(module) for module in largest.modules() if holds_experts(module)),
        routed_bytes_per_token=2 * text.hidden_size * visited,
        in_4_bits=sum(linear.weight.numel() for linear in decoder_linears(loaded).values()) * holds_4_bits,
        largest_tensor=max(p.numel() for p in trained.values()),
        largest_matrix=one.numel(),
        shorter_side=min(one),
        largest_stack=max((p.numel() for p in matrices if p.dim() > 2), default=0),
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _num_caches(text: Any, num_layers: int) -> int:
    """Return how many layers cache keys and values: not those that have a state of one size instead."""
    kinds = getattr(text, "layer_types", None)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        return num_layers
    return sum(("attention" in kind and not kind.startswith("linear")) or kind == "hybrid" for kind in kinds)


def _cache_width(text: Any) -> int:
    """Return the number of elements that the KV cache holds for one token in one layer."""
    if getattr(text, "num_attention_heads", None) is None:
        return 0
    latent = getattr(text, "kv_lora_rank", None)
    if latent:  # vLLM caches the latent vector, which all heads share, and its rotary part
        return int(latent + text.qk_rope_head_dim)
    return 2 * _kv_heads(text) * head_width(text)


def _kv_heads(text: Any) -> int:
    if getattr(text, "kv_lora_rank", None) or getattr(text, "num_attention_heads", None) is None:
        return 1
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def _packed() -> AttentionLayout:
    """Return the layout of one sequence."""
    zeros = np.zeros(1, np.int64)
    return AttentionLayout(np.array([_PROBE_TOKENS]), zeros, zeros)


def _bytes_of_layers(
    model: PreTrainedModel, layers: list[nn.Module], layout: AttentionLayout | PaddedLayout
) -> tuple[list[int], list[int]]:
    """Run one row without storage.

    Returns:
        The bytes that autograd keeps in every layer, weights not counted, and the bytes that every layer hands on.
    """
    from hrl.models.head import last_hidden_states  # imports transformers

    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept, streams = [0] * len(layers), [0] * len(layers)
    running: list[int] = []
    seen: list[Tensor] = []  # kept alive, so that no storage's address is used twice
    storages: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if running and storage._cdata not in weights and storage._cdata not in storages:
            storages.add(storage._cdata)
            seen.append(tensor)
            kept[running[-1]] += storage.nbytes()
        return tensor

    def enter(index: int, _module: nn.Module, _inputs: Any) -> None:
        running.append(index)

    def leave(_module: nn.Module, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        streams[running.pop()] = hidden.numel() * hidden.element_size()

    handles = [layer.register_forward_pre_hook(partial(enter, index)) for index, layer in enumerate(layers)]
    handles += [layer.register_forward_hook(leave) for layer in layers]
    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device="meta")
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            last_hidden_states(model, ids, ids, layout)
    finally:
        for handle in handles:
            handle.remove()
    return kept, streams
