"""Loading transformers models for packed training, and refusing what packed training would compute wrongly.

Loading executes nothing from the model folder: weights are read from safetensors only, and remote code runs only where
``trust_remote_code`` says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from hrl.workers.ops.attention import ATTENTION_NAME
from hrl.workers.ops.residual import widen_residual
from hrl.workers.ops.rms_norm import use_fused_rms_norms

if TYPE_CHECKING:
    from hrl.workers.runtime import Runtime

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

#: Config fields that change logits after the head; a log-prob computed from the head's weight alone would be wrong.
_LOGIT_FIELDS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a configuration's name.

    Raises:
        ValueError: unknown name.
    """
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True)
class ModelSource:
    """Which model a role beside the policy loads, and how.

    Attributes:
        path: a local folder.
        override_config: fields of its config.json to replace.
        enable_gradient_checkpointing: recompute activations in the backward pass.
        share_prefix: compute equal prompts of a micro-batch once.
        trust_remote_code: its folder may run code.
    """

    path: str
    override_config: Mapping[str, Any]
    enable_gradient_checkpointing: bool
    share_prefix: bool
    trust_remote_code: bool

    @classmethod
    def of(cls, section: Any, path: str, runtime: Runtime) -> ModelSource:
        """From the role's ``model`` section, the folder that the driver found, and what holds for every role."""
        return cls(
            path,
            section.override_config,
            section.enable_gradient_checkpointing,
            runtime.share_prefix,
            runtime.trust_remote_code,
        )


@dataclass(frozen=True)
class Loaded:
    """A model as it was loaded.

    Attributes:
        model: the transformers model, on the CPU (or without storage on the meta device).
        source_config: the folder's config with ``override_config``, before packed training changed it, for the export.
        fresh_head: the scalar head was not in the checkpoint and starts at zero.
    """

    model: PreTrainedModel
    source_config: PretrainedConfig
    fresh_head: bool = False


def load_causal_lm(config: Any, dtype: torch.dtype, *, meta: bool = False) -> Loaded:
    """Loads a causal language model.

    Args:
        config: ``path``, ``override_config``, ``trust_remote_code``, ``enable_gradient_checkpointing``.
        dtype: of the parameters.
        meta: build the structure without storage (the weights will come from another rank).

    Raises:
        ValueError: the model cannot be trained packed, or ``override_config`` names a field it does not have.
    """
    source, used = _configs(config)
    options = {"trust_remote_code": config.trust_remote_code, "attn_implementation": ATTENTION_NAME, "dtype": dtype}
    if meta:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(used, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(config.path, config=used, use_safetensors=True, **options)
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ValueError(f"{type(model).__name__} at {config.path}: packed log-probs need a head without a bias")
    return Loaded(_prepare(model, config), source)


def load_scalar_model(config: Any, dtype: torch.dtype, *, meta: bool = False, head_required: bool = False) -> Loaded:
    """Loads a backbone with a scalar head, as transformers' sequence classifier with one label.

    A classifier's folder brings its head. A causal language model's folder has none: the head then starts at zero, so
    that every value is 0 until it is trained, whatever the seed.

    Args:
        config: as for ``load_causal_lm``.
        dtype: of the parameters.
        meta: build the structure without storage.
        head_required: refuse a folder without a head (a reward model that nobody trained).

    Raises:
        ValueError: as for ``load_causal_lm``; or the folder's head has another number of labels, or none is there.
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
        return Loaded(_prepare(model, config), source)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        config.path, config=used, use_safetensors=True, output_loading_info=True, **options
    )
    missing = set(info["missing_keys"])
    fresh = "score.weight" in missing
    if missing - {"score.weight", "score.bias"}:
        raise ValueError(f"{config.path} lacks the weights {sorted(missing)}")
    if fresh and head_required:
        raise ValueError(
            f"{config.path} has no scalar head (score.weight): a reward model must be a sequence classifier that was "
            "trained to score"
        )
    if fresh:
        nn.init.zeros_(model.score.weight)
        logger.info("%s has no scalar head: the value head starts at zero", config.path)
    return Loaded(_prepare(model, config), source, fresh_head=fresh)


def _configs(config: Any) -> tuple[PretrainedConfig, PretrainedConfig]:
    """The folder's config with ``override_config`` twice: one to keep, one to build the model from."""
    own = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    unknown = sorted(key for key in config.override_config if not hasattr(own, key))
    if unknown:
        raise ValueError(f"model.override_config sets {unknown}, which {type(own).__name__} does not have")
    source, used = (
        AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code, **config.override_config)
        for _ in range(2)
    )
    return source, used


def _prepare(model: PreTrainedModel, config: Any) -> PreTrainedModel:
    _refuse_unpackable(model, config.path)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            logger.warning("%s: dropout %.2f switched off: the sampler has none", config.path, module.p)
            module.p = 0.0
    use_fused_rms_norms(model)
    widen_residual(model)
    model.config.use_cache = False
    if config.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _refuse_unpackable(model: PreTrainedModel, path: str) -> None:
    name = type(model).__name__
    if not model._supports_attention_backend:
        raise ValueError(f"{name} at {path} does not take another attention, so it cannot be trained packed")
    settings = model.config.get_text_config()
    strange = sorted(set(getattr(settings, "layer_types", None) or ()) - _LAYER_TYPES)
    if strange:
        raise ValueError(f"{name} at {path} has layers of type {strange}; packed training knows {sorted(_LAYER_TYPES)}")
    for key, neutral in _LOGIT_FIELDS.items():
        if getattr(settings, key, neutral) not in (None, neutral):
            raise ValueError(f"{name} at {path} sets {key}={getattr(settings, key)}, which the log-prob does not apply")
