"""A model's transformers configuration with `override_config` applied, the same for trainer, engine and export.

Overrides are merged into the `config.json` as it is written, and transformers builds its configuration from the result.
So `override_config` takes whatever that file may hold, in the forms that model cards show. Both

    override_config={rope_scaling: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}}
    override_config={rope_theta: 1000000}

work for a folder of any version of transformers, although newer versions keep both under `rope_parameters`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrl.errors import HrlError
from hrl.models.source import model_facts
from hrl.nearest import nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NO_PART_OF_THE_MODEL = re.compile(
    r"_name_or_path|transformers_version|architectures|(torch_|head_)?dtype|_?attn_implementation|.*_token_id"
    r"|.*dropout.*|.*_pdrop|initializer_range|use_cache|output_.*|return_dict|id2label|label2id|problem_type"
)
"""Fields that change no logit of a model that is asked by token ids, or whose dtype is compared elsewhere."""
ROPE_FORMS = ("rope_parameters", "rope_scaling")
"""The newer and the older name of the same section."""
_KEPT_WITH_ROPE = ("rope_theta", "partial_rotary_factor")


class ModelConfigError(HrlError, ValueError):
    """`override_config` does not fit the model; the message says why."""


def merge_config(written: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` with the overrides.

    Sections (`text_config`) are merged key by key. RoPE's section is replaced as a whole, because its keys depend on
    its type; only the base frequency stays, unless it is overridden too.

    Args:
        written: The `config.json`.
        override: `override_config`.

    Raises:
        ModelConfigError: A single RoPE is given for a model that has one for each kind of layer.
    """
    merged = dict(written)
    for key, value in override.items():
        if key in (*ROPE_FORMS, "rope_theta"):
            continue
        own = written.get(key)
        merged[key] = merge_config(own, value) if isinstance(own, Mapping) and isinstance(value, Mapping) else value
    if any(key in override for key in (*ROPE_FORMS, "rope_theta")):
        _merge_rope(merged, written, override)
    return merged


def _merge_rope(merged: dict[str, Any], written: Mapping[str, Any], override: Mapping[str, Any]) -> None:
    newer = written.get("rope_parameters")
    own = newer or written.get("rope_scaling") or {}
    given = next((override[form] for form in ROPE_FORMS if form in override), None)
    replaced = any(form in override for form in ROPE_FORMS)
    if _is_nested(own) and not (given and _is_nested(given) and "rope_theta" not in override):
        raise ModelConfigError(
            f"this model has one RoPE for each kind of layer: set override_config.rope_parameters with the keys "
            f"{sorted(own)}"
        )
    if given and _is_nested(given):
        rope: dict[str, Any] = {kind: {**_kept(own.get(kind) or {}), **(given[kind] or {})} for kind in given}
    else:
        rope = {**_kept(own), **(given or {})} if replaced else dict(own)
        if "rope_theta" in override:
            merged["rope_theta"] = override["rope_theta"]
            rope.pop("rope_theta", None)
            if rope or newer:
                rope["rope_theta"] = override["rope_theta"]
    for form in ROPE_FORMS:
        merged.pop(form, None)
    if rope and (newer or "rope_parameters" in override):
        if not _is_nested(rope):
            rope.setdefault("rope_type", rope.get("type", "default"))
        merged["rope_parameters"] = rope
    elif rope.keys() - set(_KEPT_WITH_ROPE):
        merged["rope_scaling"] = rope


def _kept(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {key: rope[key] for key in _KEPT_WITH_ROPE if rope.get(key) is not None}


def _is_nested(rope: Mapping[str, Any]) -> bool:
    return bool(rope) and all(value is None or isinstance(value, Mapping) for value in rope.values())


def load_config(path: Path | str, override: Mapping[str, Any], *, trust_remote_code: bool) -> PretrainedConfig:
    """Return the transformers configuration of a model folder with its overrides.

    Raises:
        ModelConfigError: An override is neither in the `config.json` nor in its class, or has an impossible value.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    own = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if not override:
        return own
    written = model_facts(Path(path))
    _check_names(own, written, override, "override_config")
    merged = merge_config(written, override)
    try:
        config = type(own).from_dict(merged)
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        raise ModelConfigError(
            f"override_config={dict(override)} does not fit {type(own).__name__}: {error}"
        ) from error
    config.name_or_path = str(path)
    return config


def _check_names(own: Any, written: Mapping[str, Any], override: Mapping[str, Any], where: str) -> None:
    known = {*written, *own.to_dict(), *own.attribute_map}
    if hasattr(own, "rope_parameters"):
        known |= {*ROPE_FORMS, *_KEPT_WITH_ROPE}
    for key, value in override.items():
        if key not in known and not hasattr(own, key):
            near = nearest(key, known)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ModelConfigError(
                f"{where} sets {key!r}, which is neither in config.json nor in {type(own).__name__}{hint}"
            )
        section = getattr(own, key, None)
        if isinstance(value, Mapping) and hasattr(section, "attribute_map"):
            _check_names(section, written.get(key) or {}, value, f"{where}.{key}")


def head_width(text: Any) -> int:
    """Return how many elements a head of a model's attention has, by the configuration of its text model."""
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def vocabulary_of(path: Path | str, override: Mapping[str, Any], *, trust_remote_code: bool) -> int:
    """Return the number of tokens that a model embeds, those included that fill its embedding up.

    Raises:
        ModelConfigError: As `load_config`.
    """
    return int(load_config(path, override, trust_remote_code=trust_remote_code).get_text_config().vocab_size)


def engine_overrides(path: Path | str, override: Mapping[str, Any], *, trust_remote_code: bool) -> dict[str, Any]:
    """Return the attributes of the configuration that the overrides change, for an engine that replaces attributes.

    vLLM builds the configuration from the folder alone and then replaces attributes. An override from which others are
    derived, or in an older form, would mean something else there than in the trainer; the attributes that it changes do
    not.

    Raises:
        ModelConfigError: As `load_config`.
    """
    if not override:
        return {}
    own, used = (load_config(path, o, trust_remote_code=trust_remote_code).to_dict() for o in ({}, override))
    return _difference(own, used)


def plain_fields(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a configuration that decide what its model computes, as data that passes through JSON."""
    return {
        name: _plain(value) for name, value in config.to_dict().items() if not _NO_PART_OF_THE_MODEL.fullmatch(name)
    }


def model_differences(own: PretrainedConfig, theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, own and other value of each field by which a model computes something else than another one.

    Fields that only one of both has are left out: an engine may have another class or release of the configuration.

    Args:
        own: Of one model.
        theirs: `plain_fields` of the other one.
    """
    ours = plain_fields(own)
    for name, value in theirs.items():
        if name not in ours and not hasattr(own, name):
            continue
        mine = ours[name] if name in ours else _plain(getattr(own, name))  # the latter under another name
        # For "no window" some folders have 0, which vLLM replaces.
        if mine != value and not (name == "sliding_window" and not mine and not value):
            yield name, mine, value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    is_plain = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else str(value)


def _difference(own: Mapping[str, Any], used: Mapping[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, value in used.items():
        if key in own and own[key] == value:
            continue
        is_section = isinstance(value, Mapping) and "model_type" in value and isinstance(own.get(key), Mapping)
        changed[key] = _difference(own[key], value) if is_section else value
    return changed
