"""Plain values in the grammar of hydra's overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from hrl.errors import HrlError

_KEY = r"[A-Za-z0-9_/\-\\+.$%*@?|()\[\]{}:=, \t]+"
"""What a key may consist of, some of it escaped."""
_READ_AS_OTHERS = frozenset({"null", "true", "false", "nan", "inf"})


class NotPlainError(HrlError, TypeError):
    """A value that no configuration file could hold."""


def as_override(value: Any) -> str:
    """Return a value in the grammar of hydra's overrides, which reads the same value back.

    Raises:
        NotPlainError: It is no plain value.
    """
    if value is None:
        return "null"
    if getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
        value = value.item()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return repr(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, str | Path):
        text = str(value)
        return text if _is_plain_word(text) else QuotedString(literal(text), Quote.single).with_quotes()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_key(key)}:{as_override(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(map(as_override, value)) + "]"
    raise NotPlainError(f"a configuration holds plain values, not a {type(value).__name__}: {value!r}")


def literal(text: str) -> str:
    """Return a text of which OmegaConf makes the same text, though it may look like an interpolation (`${key}`)."""
    return re.sub(r"(\\*)\$\{", lambda before: before[1] * 2 + r"\${", text)


def _key(key: Any) -> str:
    """Return a key of a mapping. The grammar has no quotes for keys: some signs are escaped, and others can't be said.

    Raises:
        NotPlainError: It would be read as another key, or not at all.
    """
    if not isinstance(key, str):
        return as_override(key)
    if not re.fullmatch(_KEY, key) or key.lower() in _READ_AS_OTHERS or _is_number(key):
        raise NotPlainError(
            f"the key {key!r} of a mapping can't be written on a command line, which would read it as something else: "
            "write the mapping into a YAML file"
        )
    return re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", key)


def _is_number(text: str) -> bool:
    try:
        float(text.replace("_", ""))
    except ValueError:
        return False
    return True


def _is_plain_word(text: str) -> bool:
    """Return whether hydra reads a text as itself without quotes."""
    return bool(re.fullmatch(r"(\.{0,2}/|[A-Za-z_])[A-Za-z0-9_/.\-:]*", text)) and text.lower() not in _READ_AS_OTHERS
