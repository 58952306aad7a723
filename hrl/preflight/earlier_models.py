"""A run that begins with the model that an earlier run left in the same folder.

`hrl.GRPO(model=run.model_path)` with the default folder is such a run. The model moves aside with the other outputs of
the earlier run, so that the folder never shows it as the new run's, and the new run takes it from there. So does the
same call when it continues the new run, whose `config.yaml` says where that is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hrl.cluster.checkpoints import CheckpointError, CheckpointStore
from hrl.config.outline import RunConfiguration, outline_of
from hrl.config.section import Section, flatten
from hrl.config.trainer import RunConfig
from hrl.files import expanded
from hrl.preflight.preflight import Preflight
from hrl.report.run_folder import CONFIG, EARLIER, MODEL, RunFolder, RunFolderError, read_config

RunC = TypeVar("RunC", bound=RunConfiguration)
SectionT = TypeVar("SectionT", bound=Section)

_KEYS = ("path", "model_path", "tokenizer_path", "lora_adapter_path")
"""Names of the keys that name a model, a tokenizer or an adapter."""


def with_earlier_models(config: RunC, ready: Preflight, folder: RunFolder) -> tuple[RunC, Preflight]:
    """Return configuration and findings that name a model of the folder's earlier run where it is now.

    Args:
        config: The configuration, in which paths may lead to where the model was.
        ready: What was found before the folder was opened.
        folder: The run folder, opened.
    """
    if folder.earlier is None:
        return config, ready
    was, now = folder.path / MODEL, folder.earlier / MODEL
    moved = _with_paths(config, lambda _, path: _moved(path, was, now))
    folders = {role: _moved(path, was, now) or path for role, path in ready.folders.items()}
    return moved, replace(ready, outline=outline_of(moved), folders=folders)


def with_models_of_before(config: RunC) -> RunC:
    """Return the configuration of the same call as before, with the models with which the run in the folder began.

    Where its paths lead into `<run>/model`, that is gone, or by now the trained model of the run that is continued.

    Args:
        config: The configuration, before its files are looked at.

    Raises:
        DamagedFileError: A path leads there, and the `config.yaml` of the folder can't be read.
    """
    folder = expanded(config.trainer.default_local_dir).resolve()
    was, earlier = folder / MODEL, folder / EARLIER
    # A folder that may not be looked into is told of when the run folder is looked at: `Path.exists` raises.
    if not os.path.exists(folder / CONFIG) or (os.path.exists(was) and not _continues(config.trainer, folder)):
        return config

    def began_with(key: str, path: Path) -> Path | None:
        if _moved(path, was, was) is None:
            return None
        value = dict(flatten(read_config(folder), type(config))).get(key)
        return Path(value) if isinstance(value, str) and Path(value).is_relative_to(earlier) else None

    return _with_paths(config, began_with)


def _continues(trainer: RunConfig, folder: Path) -> bool:
    """Return whether a run continues the one in its folder."""
    store = CheckpointStore(RunFolder.checkpoints_in(folder))
    with suppress(CheckpointError, RunFolderError):  # told with all other problems when the run folder is looked at
        checkpoint = store.choose(trainer.resume_mode, trainer.resume_from_path).path
        return checkpoint is not None and store.holds(checkpoint)
    return False


def _with_paths(section: SectionT, follow: Callable[[str, Path], Path | None], prefix: str = "") -> SectionT:
    """Return a section with other paths of models and tokenizers.

    Args:
        section: The section.
        follow: Returns another path for that of a dotted key; None to keep it.
        prefix: What stands before the names of the section's keys.
    """
    changes: dict[str, object] = {}
    for name in type(section).model_fields:
        key, value = f"{prefix}{name}", getattr(section, name)
        if isinstance(value, Section):
            changes[name] = _with_paths(value, follow, f"{key}.")
        elif name in _KEYS and isinstance(value, str) and (path := follow(key, Path(value))) is not None:
            changes[name] = str(path)
    return section.model_copy(update=changes)


def _moved(path: Path, was: Path, now: Path) -> Path | None:
    """Return where a path below `was` leads now; None for any other."""
    whole = expanded(path).resolve()
    return now / whole.relative_to(was) if whole.is_relative_to(was) else None
