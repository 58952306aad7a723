"""What is configured otherwise than in an earlier run, key by key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from hrl.config.outline import RunConfiguration
from hrl.config.saved import saved_config
from hrl.config.section import defaults, flatten
from hrl.masking import is_masked, masked

#: Where a run lies, what it goes on from and what it shows change no number in it.
_SAME_RUN = frozenset(
    f"trainer.{name}"
    for name in (
        "dashboard",
        "default_local_dir",
        "experiment_name",
        "logger",
        "private",
        "profile",
        "project_name",
        "ray_kwargs",
        "resume_from_path",
        "resume_mode",
        "secrets",
    )
)
_SHORT = 60


class Change(NamedTuple):
    """A value that is another one now.

    Attributes:
        key: The dotted key; entries of a value that is a mapping have the name of their entry at its end.
        old: The value as plain JSON.
        new: The present value, likewise.
    """

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        """Return `key: old → new`, or that nothing is known."""
        if is_masked(self.old) or is_masked(self.new):
            return f"{self.key}: masked, not compared"
        old, new = json.dumps(self.old, ensure_ascii=False), json.dumps(self.new, ensure_ascii=False)
        if max(len(old), len(new)) > _SHORT:
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
            old, new = _part(old, same), _part(new, same)
        return f"{self.key}: {old} → {new}"


def _part(text: str, place: int) -> str:
    """Return what a long text has at a place."""
    start = 0 if len(text) <= _SHORT or place < _SHORT // 2 else place - _SHORT // 4
    end = start + _SHORT
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


def changes(saved: Mapping[str, Any], present: RunConfiguration) -> list[Change]:
    """Return what differs between the configuration of an earlier run and the present one.

    Keys that only say where a run lies or what it shows are left out. A key that the other version of hrl did not have
    counts where it is not at its default. A value that is masked in either is told, for it may have changed.

    Args:
        saved: The earlier run's configuration, of the same kind, as `saved_config` has it.
        present: The present configuration.
    """
    schema = type(present)
    old = dict(flatten(masked(saved, present.trainer.secrets), schema))
    new = dict(flatten(json.loads(json.dumps(saved_config(present))), schema))
    standard = json.loads(json.dumps(defaults(schema), default=str))
    found: list[Change] = []
    for key in [*new, *(key for key in old if key not in new)]:
        if key not in _SAME_RUN:
            found += _differences(key, old.get(key, standard.get(key)), new.get(key))
    return found


def _differences(key: str, old: Any, new: Any) -> Iterator[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*new, *(name for name in old if name not in new)]:
            yield from _differences(f"{key}.{name}", old.get(name), new.get(name))
    elif is_masked(old) or is_masked(new) or old != new or isinstance(old, bool) != isinstance(new, bool):
        yield Change(key, old, new)
