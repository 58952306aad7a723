"""A tiny model of the same family as a given one, with random weights, the same vocabulary and the same tokenizer.

It is made from a folder's config and tokenizer alone, so a model that fits no machine at hand has one too. A cut
(`hrl.models.cut`) keeps what decides how a family computes, and has no folder; a twin keeps what decides whether a
launch line works: the vocabulary, the positions, the kinds of layers, and the ways in which processes can share heads.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForTokenClassification, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from hrl.errors import RefusedError
from hrl.models.cut import Heads, changed, first_of_every_kind, resize, with_small_tower
from hrl.models.hf_config import load_config
from hrl.models.loading import classifier_class, language_model_class
from hrl.models.pictures import sees
from hrl.models.source import TEMPLATES

#: Widths of feed-forward layers, experts' included, and of heads: the least that vLLM's kernels take, on a CPU too.
_FEED_FORWARD, _HEAD = 128, 32
#: Files of a folder that are the model's own, and not those of its tokenizer or code.
_OF_THE_MODEL = (
    *("config.json", "adapter_config.json", "*.safetensors", "*.safetensors.index.json", "*.gguf"),
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx"),
)
#: What a model gives numbers for → what has its class, the end of that class's name, and the numbers of a new head.
_SCORERS = {
    "answers": (classifier_class, "ForSequenceClassification", 1),
    "steps": (lambda config: AutoModelForTokenClassification, "ForTokenClassification", 2),
}
#: What the code of a family raises for sizes that do not go together.
_FAILURES = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, ImportError)


class TwinError(RefusedError, ValueError):
    """No small copy of a model can be made."""


@dataclass(frozen=True)
class Sharing:
    """How processes share a model's heads.

    Attributes:
        degrees: Numbers of processes, of which each has to divide the query heads, and to divide the key heads or be
            divided by them.
        scarce: Whether there are to be fewer key heads than processes, where the model's are fewer than those of its
            own run.
    """

    degrees: tuple[int, ...] = ()
    scarce: bool = False

    def heads(self, of: Heads) -> Heads:
        """Return the fewest heads that are shared in the same way."""
        wanted = math.lcm(1, *self.degrees)
        width = min(of.width, _HEAD)
        if of.keys is None or of.keys == of.queries:
            queries = min(of.queries, max(wanted, 2))
            return Heads(queries, None if of.keys is None else queries, width)
        keys = 1 if self.scarce else min(of.keys, max(wanted, 2))
        ratio = min(of.queries // of.keys, 2)
        while keys * ratio % wanted and keys * ratio < of.queries:
            ratio += 1
        return Heads(keys * ratio, keys, width)


@dataclass(frozen=True)
class Twin:
    """A twin, and what it was made of.

    Attributes:
        folder: Where it lies.
        family: The model's type.
        layers: Its number of layers, and the model's.
        hidden: Its width, and the model's.
        parameters: Its number of weights.
        vocabulary: The number of tokens that both know.
    """

    folder: Path
    family: str
    layers: tuple[int, int]
    hidden: tuple[int, int]
    parameters: int
    vocabulary: int

    def in_words(self) -> str:
        """Return what is smaller than in the model, in one line."""
        layers, hidden = (f"{mine} of {whole}" for mine, whole in (self.layers, self.hidden))
        vocabulary = f"the same {self.vocabulary:,} tokens"
        return f"{self.family}, {layers} layers, width {hidden}, {vocabulary}, {self.parameters / 1e6:.1f} M weights"


def write_twin(
    source: Path,
    target: Path,
    sharing: Sharing,
    *,
    override_config: Mapping[str, Any],
    trust_remote_code: bool,
    seed: int,
    scores: Literal["answers", "steps"] | None = None,
) -> Twin:
    """Write the twin of a model.

    Args:
        source: A folder with config and tokenizer; its weights, if there are any, are not read.
        target: A folder to write into, which is made.
        sharing: How processes share its heads.
        override_config: Fields of the config to replace first.
        trust_remote_code: The folder may run code.
        seed: Of the weights.
        scores: What the model gives numbers for, whatever its config says: the tensors that would show its head are not
            there. None is a language model, or what the config says.

    Raises:
        TwinError: The family's sizes depend on each other in a way that is not known here.
    """
    config = load_config(source, override_config, trust_remote_code=trust_remote_code)
    named = [what for what, (_, end, _) in _SCORERS.items() if any(end in name for name in config.architectures or ())]
    class_of: Callable[[PretrainedConfig], Any] = language_model_class
    if named or scores is not None:
        class_of, _, num_labels = _SCORERS[scores or named[0]]
        if named[:1] != [scores or named[0]]:
            config.num_labels = num_labels

    def build(smaller: PretrainedConfig) -> PreTrainedModel:
        model: PreTrainedModel = class_of(smaller).from_config(
            smaller, dtype=torch.bfloat16, attn_implementation="eager", trust_remote_code=trust_remote_code
        )
        return model

    def shrink(fields: dict[str, Any], section: PretrainedConfig, _: int) -> None:
        resize(fields, section, _FEED_FORWARD, sharing.heads)
        _fit_axes(fields)

    try:
        narrow = changed(config, shrink, 0)
        if narrow is None:
            raise TwinError(f"{source.name}: {config.model_type} has no valid config with these sizes reduced")
        if sees(config):
            narrow = with_small_tower(narrow, config)
        small = first_of_every_kind(narrow, build) or narrow
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build(small)
    except _FAILURES as error:
        raise TwinError(
            f"no small copy of {source.name} ({config.model_type}) can be made: {type(error).__name__}: {error}"
        ) from error
    disable_progress_bar()
    model.save_pretrained(target)
    _copy_others(source, target)
    text, whole = small.get_text_config(), config.get_text_config()
    return Twin(
        folder=target,
        family=config.model_type,
        layers=(text.num_hidden_layers, whole.num_hidden_layers),
        hidden=(text.hidden_size, whole.hidden_size),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocabulary=whole.vocab_size,
    )


def _fit_axes(fields: Mapping[str, Any]) -> None:
    """Let the axes of M-RoPE share the frequencies of narrower heads as they shared those of the model's."""
    settings: Any = fields.get("rope_parameters")
    shares = settings.get("mrope_section") if isinstance(settings, dict) else None
    if not shares:
        return
    width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    before, now = sum(shares), int(width * settings.get("partial_rotary_factor", 1.0)) // 2
    rest = [max(1, share * now // before) for share in shares[1:]]
    settings["mrope_section"] = [now - sum(rest), *rest]


def _copy_others(source: Path, target: Path) -> None:
    """Copy the tokenizer, the settings of generation and code, which are the model's own."""
    for path in source.iterdir():
        if path.is_file() and not any(path.match(pattern) for pattern in _OF_THE_MODEL):
            shutil.copyfile(path, target / path.name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, target / TEMPLATES)
