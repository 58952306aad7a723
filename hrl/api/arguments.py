"""Keys and files of Python as those of a command line."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hrl.files import expanded


def dotted(tree: Mapping[str, Any], keys: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as dotted keys; the value of a key that holds a dict stays one.

    Args:
        tree: Nested or dotted keys.
        keys: The keys of the schema.
        prefix: What stands before the keys of `tree`.
    """
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in keys:
            flat |= dotted(value, keys, f"{key}.")
        else:
            flat[key] = value
    return flat


def file_arguments(file: Path) -> list[str]:
    """Return the arguments that name a YAML file as the primary one."""
    file = expanded(file)
    return ["--config-path", str(file.parent), "--config-name", file.stem]
