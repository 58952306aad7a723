"""What a child process of ours gets to see, and the plain data it talks in.

Children read and write JSON, never pickles. JSON has no tuples, and a scorer may care, so they are tagged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hrl

_TUPLE = "__tuple__"
_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|COOKIE|PRIVATE|SESSION|SIGNATURE|BEARER|(^|_)(AUTH|KEY|PAT|PWD|DSN)(_|$)|APIKEY",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(r"://[^/\s@]+@")
_NOT_A_SECRET = frozenset({"PWD", "OLDPWD", "TOKENIZERS_PARALLELISM"})


def child_environment(environ: Mapping[str, str] | None = None, **changes: str) -> dict[str, str]:
    """The environment of a child: the parent's without whatever looks like a secret, and `hrl` importable.

    A variable looks like a secret by its name (token, key, password, …) or by its value (an address with a login).
    """
    source = os.environ if environ is None else environ
    kept = {
        name: value
        for name, value in source.items()
        if name in _NOT_A_SECRET or not (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))
    }
    root = str(Path(hrl.__file__).parent.parent)
    inherited = [part for part in kept.get("PYTHONPATH", "").split(os.pathsep) if part and part != root]
    kept["PYTHONPATH"] = os.pathsep.join([*inherited, root])
    return kept | changes


def to_plain(value: Any, where: str = "value") -> Any:
    """`value` as JSON can hold it, tuples tagged.

    Raises:
        ValueError: something that isn't plain data, naming where.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [to_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [to_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; only text keys can be handed to another process")
        return {key: to_plain(item, f"{where}.{key}") for key, item in value.items()}
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return to_plain(value.tolist(), where)
    raise ValueError(
        f"{where} is a {type(value).__name__}; only numbers, text, lists, tuples and dicts can go to another process"
    )


def from_plain(value: Any) -> Any:
    """What `to_plain` was given."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(from_plain(item) for item in value[_TUPLE])
        return {key: from_plain(item) for key, item in value.items()}
    return value
