"""A run that begins with the model that an earlier run left in the same folder.

`hrl.GRPO(model=run.model_path)` with the default folder is such a run. The model moves aside with the other outputs of
the earlier run, so that the folder never shows it as the new run's, and the new run takes it from there.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hrl.config.outline import RunConfiguration, outline_of
from hrl.config.section import Section
from hrl.preflight.preflight import Preflight
from hrl.report.run_folder import MODEL, RunFolder

RunC = TypeVar("RunC", bound=RunConfiguration)
SectionT = TypeVar("SectionT", bound=Section)

_KEYS = ("path", "model_path", "tokenizer_path")
"""Names of the keys that name a model or a tokenizer."""


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
    moved = _with_paths(config, was, now)
    folders = {role: _moved(path, was, now) or path for role, path in ready.folders.items()}
    return moved, replace(ready, outline=outline_of(moved), folders=folders)


def _with_paths(section: SectionT, was: Path, now: Path) -> SectionT:
    changes: dict[str, object] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            changes[name] = _with_paths(value, was, now)
        elif name in _KEYS and isinstance(value, str) and (path := _moved(Path(value), was, now)) is not None:
            changes[name] = str(path)
    return section.model_copy(update=changes)


def _moved(path: Path, was: Path, now: Path) -> Path | None:
    """Return where a path below `was` leads now; None for any other."""
    whole = Path(os.path.expanduser(path)).resolve()
    return now / whole.relative_to(was) if whole.is_relative_to(was) else None
