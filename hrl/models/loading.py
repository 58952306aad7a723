"""Loading transformers models for packed training.

Loading executes nothing from the model's folder: weights are read from safetensors only, and remote code runs only if
`trust_remote_code` is set. Whether a family may be trained packed is not known here; `hrl.models.probe` finds out.
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

#: Parts of the names of config fields that are probabilities: of a dropped activation, layer or token, of router noise.
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
    """Which model a role loads, and how it runs.

    Attributes:
        path: A local folder.
        override_config: Fields of its config.json to replace.
        enable_gradient_checkpointing: Recompute activations in the backward pass.
        share_prefix: Compute equal prompts of a micro-batch once.
        trust_remote_code: The folder may run code.
        max_model_len: The longest sequence of the run in tokens, which is also what the rollout engine is opened for.
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
        """Return the source for a look at a model, to which the settings of training do not matter."""
        return cls(str(folder), override_config, False, True, trust_remote_code, max_model_len)


@dataclass(frozen=True)
class Loaded:
    """A model as it was loaded.

    Attributes:
        model: The transformers model, on the CPU, or without storage on the meta device.
        source_config: The folder's config with `override_config`, as the export writes it.
        fresh_head: The scalar head was not in the checkpoint and starts at zero.
    """

    model: PreTrainedModel
    source_config: PretrainedConfig
    fresh_head: bool = False


def load_causal_lm(source: ModelSource, dtype: torch.dtype, *, meta: bool = False) -> Loaded:
    """Load a causal language model.

    Args:
        source: Which model, and how.
        dtype: Of the parameters.
        meta: Build the structure without storage (the weights will come from another rank).

    Raises:
        ValueError: The folder lacks some of its weights.
        ModelConfigError: `override_config` does not fit the model.
    """
    exported, used = _configs(source)
    model, missing = _load(AutoModelForCausalLM, source, used, dtype, meta=meta)
    _require_weights(source.path, missing)
    return Loaded(_prepared(model, source), exported)


def load_scalar_model(
    source: ModelSource, dtype: torch.dtype, *, meta: bool = False, head_required: bool = False
) -> Loaded:
    """Load a backbone with a scalar head, as transformers' sequence classifier with one label.

    A classifier's folder has its head. A causal language model's has none: the head then starts at zero, so that every
    value is 0 until it is trained, whatever the seed.

    Args:
        source: Which model, and how.
        dtype: Of the parameters.
        meta: Build the structure without storage.
        head_required: Refuse a folder without a head (a reward model that nobody trained).

    Raises:
        ValueError: As `load_causal_lm`; also if the folder's head has several labels, or a required head is missing.
    """
    exported, used = _configs(source)
    is_classifier = any("ForSequenceClassification" in name for name in exported.architectures or ())
    if is_classifier and exported.num_labels != 1:
        raise ValueError(f"{source.path} has {exported.num_labels} labels; a value or reward model has exactly one")
    used.num_labels = 1
    model, missing = _load(AutoModelForSequenceClassification, source, used, dtype, meta=meta)
    fresh = "score.weight" in missing
    _require_weights(source.path, missing - {"score.weight", "score.bias"})
    if fresh and head_required:
        raise ValueError(
            f"{source.path} has no scalar head (score.weight): a reward model must be a sequence classifier that was "
            "trained to score"
        )
    if fresh:
        nn.init.zeros_(model.score.weight)
        logger.info("%s has no scalar head: the value head starts at zero", source.path)
    return Loaded(_prepared(model, source), exported, fresh_head=fresh)


def _load(
    auto: Any, source: ModelSource, config: PretrainedConfig, dtype: torch.dtype, *, meta: bool
) -> tuple[PreTrainedModel, set[str]]:
    """Return the model of a class of transformers' and the names of weights that its folder lacks."""
    options = {"trust_remote_code": source.trust_remote_code, "attn_implementation": ATTENTION_NAME, "dtype": dtype}
    if meta:
        with torch.device("meta"):
            return auto.from_config(config, **options), set()
    model, info = auto.from_pretrained(
        source.path, config=config, use_safetensors=True, output_loading_info=True, **options
    )
    return model, set(info["missing_keys"])


def _require_weights(path: str, missing: set[str]) -> None:
    if missing:  # transformers has filled them with random numbers
        first = ", ".join(sorted(missing)[:3])
        raise ValueError(
            f"{path} lacks {len(missing)} of its model's weights ({first}{', …' if len(missing) > 3 else ''}): its "
            "files are incomplete, or its config.json is another model's"
        )


def _configs(source: ModelSource) -> tuple[PretrainedConfig, PretrainedConfig]:
    """Return the folder's config with `override_config` twice: to export, and to build the model from."""
    exported, used = (
        load_config(source.path, source.override_config, trust_remote_code=source.trust_remote_code) for _ in range(2)
    )
    return exported, used


def prepare(model: PreTrainedModel, *, max_model_len: int, recompute: bool) -> None:
    """Turn a transformers model into what the engine runs, whether it is trained or only evaluated.

    Args:
        model: Loaded with `attn_implementation=ATTENTION_NAME`.
        max_model_len: The longest sequence of the run in tokens.
        recompute: Recompute activations in the backward pass, to save memory.
    """
    fix_rope_frequencies(model, max_model_len)
    use_fused_rms_norms(model)
    widen_residual(model)
    model.config.use_cache = False
    # For the update too: dropout, router noise and layer drop would make its log-probs differ from the sampler's.
    model.eval()
    if recompute:
        recompute_layers(model)


def _prepared(model: PreTrainedModel, source: ModelSource) -> PreTrainedModel:
    chances = _chances(model)
    if chances:
        logger.warning("%s: %s switched off: the sampler has none", source.path, ", ".join(chances))
    prepare(model, max_model_len=source.max_model_len, recompute=source.enable_gradient_checkpointing)
    return model


def _chances(model: PreTrainedModel) -> list[str]:
    """Return `name=value` for the config's fields that are probabilities above zero."""
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
        # In evaluation mode nothing draws random numbers, so no generator has to be rewound.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
