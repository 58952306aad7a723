"""Attention over a packed row, registered with transformers under one name, `hrl_packed`.

A model loaded with `attn_implementation=ATTENTION_NAME` takes its layout as `packing=AttentionLayout(...)` through
the keyword arguments of its forward. On CUDA the variable-length kernels run (`attention_varlen`); elsewhere, and where
no kernel computes what the model asks for, similar query runs are stacked (`attention_blocks`).

A model asks transformers for its masks (causal, sliding, chunked) and passes one to each layer. In a packed row a mask
tensor would be wrong, and large, so `packed_mask` hands out the mask's *reach* instead.

Whatever a model passes to its attention or asks of its mask is either computed or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hrl.models.ops.attention_blocks import Scoring, block_attention
from hrl.models.ops.attention_varlen import has_kernel, varlen_attention
from hrl.models.ops.exchange import SlicedLayout, own_heads, to_heads, to_tokens
from hrl.models.ops.layout import AttentionLayout, Reach

#: The name under which transformers knows this attention.
ATTENTION_NAME = "hrl_packed"

#: Further keywords that models pass and no attention computes with. All others are refused.
_WITHOUT_MEANING = frozenset(
    {
        "cache_position",
        "deterministic",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of every segment of `layout` to its prefix and itself.

    Args:
        query: `(T, Hq, D)`.
        key: `(T, Hkv, D)`, `Hq` a multiple of `Hkv`.
        value: `(T, Hkv, Dv)`.
        layout: Which token attends to which.
        scale: Factor of the scores, usually `D ** -0.5`.
        window: Sliding window in tokens; `None` is no window.
        chunk: Tokens see only their own chunk of this many tokens; `None` is one chunk.
        softcap: Scores are `softcap * tanh(scores / softcap)`; `None` is no cap.
        sinks: `(Hq,)`, one more score per head in the softmax's denominator, with gradient.

    Returns:
        `(T, Hq, Dv)`.
    """
    scoring = Scoring(scale, Reach(window, chunk), softcap)
    attend = varlen_attention if has_kernel(query, value, sinks, scoring) else block_attention
    return attend(query, key, value, sinks, layout, scoring)


def sliced_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: SlicedLayout, *, sinks: Tensor | None, **options: Any
) -> Tensor:
    """Attend as `packed_attention` does over a row of which this rank has a slice; every rank of its group calls it.

    Args:
        query: `(t, Hq, D)`, tokens of the slice.
        key: `(t, Hkv, D)`.
        value: `(t, Hkv, Dv)`.
        layout: Of the slice.
        sinks: `(Hq,)`, see `packed_attention`.
        options: The others of `packed_attention`.

    Returns:
        `(t, Hq, Dv)`; zeros for what fills up the row.
    """
    query, key, value = to_heads(query, key, value, layout)
    sinks = None if sinks is None else own_heads(sinks, layout.group)
    return to_tokens(packed_attention(query, key, value, layout.whole, sinks=sinks, **options), layout)


def transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PackedMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: AttentionLayout | SlicedLayout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend by transformers' interface: shapes `(1, heads, T, D)` in, `(1, T, heads, Dv)` out.

    Raises:
        ValueError: The model asks for something that packed attention does not have.
    """
    name = type(module).__name__
    if packing is None:
        raise ValueError(
            f"{name} ran without its packing: either this model, loaded for packed training, was not called through "
            "its engine, or its layers don't hand on their keyword arguments, and then it can't be trained packed"
        )
    unsupported = sorted(key for key, given in kwargs.items() if _asks_for_something(key, given))
    if dropout > 0:
        unsupported.append("attention_dropout (set it to 0 with model.override_config)")
    if is_causal is False or (is_causal is None and getattr(module, "is_causal", True) is False):
        unsupported.append("attention that is not causal")
    if isinstance(attention_mask, Tensor) and attention_mask is not packing.full_mask(attention_mask.device):
        unsupported.append(f"an attention mask of its own, of shape {tuple(attention_mask.shape)}")
    if unsupported:
        raise ValueError(f"{name} wants {', '.join(unsupported)}, which packed attention does not have")
    _require_fit(name, query, key, value, packing)
    reach = _reach(attention_mask, sliding_window)
    attend: Callable[..., Tensor] = sliced_attention if isinstance(packing, SlicedLayout) else packed_attention
    out = attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        packing,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=reach.window,
        chunk=reach.chunk,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


def _asks_for_something(key: str, given: Any) -> bool:
    if key == "output_attentions":
        return bool(given)
    return given is not None and key not in _WITHOUT_MEANING


def _reach(mask: Tensor | PackedMask | None, window: int | None) -> Reach:
    """Return how far back a token sees: what the mask says, as in the model's own eager attention, else the keyword."""
    if not isinstance(mask, PackedMask):
        return Reach(window)
    if mask.reach is None:
        raise ValueError(f"{mask.model_type} has an attention window of no token, through which nothing is seen")
    return mask.reach


def _require_fit(name: str, query: Tensor, key: Tensor, value: Tensor, packing: AttentionLayout | SlicedLayout) -> None:
    tokens = packing.num_tokens
    if query.shape[0] != 1 or query.shape[2] != tokens:
        raise ValueError(f"packed attention wants (1, heads, {tokens}, D), got {tuple(query.shape)}")
    if key.shape[2] != tokens or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"{name} has keys {tuple(key.shape)} and values {tuple(value.shape)} for {tokens} queries; packed "
            "attention wants one of each per token"
        )
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{name} has {query.shape[1]} query heads for {key.shape[1]} key heads, which is no multiple")


class MaskMeaningError(ValueError, AttributeError):
    """A model wants a mask that packed attention does not have, or an attribute that only a mask tensor has."""


@dataclass(frozen=True)
class PackedMask:
    """What a layer gets in place of its mask of shape `(batch, 1, queries, keys)`.

    Attributes:
        reach: How far back a token sees; `None` for a window of no token, which some families make and do not use.
        model_type: Of the model, for messages.
    """

    reach: Reach | None
    model_type: str

    def __getitem__(self, item: Any) -> PackedMask:
        """Return the mask itself where it is cut to the number of keys; other cuts are refused."""
        parts = item if isinstance(item, tuple) else (item,)
        if all(isinstance(part, slice) and part.start in (None, 0) and part.step is None for part in parts):
            return self
        raise self._computed()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by copy and pickle
            raise AttributeError(name)
        raise self._computed()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse torch's operations on a mask."""
        leaves = [*args, *(kwargs or {}).values()]
        raise next(leaf for leaf in leaves if isinstance(leaf, cls))._computed()

    def _computed(self) -> MaskMeaningError:
        return MaskMeaningError(
            f"{self.model_type} computes with its attention mask; packed attention has masks that depend on positions "
            "alone, so this model can't be trained packed"
        )


def packed_mask(
    *args: Any,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    config: Any = None,
    **kwargs: Any,
) -> PackedMask:
    """Return the mask of a packed row that a mask function of transformers stands for.

    Raises:
        MaskMeaningError: The function is not causal, or more than sliding and chunked.
    """
    model_type = getattr(config, "model_type", "the model")
    reach, is_empty = Reach(), False
    for part in _parts(mask_function):
        name = getattr(part, "__qualname__", repr(part))
        if name == "causal_mask_function":
            continue
        if name == "sliding_window_overlay.<locals>.inner_mask":
            window = _closed_over(part, "sliding_window")
            is_empty = window < 1
            reach = reach if is_empty else Reach(window, reach.chunk)
        elif name == "chunked_overlay.<locals>.inner_mask":
            reach = Reach(reach.window, _closed_over(part, "chunk_size"))
        else:
            raise MaskMeaningError(
                f"{model_type} asks for the attention mask {name}; packed attention knows causal, sliding and chunked "
                "masks"
            )
    if not any(getattr(part, "__qualname__", "") == "causal_mask_function" for part in _parts(mask_function)):
        raise MaskMeaningError(f"{model_type} asks for an attention mask that is not causal")
    return PackedMask(None if is_empty else reach, model_type)


def _parts(mask_function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the functions that `and_masks` joined, or the function itself."""
    if getattr(mask_function, "__qualname__", "") != "and_masks.<locals>.and_mask":
        return [mask_function]
    return [leaf for part in _closed_over(mask_function, "mask_functions") for leaf in _parts(part)]


def _closed_over(function: Any, name: str) -> Any:
    """Return the value of a variable that `function` closes over."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, transformers_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_mask)
