"""The smallest copy of a model's configuration that computes in the same way.

It keeps what decides how a family computes: kinds of layers and their order, widths of heads, the ratio of query to key
heads, numbers of experts, every switch. It reduces what only costs time: vocabulary, width, repeated layers. Lengths at
which something changes (sliding windows, chunks, the pre-training length of a RoPE) become a few tokens if the run's
sequences are long enough to cross them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from hrl.models.pictures import sees

#: A length that a cut's short sequences cross, and one that only a packed row of them reaches: a model that counts
#: positions over the row instead of the sequence changes there.
CROSSED_TOKENS, UNREACHED_TOKENS = 8, 32
#: Words in the names of config fields that are lengths in tokens at which a layer computes differently.
_LENGTHS = (
    "sliding_window",
    "window_size",
    "chunk_size",
    "local_attention",
    "block_size",
    "index_topk",
    "compress_rate",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "floor_scale",
    "original_max_position_embeddings",
)
WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
_VOCABULARY, _POSITIONS, _WIDTH, _MLA_HIDDEN, _WIDE_HEAD = 128, 64, 16, 256, 128
_MIN_LAYERS = 2
#: Two copies of a cut and their gradients in float32 take 16 bytes for each parameter.
MAX_PARAMETERS = 200_000_000
#: Attributes in which layers of the same kind differ.
_NUMBERS = ("layer_idx", "layer_id", "layer_number", "block_idx", "num_hidden_layers", "training")
#: What families call the parts of a state-space layer, whose inner width is a multiple of the model's: that factor,
#: heads, the width of a head, groups of heads.
_EXPAND = ("mamba_expand", "expand")
_STATE_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
_STATE_WIDTH = ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
_STATE_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
#: What Qwen2-VL's tower calls its width.
_TOWER_WIDTH = "embed_dim"
_TOWER_BLOCKS, _TOWER_HEADS, _TOWER_FEED_FORWARD = 2, 2, 32
#: Heads of a state-space layer in a model without attention.
_FEW_STATE_HEADS = 4
#: Width of a model without heads of any kind.
_HEADLESS = 256


def cuts(
    config: PretrainedConfig, max_length: int, build: Callable[[PretrainedConfig], PreTrainedModel]
) -> Iterator[PretrainedConfig]:
    """Yield smaller copies of `config`, the smallest first. A later one may work where widths depend on each other.

    Args:
        config: The model's.
        max_length: The longest sequence of the run, in tokens.
        build: Builds the model of a config.
    """
    for change in (_narrow, _shorten):
        candidate = changed(config, change, max_length)
        if candidate is None:
            continue
        for smaller in (first_of_every_kind(candidate, build), candidate):
            if smaller is not None and _num_parameters(smaller, build) <= MAX_PARAMETERS:
                yield smaller


def _num_parameters(config: PretrainedConfig, build: Callable[[PretrainedConfig], PreTrainedModel]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


def changed(
    config: PretrainedConfig, change: Callable[[dict[str, Any], PretrainedConfig, int], None], max_length: int
) -> PretrainedConfig | None:
    """Return a copy of the configuration with `change` applied to all its sections; None if that is not valid."""
    from huggingface_hub.errors import StrictDataclassError

    fields = config.to_dict()
    for name, section in vars(config).items():
        if isinstance(section, PretrainedConfig):
            inner = changed(section, change, max_length)
            if inner is None:
                return None
            fields[name] = inner.to_dict()
    fields.pop("quantization_config", None)
    change(fields, config, max_length)
    try:
        return type(config).from_dict(fields)
    except (StrictDataclassError, ValueError, TypeError, KeyError, ZeroDivisionError):
        return None


def _shorten(fields: dict[str, Any], config: PretrainedConfig, max_length: int) -> None:
    """Reduce the vocabulary and the lengths at which anything changes."""
    for key, value in fields.items():
        if isinstance(value, dict):
            if "model_type" not in value:
                _shorten(value, config, max_length)
        elif not isinstance(key, str) or isinstance(value, bool) or not isinstance(value, int):
            continue
        elif "vocab_size" in key:
            fields[key] = min(value, _VOCABULARY)
        elif key.endswith("token_id") and value >= _VOCABULARY:
            fields[key] = 0
        elif "topk_blocks" in key:
            fields[key] = 1
        elif any(word in key for word in _LENGTHS) and value > 0:
            fields[key] = min(value, CROSSED_TOKENS) if value < max_length else UNREACHED_TOKENS
        elif key in ("max_position_embeddings", "n_positions"):
            fields[key] = max(value, _POSITIONS)


def _narrow(fields: dict[str, Any], config: PretrainedConfig, max_length: int) -> None:
    """Reduce the number of heads, with all that depends on it, and the width of feed-forward layers."""
    _shorten(fields, config, max_length)
    hidden = fields.get(config.attribute_map.get("hidden_size", "hidden_size"))
    resize(fields, config, _WIDTH, _few_heads)
    _few_linear_heads(fields)
    if isinstance(hidden, int):
        _fit_states(fields, config, hidden)


def _few_linear_heads(fields: dict[str, Any]) -> None:
    """Return two heads, or two key heads with as many value heads for each, to layers of linear attention."""
    counts = {key: value for key, value in fields.items() if key.startswith("linear_num_") and isinstance(value, int)}
    fewest = min(counts.values(), default=0)
    if fewest > 2 and all(value % fewest == 0 for value in counts.values()):
        fields |= {key: value // fewest * 2 for key, value in counts.items()}


def _fit_states(fields: dict[str, Any], config: PretrainedConfig, hidden: int) -> None:
    """Let the heads of state-space layers fill their inner width again, a multiple of what was `hidden`."""
    found = [_first_number(fields, names) for names in (_EXPAND, _STATE_HEADS, _STATE_WIDTH)]
    if any(name is None for name in found):
        if not any("heads" in key for key in fields):
            for key, value in fields.items():
                if key.endswith("hidden_size") and value == hidden:
                    fields[key] = min(hidden, _HEADLESS)
        return
    expand, heads, width = (str(name) for name in found)
    if fields[expand] * hidden != fields[heads] * fields[width]:
        return  # the inner width is a field of its own
    name = config.attribute_map.get("hidden_size", "hidden_size")
    if fields[name] == hidden and "num_attention_heads" not in fields:
        fields[name] = min(fields[heads], _FEW_STATE_HEADS) * fields[width] // fields[expand]
    inner = fields[expand] * fields[name]
    if inner % fields[width] == 0:
        fields[heads] = inner // fields[width]
    else:
        fields[width] = inner // fields[heads]
    groups = _first_number(fields, _STATE_GROUPS)
    if groups is not None:
        fields[groups] = gcd(fields[groups], fields[heads])


def _first_number(fields: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """Return the first of the names whose field is a whole number."""
    return next((name for name in names if isinstance(fields.get(name), int)), None)


class Heads(NamedTuple):
    """Sizes of a model's attention.

    Attributes:
        queries: Number of query heads.
        keys: Number of key heads; None where the family does not tell them from query heads.
        width: Width of a head.
    """

    queries: int
    keys: int | None
    width: int


def _few_heads(heads: Heads) -> Heads:
    """Return two key heads with one or two query heads for each, or a wide one with two: two ranks can share them."""
    if heads.keys is None:
        return heads._replace(queries=min(heads.queries, 2))
    keys = min(heads.keys, 1 if heads.width > _WIDE_HEAD and heads.queries > heads.keys else 2)
    return heads._replace(queries=keys * min(max(heads.queries // heads.keys, 1), 2), keys=keys)


def resize(
    fields: dict[str, Any], config: PretrainedConfig, feed_forward: int, heads_of: Callable[[Heads], Heads]
) -> None:
    """Reduce the width of feed-forward layers and the number of heads, with all that depends on it.

    Args:
        fields: Fields of `config`, which are changed.
        config: Tells the family's names of fields.
        feed_forward: The largest width of feed-forward layers.
        heads_of: Returns the heads in place of the config's; a section without heads keeps its width.
    """
    for key, value in fields.items():
        if any(word in key for word in WIDTHS):
            if isinstance(value, list):
                fields[key] = [min(item, feed_forward) for item in value]
            elif isinstance(value, int):
                fields[key] = min(value, feed_forward)
    names = {name: config.attribute_map.get(name, name) for name in ("hidden_size", "num_attention_heads")}
    if isinstance(fields.get(_TOWER_WIDTH), int) and "depth" in fields:  # what it calls hidden is the decoder's width
        names["hidden_size"] = _TOWER_WIDTH
    hidden, queries = (fields.get(name) for name in names.values())
    if not isinstance(hidden, int) or not isinstance(queries, int):
        return
    keys = fields.get("num_key_value_heads")
    given = Heads(queries, keys if isinstance(keys, int) else None, fields.get("head_dim") or hidden // queries)
    fewer = heads_of(given)
    if fewer.keys is not None:
        fields["num_key_value_heads"] = fewer.keys
    if fields.get("head_dim"):
        fields["head_dim"] = fewer.width
    narrower = _MLA_HIDDEN if fields.get("kv_lora_rank") else fewer.queries * fewer.width
    fields[names["num_attention_heads"]] = fewer.queries
    for key, value in fields.items():  # the width may have several names
        if value == hidden and not isinstance(value, bool) and any(word in key for word in ("size", "width", "dim")):
            fields[key] = narrower
        elif key.endswith("hidden_size") and isinstance(value, int) and value > hidden and value % hidden == 0:
            fields[key] = value // hidden * narrower
    fields[names["hidden_size"]] = narrower


def first_of_every_kind(
    config: PretrainedConfig, build: Callable[[PretrainedConfig], PreTrainedModel]
) -> PretrainedConfig | None:
    """Return the configuration with only its first layers, up to the last new kind; None if kinds can't be told."""
    settings = config.get_text_config()
    depth = settings.num_hidden_layers
    per_layer = [key for key, value in settings.to_dict().items() if isinstance(value, list) and len(value) == depth]
    kinds = _kinds_of_layers(config, build, per_layer)
    count = max(_MIN_LAYERS, 1 + max(kinds.index(kind) for kind in set(kinds)))
    if count >= depth:
        return None

    def keep_first(fields: dict[str, Any], section: PretrainedConfig, _: int) -> None:
        name = section.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        if fields.get(name) == depth:
            fields |= {name: count} | {key: fields[key][:count] for key in per_layer if key in fields}

    shallow = changed(config, keep_first, 0)
    if shallow is None or _kinds_of_layers(shallow, build, per_layer) != kinds[:count]:
        return None
    return shallow


def _kinds_of_layers(
    config: PretrainedConfig, build: Callable[[PretrainedConfig], PreTrainedModel], per_layer: list[str]
) -> list[str]:
    """Return what tells decoder layers apart: classes, shapes, settings, and their entries in lists."""
    with torch.device("meta"):
        model = build(config)
    settings = model.config.get_text_config()
    count = settings.num_hidden_layers
    decoder = model.get_decoder() if sees(model.config) else model  # a tower may have as many blocks
    stacks = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    lists = [getattr(settings, key) for key in per_layer]
    return [repr(([_kind(stack[i]) for stack in stacks], [_plain(v[i]) for v in lists])) for i in range(count)]


def _kind(layer: nn.Module) -> list[Any]:
    parts: list[Any] = []
    for name, module in layer.named_modules():
        settings = {k: _plain(v) for k, v in vars(module).items() if k not in _NUMBERS and not k.startswith("_")}
        shapes = [(k, tuple(p.shape)) for k, p in module.named_parameters(recurse=False)]
        parts.append((name, type(module).__name__, sorted(settings.items()), shapes))
    return parts


def _plain(value: Any) -> str:
    """Return a switch, name or whole number as text; of a float only the type, since it only scales."""
    return repr(value) if isinstance(value, (bool, int, str, type(None))) else type(value).__name__


def with_small_tower(cut: PretrainedConfig, whole: PretrainedConfig) -> PretrainedConfig:
    """Return the cut with a tower of two narrow blocks, of which one does whatever only some blocks of it do.

    Args:
        cut: Of the text decoder.
        whole: The model's, whose tower it is: windows and patches keep their sizes.
    """
    fields = cut.to_dict()
    vision: dict[str, Any] = whole.vision_config.to_dict()
    fields["vision_config"] = vision
    width = _TOWER_WIDTH if _TOWER_WIDTH in vision else "hidden_size"
    out = "out_hidden_size" if "out_hidden_size" in vision else "hidden_size"
    heads = vision["num_heads"]
    vision[width] = vision[width] // heads * _TOWER_HEADS
    vision["num_heads"], vision["depth"] = _TOWER_HEADS, _TOWER_BLOCKS
    if "intermediate_size" in vision:
        vision["intermediate_size"] = _TOWER_FEED_FORWARD
    vision[out] = cut.get_text_config().hidden_size
    for name, value in vision.items():
        if name.endswith("_indexes") and isinstance(value, list):
            vision[name] = [0] if value else []
    return type(cut).from_dict(fields)
