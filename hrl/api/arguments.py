"""Values of Python as arguments of a command line, in hydra's grammar."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from hrl.api.rows import UsageError

_READ_AS_OTHERS = frozenset({"null", "true", "false", "nan", "inf"})


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
    return ["--config-path", str(file.parent), "--config-name", file.stem]


def as_override(value: Any) -> str:
    """Return a value in the grammar of hydra's overrides, which reads the same value back.

    Raises:
        UsageError: It is no plain value.
    """
    if value is None:
        return "null"
    if hasattr(value, "item"):  # of numpy
        value = value.item()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return repr(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, str | Path):
        text = str(value)
        return text if _is_plain_word(text) else QuotedString(text, Quote.single).with_quotes()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_override(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(map(as_override, value)) + "]"
    raise UsageError(f"a configuration holds plain values, not a {type(value).__name__}: {value!r}")


def _is_plain_word(text: str) -> bool:
    """Return whether hydra reads a text as itself without quotes."""
    return bool(re.fullmatch(r"[A-Za-z_/][A-Za-z0-9_/.\-:]*", text)) and text.lower() not in _READ_AS_OTHERS
