"""Loading transformers models for packed training.

Loading executes nothing from the model folder: weights are read from safetensors only, and remote code runs only where
`trust_remote_code` says so. Whether a family may be trained packed is not known here: `hrl.models.probe`
compares.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from hrl.models.hf_config import load_config
from hrl.models.ops.attention import ATTENTION_NAME
from hrl.models.ops.residual import widen_residual
from hrl.models.ops.rms_norm import use_fused_rms_norms
from hrl.models.ops.rope import fix_rope_frequencies

logger = logging.getLogger(__name__)

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "float64": torch.float64,
}


#: Parts of names of config fields that are chances: of a dropped activation, layer or token, of noise in a router.
_CHANCES = ("drop", "jitter")


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of a configuration's name.

    Raises:
        ValueError: Unknown name.
    """
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True)
class ModelSource:
    """Which model a role loads, and how.

    Attributes:
        path: A local folder.
        override_config: Fields of its config.json to replace.
        enable_gradient_checkpointing: Recompute activations in the backward pass.
        share_prefix: Compute equal prompts of a micro-batch once.
        trust_remote_code: Its folder may run code.
        max_model_len: The longest sequence of the run in tokens, for which the engine is opened as well.
    """

    path: str
    override_config: Mapping[str, Any]
    enable_gradient_checkpointing: bool
    share_prefix: bool
    trust_remote_code: bool
    max_model_len: int

    @classmethod
    def to_look_at(
        cls, folder: Path, override_config: Mapping[str, Any], *, trust_remote_code: bool, max_model_len: int
    ) -> ModelSource:
        """For a look before the run, to which the settings of training do not matter."""
        return cls(str(folder), override_config, False, True, trust_remote_code, max_model_len)


@dataclass(frozen=True)
class Loaded:
    """A model as it was loaded.

    Attributes:
        model: The transformers model, on the CPU (or without storage on the meta device).
        source_config: The folder's config with `override_config`, before packed training changed it, for the export.
        fresh_head: The scalar head was not in the checkpoint and starts at zero.
    """

    model: PreTrainedModel
    source_config: PretrainedConfig
    fresh_head: bool = False


def load_causal_lm(config: Any, dtype: torch.dtype, *, meta: bool = False) -> Loaded:
    """Load a causal language model.

    Args:
        config: A `ModelSource`, or what has its attributes.
        dtype: Of the parameters.
        meta: Build the structure without storage (the weights will come from another rank).

    Raises:
        ValueError: The folder lacks some of its weights.
        ModelConfigError: `override_config` does not fit the model.
    """
    source, used = _configs(config)
    options = {"trust_remote_code": config.trust_remote_code, "attn_implementation": ATTENTION_NAME, "dtype": dtype}
    if meta:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(used, **options)
    else:
        model, info = AutoModelForCausalLM.from_pretrained(
            config.path, config=used, use_safetensors=True, output_loading_info=True, **options
        )
        _require_weights(config.path, set(info["missing_keys"]))
    return Loaded(_prepared(model, config), source)


def load_scalar_model(config: Any, dtype: torch.dtype, *, meta: bool = False, head_required: bool = False) -> Loaded:
    """Load a backbone with a scalar head, as transformers' sequence classifier with one label.

    A classifier's folder brings its head. A causal language model's folder has none: the head then starts at zero, so
    that every value is 0 until it is trained, whatever the seed.

    Args:
        config: As for `load_causal_lm`.
        dtype: Of the parameters.
        meta: Build the structure without storage.
        head_required: Refuse a folder without a head (a reward model that nobody trained).

    Raises:
        ValueError: As for `load_causal_lm`; or the folder's head has another number of labels, or none is there.
    """
    source, used = _configs(config)
    is_classifier = any("ForSequenceClassification" in name for name in source.architectures or ())
    if is_classifier and source.num_labels != 1:
        raise ValueError(f"{config.path} has {source.num_labels} labels; a value or reward model has exactly one")
    used.num_labels = 1
    options = {"trust_remote_code": config.trust_remote_code, "attn_implementation": ATTENTION_NAME, "dtype": dtype}
    if meta:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(used, **options)
        return Loaded(_prepared(model, config), source)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        config.path, config=used, use_safetensors=True, output_loading_info=True, **options
    )
    missing = set(info["missing_keys"])
    fresh = "score.weight" in missing
    _require_weights(config.path, missing - {"score.weight", "score.bias"})
    if fresh and head_required:
        raise ValueError(
            f"{config.path} has no scalar head (score.weight): a reward model must be a sequence classifier that was "
            "trained to score"
        )
    if fresh:
        nn.init.zeros_(model.score.weight)
        logger.info("%s has no scalar head: the value head starts at zero", config.path)
    return Loaded(_prepared(model, config), source, fresh_head=fresh)


def _require_weights(path: str, missing: set[str]) -> None:
    """transformers fills what a folder lacks with random numbers."""
    if missing:
        first = ", ".join(sorted(missing)[:3])
        raise ValueError(
            f"{path} lacks {len(missing)} of its model's weights ({first}{', …' if len(missing) > 3 else ''}): its "
            "files are incomplete, or its config.json is another model's"
        )


def _configs(config: Any) -> tuple[PretrainedConfig, PretrainedConfig]:
    """Return the folder's config with `override_config` twice: one to keep, one to build the model from."""
    source, used = (
        load_config(config.path, config.override_config, trust_remote_code=config.trust_remote_code) for _ in range(2)
    )
    return source, used


def prepare(model: PreTrainedModel, *, max_model_len: int, recompute: bool) -> None:
    """Make a transformers model what the engine runs, whether it is trained or only asked.

    It stays in evaluation mode also in the update: whatever reads `module.training` (dropout of any kind, noise in
    routers, layer drop) would make the update's log-probs other ones than the sampler's.

    Args:
        model: Loaded with `attn_implementation=ATTENTION_NAME`.
        max_model_len: The longest sequence of the run in tokens.
        recompute: Activations in the backward pass, to save memory.
    """
    fix_rope_frequencies(model, max_model_len)
    use_fused_rms_norms(model)
    widen_residual(model)
    model.config.use_cache = False
    model.eval()
    if recompute:
        recompute_layers(model)


def _prepared(model: PreTrainedModel, config: Any) -> PreTrainedModel:
    chances = _chances(model)
    if chances:
        logger.warning("%s: %s switched off: the sampler has none", config.path, ", ".join(chances))
    prepare(model, max_model_len=config.max_model_len, recompute=config.enable_gradient_checkpointing)
    return model


def _chances(model: PreTrainedModel) -> list[str]:
    """`name=value` of the config's fields that are chances and not zero."""
    settings = model.config.get_text_config().to_dict()
    return [
        f"{key}={value}"
        for key, value in settings.items()
        if isinstance(value, float) and value > 0 and any(word in key for word in _CHANCES)
    ]


def recompute_layers(model: nn.Module) -> int:
    """Let every decoder layer keep only its inputs and compute its activations again in the backward pass.

    Returns:
        The number of layers.
    """
    # transformers' own switch is tied to `module.training`, and models here stay in evaluation mode.
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        # `forward` lies inside FSDP's hooks: a layer is gathered once for its recomputation and its gradient.
        layer.forward = _recomputed(layer.forward)
    return len(layers)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Nothing in evaluation mode draws random numbers, so there is no generator to rewind.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
