"""LoRA: small trained matrices beside the frozen ones of a model.

For the weight `W (out, in)` of a linear layer an adapter holds `A (r, in)` and `B (out, r)`. The layer computes
`W x + scaling · B A x`, where `scaling` is `alpha / r` (Hu et al. 2021, arXiv:2106.09685, section 4.1), or with rsLoRA
`alpha / sqrt(r)` (Kalajdzievski 2023, arXiv:2312.03732). `B` begins at zero, so a new adapter changes nothing.

peft has the layers and the files. Which layers get an adapter is decided here, because peft would also take a head, of
which the log-probs read the weight alone, and towers, to which text gives no gradient.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from hrl.errors import HrlError
from hrl.files import expanded
from hrl.models.source import hub_snapshot
from hrl.nearest import did_you_mean

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from hrl.config.model import LearnerConfig

logger = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
#: In the header of the file of weights: the checksum of the weights that it was trained beside, those in 4 bits left
#: out, and the dtypes of all of them.
BASE_CHECKSUM, BASE_DTYPES = "base_checksum", "base_dtypes"
#: The dtype that stands for 4 bits there.
IN_4_BITS = "torch.uint8"
#: peft's name of the only adapter, which is a part of parameters' names in memory and of none in a file.
_NAME = "default"
#: What peft puts before a parameter's name in a file.
_PREFIX = "base_model.model."
_PART = re.compile(rf"\.lora_([AB])\.{_NAME}\.weight$")
_BASE = ".base_layer."
#: The scalar head of a critic or reward model, which is trained as a whole beside the adapter.
_HEAD = "score"
#: Values of peft's `init_lora_weights` that leave the model's own weights as they are.
_PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva")
#: Fields of peft's configuration that change what a layer computes, and the value that does not.
_PLAIN_FIELDS: Mapping[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_bias": False,
    "use_dora": False,
    "use_qalora": False,
    "alora_invocation_tokens": None,
    "layer_replication": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
}


class AdapterError(HrlError, ValueError):
    """An adapter does not fit its model; says which key or file to change."""


@dataclass(frozen=True)
class AdapterSource:
    """Which adapter a model gets.

    Attributes:
        rank: r; 0 takes that of the folder `path`.
        alpha: Numerator of the scaling.
        target_modules: Ends of the names of linear layers, a regular expression for whole names, or `all-linear`.
        exclude_modules: Of these, those that get none; as `target_modules`.
        use_rslora: Whether the scaling is divided by the root of the rank instead of the rank.
        path: Folder of an adapter to go on from, whose own configuration holds instead of the fields above.
        seed: Of the run, by which `A` is drawn.
        merge: Whether engines get the model with the adapter added to it, instead of the adapter alone.
        load_in_4bit: Whether the model's linear layers are held in 4 bits (`hrl.models.four_bit`).
    """

    rank: int
    alpha: int
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...] | None
    use_rslora: bool
    path: str | None
    seed: int
    merge: bool
    load_in_4bit: bool = False

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any] | None) -> Self | None:
        """Return what `dataclasses.asdict` made, perhaps by way of JSON; None for None."""
        if plain is None:
            return None
        lists = {name: tuple(value) for name, value in plain.items() if isinstance(value, list)}
        return cls(**{**plain, **lists})

    def config(self) -> LoraConfig:
        """Return peft's configuration, with the folder's fields where there is one.

        Raises:
            AdapterError: The folder holds no adapter, or one that can't be trained or sampled from.
        """
        from peft import LoraConfig

        if self.path is not None:
            return _config_of(Path(self.path), self.rank)
        targets, excluded = (
            list(names) if isinstance(names, tuple) else names for names in (self.target_modules, self.exclude_modules)
        )
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=targets,
            exclude_modules=excluded,
            use_rslora=self.use_rslora,
        )


def adapter_of(section: LearnerConfig, seed: int) -> AdapterSource | None:
    """Return the adapter that a section of the configuration asks for; None if it trains the model itself."""
    from hrl.config.model import PolicyModelConfig

    if not section.trains_adapter:
        return None
    targets, excluded = section.target_modules, section.exclude_modules
    return AdapterSource(
        rank=section.lora_rank,
        alpha=section.lora_alpha,
        target_modules=tuple(targets) if isinstance(targets, list) else targets,
        exclude_modules=tuple(excluded) if isinstance(excluded, list) else excluded,
        use_rslora=section.use_rslora,
        path=None if section.lora_adapter_path is None else str(expanded(section.lora_adapter_path)),
        seed=seed,
        merge=isinstance(section, PolicyModelConfig) and section.lora.merge,
        load_in_4bit=section.load_in_4bit,
    )


def _config_of(folder: Path, rank: int) -> LoraConfig:
    from peft import LoraConfig, PeftConfig

    if not (folder / CONFIG_FILE).is_file():
        raise AdapterError(f"lora_adapter_path={folder} is no folder of an adapter: it has no {CONFIG_FILE}")
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (TypeError, ValueError, KeyError) as error:
        raise AdapterError(f"{folder / CONFIG_FILE} can't be read: {error}") from error
    if not isinstance(config, LoraConfig):
        raise AdapterError(f"{folder} holds an adapter of the kind {config.peft_type}; only LoRA is trained")
    fields = asdict(config)
    strange = {name: fields[name] for name, plain in _PLAIN_FIELDS.items() if fields.get(name) not in (plain, None)}
    if config.init_lora_weights not in _PLAIN_INITS:
        strange["init_lora_weights"] = config.init_lora_weights
    if set(config.modules_to_save or ()) - {_HEAD}:
        strange["modules_to_save"] = config.modules_to_save
    if strange:
        listed = ", ".join(f"{name}={value!r}" for name, value in strange.items())
        raise AdapterError(
            f"{folder / CONFIG_FILE} has {listed}, which vLLM's kernels don't compute: merge that adapter into its "
            "model (peft: merge_and_unload), and begin with a new one"
        )
    if rank not in (0, config.r):
        raise AdapterError(f"lora_rank={rank}, but the adapter in {folder} has rank {config.r}: set lora_rank to that")
    config.inference_mode = False
    if config.lora_dropout:
        logger.warning("%s: lora_dropout=%g is switched off: the sampler has none", folder, config.lora_dropout)
        config.lora_dropout = 0.0
    return config


# ---------------------------------------------------------------------------------------------- in a model


def add_adapter(model: PreTrainedModel, source: AdapterSource, dtype: torch.dtype) -> None:
    """Freeze a model and put an adapter into it; a scalar head stays trained.

    Args:
        model: With or without storage; the adapter then has none either.
        source: Which adapter.
        dtype: Of what is trained.

    Raises:
        AdapterError: The configuration names no layer of the model, or one that can have no adapter, or the folder's
            weights are not those of such an adapter.
    """
    from peft import inject_adapter_in_model

    config = source.config()
    config.target_modules = target_names(model, config)  # type: ignore[assignment]
    config.exclude_modules = None  # they are left out already
    config.modules_to_save = None  # what is trained as a whole stays where it is
    # A folder of the hub's cache is nowhere else.
    of_hub = hub_snapshot(Path(model.config.name_or_path))
    config.base_model_name_or_path, config.revision = of_hub or (model.config.name_or_path, None)
    is_empty = next(model.parameters()).is_meta
    # By a model's type peft takes the names of a mixture's linear layers for those of its experts, whose weights, many
    # in one tensor, it would adapt in their place. It is given the modules alone, of which names are names.
    modules = nn.ModuleDict(dict(model.named_children()))
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(source.seed)
        inject_adapter_in_model(config, modules, low_cpu_mem_usage=is_empty)
        model.peft_config = modules.peft_config
        for name, parameter in model.named_parameters():
            if is_trained_whole(name):
                parameter.requires_grad_(True)
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        for layer in () if is_empty else adapted_layers(model).values():
            layer.reset_lora_parameters(_NAME, config.init_lora_weights)  # in their dtype, not in the model's
    if source.path is not None and not is_empty:
        _load(model, Path(source.path))


def target_names(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the names of the layers that get an adapter, as short as they can be.

    They are linear layers of the text decoder: towers for pictures and sound, to which text gives no gradient, are
    outside of it, and so are the heads.

    Raises:
        AdapterError: See `add_adapter`.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    heads = [model.get_output_embeddings(), getattr(model, _HEAD, None)]
    modules = dict(model.named_modules())
    in_decoder = {id(module) for module in model.get_decoder().modules()}
    there = list(decoder_linears(model))
    linear = set(there)
    asked = config.target_modules
    if asked == ALL_LINEAR:
        config.target_modules = linear  # type: ignore[assignment]
    elif not isinstance(asked, str):
        _require_known("target_modules", asked or (), modules, there)
    if not isinstance(config.exclude_modules, str):
        _require_known("exclude_modules", config.exclude_modules or (), modules, there)
    # peft compares a name that is no target with the ends of all: slow where every layer of a large mixture is one.
    candidates = there if asked == ALL_LINEAR else modules
    found = [name for name in candidates if check_target_module_exists(config, name)]
    wrong = [
        name
        for name in found
        if name not in linear and (id(modules[name]) in in_decoder or any(modules[name] is head for head in heads))
    ]
    if wrong:
        kind = "the head, whose log-probs read its weight alone" if any(modules[wrong[0]] is h for h in heads) else ""
        raise AdapterError(
            f"target_modules={_shown(asked)} names {wrong[0]}, {kind or f'a {type(modules[wrong[0]]).__name__}'}: an "
            f"adapter is for linear layers ({', '.join(_ends(there)) or 'this model has none'})"
        )
    found = [name for name in found if name in linear]
    if not found:
        excluded = config.exclude_modules
        without = f" without exclude_modules={_shown(excluded)}" if excluded else ""
        is_text = isinstance(asked, str) and asked != ALL_LINEAR
        hint = f". A text is a regular expression for whole names: [{asked}] is a list" if is_text else ""
        raise AdapterError(
            f"target_modules={_shown(asked)}{without} leaves no linear layer of {type(model).__name__}; it has "
            f"{', '.join(_ends(there)) or 'none'}{hint}"
        )
    ends = _ends(found)
    return ends if set(found) == {name for name in modules if name.rpartition(".")[2] in ends} else found


def decoder_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers of the text decoder by name, those of an adapter and the heads left out."""
    # What some families call their decoder has the head in it.
    heads = {id(model.get_output_embeddings()), id(getattr(model, _HEAD, None))}
    in_decoder = {id(module) for module in model.get_decoder().modules()} - heads
    return {
        name: module
        for name, module in model.named_modules()
        if _is_linear(module) and id(module) in in_decoder and not is_part(f"{name}.weight")
    }


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a product and nothing else, as a router that is made of one is not."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _require_known(key: str, asked: Iterable[str], modules: Iterable[str], there: Collection[str]) -> None:
    for end in asked:
        if not any(name == end or name.endswith(f".{end}") for name in modules):
            hint = did_you_mean(end, _ends(there), f"There are: {', '.join(_ends(there))}.")
            raise AdapterError(f"{key} has {end!r}, and no layer's name ends so. {hint}")


def _ends(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _shown(names: Any) -> str:
    return names if isinstance(names, str) else "null" if names is None else f"[{', '.join(names)}]"


def _load(model: PreTrainedModel, folder: Path) -> None:
    """Give the adapter the weights of a folder."""
    from safetensors.torch import load_file

    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise AdapterError(f"{folder} has no {WEIGHTS_FILE}, and hrl loads no pickled weights")
    saved = load_file(file)
    trained = {name_in_file(name): p for name, p in model.named_parameters() if p.requires_grad}
    fresh = {name for name in trained if name not in saved and is_trained_whole(name.removeprefix(_PREFIX))}
    for name in sorted((trained.keys() ^ saved.keys()) - fresh):
        which = "lacks" if name in trained else "has, and its configuration does not name,"
        raise AdapterError(f"{file} {which} {name}: it is another model's adapter, or was saved by other software")
    for name, parameter in trained.items():
        if name in fresh:
            continue
        if saved[name].shape != parameter.shape:
            raise AdapterError(
                f"{file} holds {name} of shape {tuple(saved[name].shape)}, and this model wants "
                f"{tuple(parameter.shape)}: it is another model's adapter"
            )
        parameter.data.copy_(saved[name])


def beside_of(folder: Path) -> tuple[int | None, list[str]]:
    """Return checksum and dtypes of the weights that an adapter was trained beside; other software says neither."""
    from safetensors import SafetensorError, safe_open

    file = folder / WEIGHTS_FILE
    try:
        with safe_open(file, framework="numpy") as opened:
            about = opened.metadata() or {}
    except (SafetensorError, FileNotFoundError):  # told when the weights are read
        return None, []
    checksum = about.get(BASE_CHECKSUM, "")
    return int(checksum) if checksum.isdecimal() else None, about.get(BASE_DTYPES, "").split()


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """Return peft's layers by name; none for a model without an adapter."""
    return {name: layer for name, layer in module.named_modules() if _NAME in getattr(layer, "lora_A", ())}


class AdapterIn(NamedTuple):
    """What one of peft's layers consists of.

    Attributes:
        base: The layer without its adapter.
        a: `A (r, in)`, as a layer.
        b: `B (out, r)`, likewise.
    """

    base: nn.Module
    a: nn.Linear
    b: nn.Linear


def adapter_in(module: nn.Module) -> AdapterIn | None:
    """Return the parts of one of peft's layers; None of any other module."""
    if _NAME not in getattr(module, "lora_A", ()):
        return None
    layer: Any = module
    return AdapterIn(layer.base_layer, layer.lora_A[_NAME], layer.lora_B[_NAME])


@contextmanager
def adapter_off(module: nn.Module) -> Iterator[None]:
    """Let a model compute inside the block what it would without its adapter, bit for bit."""
    # peft's own switch also sets what requires gradients, of which sharding must not lose track.
    layers = adapted_layers(module).values()
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


# ---------------------------------------------------------------------------------------------- names and files


def is_part(name: str) -> bool:
    """Return whether a parameter is `A` or `B` of an adapter, by its name in memory."""
    return _PART.search(name) is not None


def is_trained_whole(name: str) -> bool:
    """Return whether a parameter, by its name in the transformers model, is trained as a whole beside an adapter."""
    return name.startswith(f"{_HEAD}.")


def name_without(name: str) -> str:
    """Return the name that a parameter of an adapted model has in the same model without its adapter."""
    return name.replace(_BASE, ".")


def name_in_file(name: str) -> str:
    """Return the name that peft gives a trained parameter in a file."""
    return _PREFIX + _PART.sub(r".lora_\1.weight", name)


def parts_of(name: str) -> tuple[str, str] | None:
    """Return the names of `A` and `B` that are added to a weight, by its name in memory; None for other parameters."""
    if not name.endswith(f"{_BASE}weight"):
        return None
    layer = name.removesuffix(f"{_BASE}weight")
    return f"{layer}.lora_A.{_NAME}.weight", f"{layer}.lora_B.{_NAME}.weight"


def scaling_of(layer: Any) -> float:
    """Return the factor of `B A` in one of peft's layers."""
    return float(layer.scaling[_NAME])


def merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """Return `W + scaling · B A`, computed in float32 or wider and rounded once.

    Args:
        weight: W `(out, in)`.
        a: `(r, in)`.
        b: `(out, r)`.
        scaling: See above.
        dtype: Of the result.
    """
    wide = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
    return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scaling).to(dtype)


def plain_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return the adapter's configuration as `adapter_config.json` has it."""
    config: Any = model.peft_config[_NAME]
    is_scalar = isinstance(getattr(model, _HEAD, None), nn.Module)
    own = {
        "inference_mode": True,
        "task_type": "SEQ_CLS" if is_scalar else "CAUSAL_LM",
        "modules_to_save": [_HEAD] if is_scalar else None,
        "target_modules": sorted(config.target_modules),
        "target_parameters": None,  # peft puts an empty set there for mixtures of experts
    }
    return {**config.to_dict(), "peft_type": "LORA", **own}
