"""The adapter of a rehearsal: that of the line, new and beside a twin, which has few of the model's layers.

Rank, factor and layers stay, as far as the twin has such layers. The weights of a folder do not: they have the sizes of
the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hrl.config.model import LORA_RANKS, LearnerConfig
from hrl.config.outline import NamedModel
from hrl.files import expanded
from hrl.models.adapter import ALL_LINEAR, AdapterError, adapter_of
from hrl.models.footprint import footprint
from hrl.models.loading import ModelSource
from hrl.rehearse.parts import Change

_LAYERS = ("target_modules", "exclude_modules")


class SmallAdapter(NamedTuple):
    """An adapter that a twin can have.

    Attributes:
        values: Key → value.
        changes: What was reduced.
    """

    values: dict[str, Any]
    changes: list[Change]


def small_adapter(model: NamedModel, whole: Path, twin: Path, *, trust_remote_code: bool, seed: int) -> SmallAdapter:
    """Return the adapter of a learner's twin; nothing where the line trains the model itself.

    Args:
        model: The learner.
        whole: Folder with the config of its model.
        twin: Folder of its twin.
        trust_remote_code: The folders may run code.
        seed: Of the run.

    Raises:
        AdapterError: The folder of `lora_adapter_path` is there and holds no adapter that can be trained, or the model
            itself, and not only its twin, lacks the layers.
    """
    learner, section = model.learner, model.key.rpartition(".")[0]
    if learner is None or not learner.trains_adapter:
        return SmallAdapter({}, [])
    values, changes = dict[str, Any](), list[Change]()
    if learner.lora_adapter_path is not None:
        values, was = _anew(learner, seed)
        now = f"null: a new one, rank {values['lora_rank']}"
        changes.append(Change(f"{section}.lora_adapter_path", was, now))

    def refusal(folder: Path, fields: dict[str, Any]) -> AdapterError | None:
        """Return why a model can't have the adapter; None if it can."""
        adapter = adapter_of(learner.model_copy(update=fields), seed)
        source = ModelSource.to_look_at(
            folder,
            model.override_config if folder is whole else {},
            trust_remote_code=trust_remote_code,
            max_model_len=1,
            adapter=adapter,
        )
        try:
            footprint(source)
        except AdapterError as error:
            return error
        return None

    if refusal(twin, values) is not None:
        if (error := refusal(whole, {})) is not None:
            raise error
        before = {name: values.get(name, getattr(learner, name)) for name in _LAYERS}
        after = next(fields for fields in _wider(before) if refusal(twin, values | fields) is None)
        values |= after
        changes += [
            Change(f"{section}.{name}", _told(before[name]), f"{_told(after[name])}: the tiny model lacks such layers")
            for name in before
            if before[name] != after[name]
        ]
    return SmallAdapter({f"{section}.{name}": value for name, value in values.items()}, changes)


def _anew(learner: LearnerConfig, seed: int) -> tuple[dict[str, Any], str]:
    """Return the fields of a new adapter like that of a folder, and the folder in words."""
    path, source = str(learner.lora_adapter_path), adapter_of(learner, seed)
    values: dict[str, Any] = {"lora_adapter_path": None}
    if source is None or not expanded(path).is_dir():  # the keys beside a folder do not hold, but for a rank
        default = LearnerConfig()
        kept = {name: getattr(default, name) for name in ("lora_alpha", "use_rslora", *_LAYERS)}
        return values | {"lora_rank": learner.lora_rank or LORA_RANKS[0]} | kept, f"{path}, which is not here"
    config = source.config()
    values |= {"lora_rank": config.r, "lora_alpha": config.lora_alpha, "use_rslora": config.use_rslora}
    return values | {name: _plain(getattr(config, name)) for name in _LAYERS}, path


def _plain(names: Any) -> Any:
    """Return names as a configuration has them; peft keeps lists as sets."""
    return names if names is None or isinstance(names, str) else sorted(names) or None


def _wider(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield other layers, the nearest to those of the line first; the last are in every model."""
    yield fields | {"exclude_modules": None}
    yield fields | {"target_modules": ALL_LINEAR}
    yield {"target_modules": ALL_LINEAR, "exclude_modules": None}


def _told(names: Any) -> str:
    return "null" if names is None else names if isinstance(names, str) else f"[{', '.join(names)}]"
