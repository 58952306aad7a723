"""The head of a reward model as folders have it: which tensors it is, and the module that they make.

transformers' sequence classifiers call it `score`. Published reward models that were written by other code call it
otherwise: `v_head` (TRL's and LLaMA-Factory's value heads, the latter in a file of its own), `value_head` (OpenRLHF),
`regression_head` and so on. What decides is what the files hold; no code of the folder runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hrl.models.source import ModelSourceError, model_facts

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Names of a head, transformers' own first.
HEADS = ("score", "v_head.summary", "v_head", "value_head", "regression_head", "reward_head", "rm_head")
#: Architectures whose head is several linear layers with a ReLU between two of them; of others it is not known.
STEP_LABELS = 2
"""Outputs of a process reward model: a step is wrong, or right."""
_WITH_RELU = frozenset({"Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"})
_PART = re.compile(r"(?:(\d+)\.)?(weight|bias)")
#: What a language model has beside its head, by the first part of the names.
_BACKBONES = frozenset({"model", "transformer", "base_model", "backbone", "gpt_neox", "lm_head", "language_model"})
_MOST_LISTED = 5


@dataclass(frozen=True)
class HeadLayer:
    """A linear layer of a head.

    Attributes:
        weight: Name of its weight in `file`, `(outputs, inputs)`.
        bias: Name of its bias; None without one.
        shape: Of the weight.
        file: Holds both.
    """

    weight: str
    bias: str | None
    shape: tuple[int, ...]
    file: Path


@dataclass(frozen=True)
class StoredHead:
    """A head in a folder.

    Attributes:
        name: One of `HEADS`.
        layers: With a ReLU between two of them.
    """

    name: str
    layers: tuple[HeadLayer, ...]

    @property
    def num_labels(self) -> int:
        """Numbers that it gives for a token."""
        return self.layers[-1].shape[0]

    @property
    def is_plain(self) -> bool:
        """Whether transformers' sequence classifiers read it themselves."""
        (first, *others) = self.layers
        return first.weight == "score.weight" and first.bias is None and not others

    def module(self, dtype: torch.dtype, *, meta: bool) -> nn.Module:
        """Return the head with its weights, or without storage."""
        import torch
        from safetensors import safe_open
        from torch import nn

        made: list[nn.Module] = []
        for layer in self.layers:
            outputs, inputs = layer.shape
            device = torch.device("meta" if meta else "cpu")
            linear = nn.Linear(inputs, outputs, bias=layer.bias is not None, dtype=dtype, device=device)
            if not meta:
                with safe_open(layer.file, framework="pt") as tensors, torch.no_grad():
                    linear.weight.copy_(tensors.get_tensor(layer.weight))
                    if layer.bias is not None:
                        linear.bias.copy_(tensors.get_tensor(layer.bias))
            made += [nn.ReLU(), linear] if made else [linear]
        return made[0] if len(made) == 1 else nn.Sequential(*made)


def find_head(folder: Path) -> StoredHead | None:
    """Return the head that a folder's weights hold; None where they have none, as a language model's.

    Raises:
        ModelSourceError: It is of a form that can't be followed; names its tensors.
    """
    there = _tensors(folder)
    for name in HEADS:
        parts = {key.removeprefix(f"{name}."): key for key in there if key.startswith(f"{name}.")}
        if parts:
            return StoredHead(name, _layers(folder, name, parts, there))
    return None


def check_scores(folder: Path, *, of_steps: bool = False) -> None:
    """Refuse a folder whose weights hold no head with one number for a response.

    Args:
        folder: Of the model.
        of_steps: The model scores steps, also with two outputs.

    Raises:
        ModelSourceError: There is none, or it has several outputs, or a form that can't be followed.
    """
    head = find_head(folder)
    if head is None:
        there = _tensors(folder)
        others = sorted({key.partition(".")[0] for key in there} - _BACKBONES)
        raise ModelSourceError(
            f"{folder} has no scalar head ({', '.join(f'{name}.weight' for name in HEADS)}): a reward model is a "
            "sequence classifier with one label that was trained to score, such as main_rm writes"
            + (f". Beside its backbone it has {', '.join(others[:_MOST_LISTED])}, {_OWN_FORM}" if others else "")
        )
    if not (of_steps and head.num_labels == STEP_LABELS):
        require_one_label(folder, head)
    others = _beside(folder, head)
    if others:
        raise ModelSourceError(
            f"{folder} has, beside its backbone and the head {head.name}, {', '.join(others[:_MOST_LISTED])}: "
            f"{_OWN_FORM}"
        )


_OWN_FORM = (
    "a score that is more than one linear head over the last token (several objectives, a gate), which hrl does not "
    "compute. Serve the model with its own code and name the address: reward.functions=[{name: remote, url: …}]"
)


def require_one_label(folder: str | Path, head: StoredHead) -> None:
    """Refuse a head with several outputs.

    Raises:
        ModelSourceError: It has.
    """
    if head.num_labels != 1:
        raise ModelSourceError(
            f"{folder} has {head.num_labels} labels ({head.layers[-1].weight}); a value or reward model has exactly one"
            + (". Of a process reward model, name its reward.reward_model.step_token" if head.num_labels == 2 else "")
        )


def _beside(folder: Path, head: StoredHead) -> list[str]:
    """Return the first parts of the names of tensors that belong neither to the backbone nor to the head."""
    names = {key.partition(".")[0] for key in _tensors(folder)}
    return sorted(names - _BACKBONES - {head.name.partition(".")[0]})


def _tensors(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return file and shape of every tensor in a folder, from the headers of its files."""
    from safetensors import safe_open

    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            found |= {key: (file, tuple(tensors.get_slice(key).get_shape())) for key in tensors.keys()}
    return found


def _layers(
    folder: Path, name: str, parts: Mapping[str, str], there: Mapping[str, tuple[Path, tuple[int, ...]]]
) -> tuple[HeadLayer, ...]:
    """Return the layers of a head from the ends of its tensors' names, in their order.

    Raises:
        ModelSourceError: They are none.
    """
    matches = {part: _PART.fullmatch(part) for part in parts}
    strange = sorted(parts[part] for part, match in matches.items() if match is None)
    numbers = sorted({int(match[1] or 0) for match in matches.values() if match is not None})
    is_numbered = any(match is not None and match[1] for match in matches.values())
    layers = []
    for number in numbers:
        weight, bias = (parts.get(f"{number}.{kind}" if is_numbered else kind) for kind in ("weight", "bias"))
        if weight is None or len(there[weight][1]) != 2:
            strange.append(weight or str(bias))
            continue
        file, shape = there[weight]
        layers.append(HeadLayer(weight, bias, shape, file))
    chained = all(one.shape[0] == other.shape[1] for one, other in pairwise(layers))
    if strange or not chained:
        shown = (strange or list(parts.values()))[:_MOST_LISTED]
        raise ModelSourceError(f"the head {name} of {folder} is no linear layer: {', '.join(shown)}")
    known = _WITH_RELU.intersection(model_facts(folder).get("architectures") or ())
    if len(layers) > 1 and not (known and numbers == list(range(0, 2 * len(layers), 2))):
        raise ModelSourceError(
            f"the head {name} of {folder} has {len(layers)} layers, and what is between them is in the code of its "
            f"architecture, which is none of {', '.join(sorted(_WITH_RELU))}"
        )
    return tuple(layers)
