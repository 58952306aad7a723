"""What a child process of ours gets to see, and the plain data it talks in.

Children read and write JSON, never pickles. JSON has no tuples, and a scorer may care, so they are tagged; so are
integers of more digits than Python reads back.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import hrl

_TUPLE = "__tuple__"
_INTEGER = "__int__"
_LARGEST_PLAIN_BITS = 10_000  # Python reads and writes integers of up to 4300 digits in decimal
_DEEPEST = 100
_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|PRIVATE|SESSION|SIGNATURE|BEARER|WEBHOOK|JWT|APIKEY|ACCESSKEY|"
    r"CONNECTION_?STRING|(^|_)(AUTH|KEYS?|PAT|PASS|PWD|DSN)(_|$)",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"://[^/\s@]+@"  # an address with a login
    r"|\b(?:sk|rk|pk)[-_][A-Za-z0-9_-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bgh[opsur]_[A-Za-z0-9]{16,}|\bgithub_pat_"
    r"|\bglpat-|\bxox[a-z]-|\bAKIA[A-Z0-9]{12,}|\bAIza[A-Za-z0-9_-]{20,}|\beyJ[A-Za-z0-9_-]{10,}\.|-----BEGIN "
    r"|(?:password|passwd|pwd|token|secret|apikey|api_key|accountkey|sharedaccesskey|sig)=[^\s;&]",
    re.IGNORECASE,
)
_NOT_A_SECRET = frozenset({"PWD", "OLDPWD", "TOKENIZERS_PARALLELISM"})


def child_environment(
    environ: Mapping[str, str] | None = None, *, keep: Collection[str] = (), **changes: str
) -> dict[str, str]:
    """Return the environment of a child: the parent's without whatever looks like a secret, and `hrl` importable.

    A variable looks like a secret by its name (token, key, password, …) or by its value (an address with a login, a key
    in one of the well-known forms).

    Args:
        environ: Of the parent; its own if None.
        keep: Variables that are handed on whatever they look like.
        changes: Variables of the child's own.
    """
    source = os.environ if environ is None else environ
    withheld = withheld_names(source, keep=keep)
    kept = {name: value for name, value in source.items() if name not in withheld}
    root = str(Path(hrl.__file__).parent.parent)
    inherited = [part for part in kept.get("PYTHONPATH", "").split(os.pathsep) if part and part != root]
    kept["PYTHONPATH"] = os.pathsep.join([*inherited, root])
    return kept | changes


def withheld_names(environ: Mapping[str, str] | None = None, *, keep: Collection[str] = ()) -> frozenset[str]:
    """Return the variables that `child_environment` leaves out."""
    source = os.environ if environ is None else environ
    return frozenset(
        name
        for name, value in source.items()
        if name not in _NOT_A_SECRET and name not in keep and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))
    )


def to_plain(value: Any, where: str = "value") -> Any:
    """`value` as JSON can hold it: tuples and huge integers tagged, the rest as it is.

    Raises:
        ValueError: Something that isn't plain data, or nested too deep, naming where.
    """
    return _to_plain(value, where, 0)


def _to_plain(value: Any, where: str, depth: int) -> Any:
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= _LARGEST_PLAIN_BITS else {_INTEGER: hex(value)}
    if depth >= _DEEPEST:
        raise ValueError(f"{where[:200]}… is nested more than {_DEEPEST} levels deep")
    if isinstance(value, tuple):
        return {_TUPLE: [_to_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_to_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; only text keys can be handed to another process")
        return {key: _to_plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return _to_plain(value.tolist(), where, depth + 1)
    raise ValueError(
        f"{where} is a {type(value).__name__}; only numbers, text, lists, tuples and dicts can go to another process"
    )


def from_plain(value: Any) -> Any:
    """Return what `to_plain` was given."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(from_plain(item) for item in value[_TUPLE])
        if value.keys() == {_INTEGER}:
            return int(value[_INTEGER], 16)
        return {key: from_plain(item) for key, item in value.items()}
    return value
