"""The environment that a child process gets: the parent's without its secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import hrl

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
_SECRET_ARGUMENT = re.compile(
    r"(^|_)(api_?key|access_?key|private_?key|secret|passw(or)?d|passphrase|credentials?|bearer|jwt|"
    r"(api|auth|access|hf)_?token)$",
    re.IGNORECASE,
)
"""Narrower than for variables: arguments such as `max_tokens`, `stop_token` and `key` are no secrets."""
_NOT_A_SECRET = frozenset({"PWD", "OLDPWD", "TOKENIZERS_PARALLELISM"})


def child_environment(
    environ: Mapping[str, str] | None = None, *, keep: Collection[str] = (), **changes: str
) -> dict[str, str]:
    """Return the environment of a child: the parent's without whatever looks like a secret, and the parent's `hrl`.

    A variable looks like a secret by its name (token, key, password, …) or by its value (an address with a login, a key
    in one of the well-known forms).

    Args:
        environ: The parent's environment; that of this process if None.
        keep: Variables that are passed on even if they look like secrets.
        changes: Additional variables for the child.
    """
    source = os.environ if environ is None else environ
    withheld = withheld_names(source, keep=keep)
    kept = {name: value for name, value in source.items() if name not in withheld}
    root = str(Path(hrl.__file__).parent.parent)
    parts = [part for part in kept.get("PYTHONPATH", "").split(os.pathsep) if part and part != root]
    # Last, since `root` may be site-packages, which the others are to hide; but before another hrl: the child has to
    # import the one that runs here.
    another = next((place for place, part in enumerate(parts) if (Path(part) / "hrl").is_dir()), len(parts))
    kept["PYTHONPATH"] = os.pathsep.join([*parts[:another], root, *parts[another:]])
    return kept | changes


def is_written_secret(name: str, value: object) -> bool:
    """Return whether an argument of a function has a secret for its value, rather than `env:NAME`.

    Args:
        name: Of the argument.
        value: Its value; only a text can be one.
    """
    if not isinstance(value, str) or not value or value.startswith("env:"):
        return False
    return bool(_SECRET_ARGUMENT.search(name) or _SECRET_VALUE.search(value))


def withheld_names(environ: Mapping[str, str] | None = None, *, keep: Collection[str] = ()) -> frozenset[str]:
    """Return the variables that `child_environment` leaves out."""
    source = os.environ if environ is None else environ
    return frozenset(
        name
        for name, value in source.items()
        if name not in _NOT_A_SECRET and name not in keep and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))
    )


@contextmanager
def changed_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables for the processes that are started in the block; `None` removes one."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
