"""Load transformers models for training on packed rows, or on padded ones.

Nothing from the model's folder is executed: weights are read from safetensors only, and remote code runs only if
`trust_remote_code` is set. Whether a family can be trained packed is not decided here but in `hrl.models.probe`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer

from hrl.models.adapter import AdapterSource
from hrl.models.experts import follow_experts, use_grouped_products
from hrl.models.hf_config import load_config
from hrl.models.ops.attention import ATTENTION_NAME
from hrl.models.ops.residual import widen_residual
from hrl.models.ops.rms_norm import use_fused_rms_norms
from hrl.models.ops.rope import fix_rope_frequencies
from hrl.models.pictures import sees
from hrl.models.scalar_head import STEP_LABELS, find_head, require_one_label
from hrl.models.source import ModelSourceError

logger = logging.getLogger(__name__)

#: What a model attends with that gets padded rows: transformers takes torch's operator where the family allows it.
OWN_ATTENTION: None = None
#: Words in the names of config fields that are probabilities: of dropping a value, layer or token, of router noise.
_CHANCES = ("drop", "jitter")


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
        adapter: What is trained instead of the model's own weights; None trains these.
        recompute_num_layers: How many layers recompute them, the first ones; None is all.
        enable_activation_offload: Keep activations in host memory until the backward pass.
        shows_pictures: Rows of the run have pictures, which the model's tower reads.
        freeze_vision_tower: The tower is not trained.
        packs_rows: Rows of a micro-batch are packed into one; else they are padded, and attention is the model's own.
    """

    path: str
    override_config: Mapping[str, Any]
    enable_gradient_checkpointing: bool
    share_prefix: bool
    trust_remote_code: bool
    max_model_len: int
    adapter: AdapterSource | None = None
    recompute_num_layers: int | None = None
    enable_activation_offload: bool = False
    shows_pictures: bool = False
    freeze_vision_tower: bool = False
    packs_rows: bool = True

    @classmethod
    def to_look_at(
        cls,
        folder: Path,
        override_config: Mapping[str, Any],
        *,
        trust_remote_code: bool,
        max_model_len: int,
        adapter: AdapterSource | None = None,
    ) -> ModelSource:
        """Return the source for checks before a run, to which the settings of training do not matter."""
        return cls(str(folder), override_config, False, True, trust_remote_code, max_model_len, adapter)


@dataclass(frozen=True)
class Loaded:
    """A model as it was loaded.

    Attributes:
        model: The transformers model, on the CPU or, without storage, on the meta device.
        source_config: The folder's config with `override_config`, as the export writes it.
        fresh_head: Whether the scalar head was not in the checkpoint and starts at zero.
        out_of_reach: Names of the parameters that no training on text moves.
    """

    model: PreTrainedModel
    source_config: PretrainedConfig
    fresh_head: bool = False
    out_of_reach: frozenset[str] = frozenset()


def load_causal_lm(source: ModelSource, dtype: torch.dtype, *, meta: bool = False) -> Loaded:
    """Load a causal language model.

    Args:
        source: Which model, and how.
        dtype: Of the parameters.
        meta: Build the structure without storage (the weights will come from another rank).

    Raises:
        ModelSourceError: The weights in the folder are not those of the model that its config describes.
        ModelConfigError: `override_config` does not fit the model.
    """
    exported = _config(source)
    model, info = _load(language_model_class(exported), source, deepcopy(exported), dtype, meta=meta)
    _require_weights(source.path, model, info)
    if info.unexpected:
        logger.warning(
            "%s holds weights that %s has no place for (%d: %s): they are not trained, synced or exported",
            source.path,
            type(model).__name__,
            len(info.unexpected),
            _first(info.unexpected),
        )
    return Loaded(_prepared(model, source), exported)


def language_model_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that builds a model with a language model's head from a config."""
    known = AutoModelForCausalLM._model_mapping
    seeing = AutoModelForImageTextToText._model_mapping
    # Of some families that see (Qwen3.5) transformers also has a model without the tower, under other names of weights.
    is_whole = type(config) in seeing and (sees(config) or type(config) not in known)
    return AutoModelForImageTextToText if is_whole else AutoModelForCausalLM


def classifier_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that builds a model with a scalar head from a config.

    Of most models that see transformers has no classifiers. Theirs are made here as it makes others: the backbone with
    a linear layer, `score`. It knows them from then on.
    """
    known = AutoModelForSequenceClassification._model_mapping
    if sees(config) and type(config) not in known and type(config) in AutoModel._model_mapping:
        backbone = AutoModel._model_mapping[type(config)]
        name = f"{backbone.__name__.removesuffix('Model')}ForSequenceClassification"
        base = next(each for each in backbone.__mro__[1:] if issubclass(each, PreTrainedModel))
        made = type(name, (GenericForSequenceClassification, base), {"__module__": __name__})
        AutoModelForSequenceClassification.register(type(config), made, exist_ok=True)
    return AutoModelForSequenceClassification


#: Names in older folders of models that see, and those of today, which transformers knows of its own classes alone.
_OLDER_NAMES = {r"^visual": "model.visual", r"^model(?!\.(language_model|visual))": "model.language_model"}


def attention_of(config: PretrainedConfig) -> str | dict[str, str]:
    """Return the attention of every part of a model that is run packed: the tower's pictures have their own."""
    if not sees(config):
        return ATTENTION_NAME
    parts = {part: ATTENTION_NAME for part in config.sub_configs if part != "vision_config"}
    return {"": ATTENTION_NAME, **parts, "vision_config": "sdpa"}


def load_scalar_model(
    source: ModelSource, dtype: torch.dtype, *, meta: bool = False, head_required: bool = False
) -> Loaded:
    """Load a backbone with a scalar head, as transformers' sequence classifier with one label.

    A classifier's folder has a head. A causal language model's has none: the head then starts at zero, so that every
    value is 0 until it is trained, whatever the seed.

    Args:
        source: Which model, and how.
        dtype: Of the parameters.
        meta: Build the structure without storage.
        head_required: Refuse a folder without a head, which no reward model has.

    Raises:
        ModelSourceError: As `load_causal_lm`; also if the folder's head has several labels, or a required head is
            missing.
        ModelConfigError: `override_config` does not fit the model.
    """
    exported = _config(source)
    head = find_head(Path(source.path))
    is_of_steps = head is not None and head_required and head.num_labels == STEP_LABELS
    if head is not None and not is_of_steps:
        require_one_label(source.path, head)
    if head is None and head_required and not meta:
        raise ModelSourceError(
            f"{source.path} has no scalar head (score.weight): a reward model must be a sequence classifier that was "
            "trained to score"
        )
    if head is not None and not head_required and (len(head.layers) > 1 or head.layers[0].bias is not None):
        raise ModelSourceError(
            f"{source.path} has a head with {'several layers' if len(head.layers) > 1 else 'a bias'} ({head.name}): "
            "it scores as it is, and a model that learns has one linear layer without"
        )
    used = deepcopy(exported)
    used.num_labels = 1 if head is None else head.num_labels
    names = _OLDER_NAMES if sees(exported) else None
    model, info = _load(classifier_class(exported), source, used, dtype, meta=meta, key_mapping=names)
    _require_weights(source.path, model, replace(info, missing=info.missing - {"score.weight", "score.bias"}))
    if head is None:
        if not meta:
            nn.init.zeros_(model.score.weight)
        logger.info("%s has no scalar head: the value head starts at zero", source.path)
    elif not head.is_plain:
        model.score = head.module(dtype, meta=meta)
    return Loaded(_prepared(model, source), exported, fresh_head=head is None)


def _load(
    auto: Any,
    source: ModelSource,
    config: PretrainedConfig,
    dtype: torch.dtype,
    *,
    meta: bool,
    key_mapping: dict[str, str] | None = None,
) -> tuple[PreTrainedModel, _Mismatch]:
    """Return the model of a transformers class, and how its folder's weights differ from it."""
    options = {
        "trust_remote_code": source.trust_remote_code,
        "attn_implementation": attention_of(config) if source.packs_rows else OWN_ATTENTION,
        "dtype": dtype,
    }
    if meta:
        with torch.device("meta"):
            return auto.from_config(config, **options), _Mismatch()
    model, info = auto.from_pretrained(
        source.path,
        config=config,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused here, with the name of the folder
        key_mapping=key_mapping,
        **options,
    )
    return model, _Mismatch(*(frozenset(info[f"{kind}_keys"]) for kind in ("missing", "unexpected", "mismatched")))


@dataclass(frozen=True)
class _Mismatch:
    """How the weights in a folder differ from those of its model.

    Attributes:
        missing: Names of weights that the folder lacks. transformers has filled them with random numbers.
        unexpected: Names of weights that the model does not have.
        resized: Name, shape in the folder and shape in the model of weights of another size.
    """

    missing: frozenset[str] = frozenset()
    unexpected: frozenset[str] = frozenset()
    resized: frozenset[tuple[str, tuple[int, ...], tuple[int, ...]]] = frozenset()


def _require_weights(path: str, model: PreTrainedModel, info: _Mismatch) -> None:
    """Refuse a model with weights that are not its folder's.

    Raises:
        ModelSourceError: Weights are missing, of another shape, or tied although the folder's differ.
    """
    if info.missing:
        others = f" and holds others in their place ({_first(info.unexpected)})" if info.unexpected else ""
        raise ModelSourceError(
            f"{path} lacks {len(info.missing)} of its model's weights ({_first(info.missing)}){others}: its files are "
            "incomplete, or its config.json is another model's"
        )
    for name, found, wanted in sorted(info.resized):
        raise ModelSourceError(
            f"{path} holds {name} of shape {tuple(found)}, and its config.json with override_config describes a model "
            f"with {tuple(wanted)}: the files or the config are another model's"
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        # transformers then unties them on this rank; other ranks and the engine follow the config and tie them.
        if parameters.get(name) is not parameters.get(source):
            raise ModelSourceError(
                f"{path} holds a {name} of its own, but its config.json ties it to {source}: set "
                "override_config={tie_word_embeddings: false}"
            )


def _first(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")


def _config(source: ModelSource) -> PretrainedConfig:
    return load_config(source.path, source.override_config, trust_remote_code=source.trust_remote_code)


def prepare(
    model: PreTrainedModel, *, max_model_len: int, recompute: bool, recompute_num_layers: int | None = None
) -> None:
    """Turn a transformers model into what the engine runs, for training and evaluation alike.

    Args:
        model: Loaded with `attn_implementation=ATTENTION_NAME`, or `OWN_ATTENTION` for padded rows.
        max_model_len: The longest sequence of the run in tokens.
        recompute: Recompute activations in the backward pass, to save memory.
        recompute_num_layers: How many layers do, the first ones; None is all.
    """
    fix_rope_frequencies(model, max_model_len)
    use_fused_rms_norms(model)
    widen_residual(model)
    use_grouped_products(model)
    follow_experts(model)
    model.config.use_cache = False
    # For the update too: dropout, router noise and layer drop would make its log-probs differ from the sampler's.
    model.eval()
    if recompute:
        recompute_layers(model, recompute_num_layers)


def _prepared(model: PreTrainedModel, source: ModelSource) -> PreTrainedModel:
    chances = _chances(model)
    if chances:
        logger.warning("%s: %s switched off: the sampler has none", source.path, ", ".join(chances))
    prepare(
        model,
        max_model_len=source.max_model_len,
        recompute=source.enable_gradient_checkpointing,
        recompute_num_layers=source.recompute_num_layers,
    )
    return model


def _chances(model: PreTrainedModel) -> list[str]:
    """Return `name=value` for the config's fields that are probabilities above zero."""
    settings = model.config.get_text_config().to_dict()
    return [
        f"{key}={value}"
        for key, value in settings.items()
        if isinstance(value, float) and value > 0 and any(word in key for word in _CHANCES)
    ]


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers, each of which is sharded as a unit of its own; those of towers too, none within another."""
    names = set(model._no_split_modules or ())
    found: list[nn.Module] = []
    within: set[nn.Module] = set()
    for module in model.modules():  # what holds others comes before them
        # FSDP gives a layer that it has sharded a class of its own, below the one that is looked for.
        if module not in within and not names.isdisjoint(each.__name__ for each in type(module).__mro__):
            found.append(module)
            within.update(module.modules())
    return found


def hidden_matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the matrices of the layers, `(R, C)`, and stacks of them `(E, R, C)`, such as those of experts.

    Embedding, head and what else lies beside the layers is none, nor is an embedding or a convolution within one.
    """
    return [
        parameter
        for layer in decoder_layers(model)
        for module in layer.modules()
        if not isinstance(module, nn.Embedding | nn.modules.conv._ConvNd)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() in (2, 3)
    ]


def recompute_layers(model: nn.Module, first: int | None = None) -> int:
    """Make decoder layers keep only their inputs and compute their activations again in the backward pass.

    Args:
        model: Has the layers.
        first: How many of them, the first ones; None is all.

    Returns:
        The number of layers that do.
    """
    # transformers' own switch is tied to `module.training`, and models here stay in evaluation mode.
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if first is not None:  # a tower's layers, which come before, are not counted
        decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else model
        layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)][:first]
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
