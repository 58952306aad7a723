"""What is a secret, by its name or by its value."""

from __future__ import annotations

import re

_VARIABLE = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|PRIVATE|SESSION|SIGNATURE|BEARER|WEBHOOK|JWT|APIKEY|ACCESSKEY|"
    r"CONNECTION_?STRING|(^|_)(AUTH|KEYS?|PAT|PASS|PWD|DSN)(_|$)",
    re.IGNORECASE,
)
_VALUE = re.compile(
    r"://[^/\s@]+@"  # an address with a login
    r"|\b(?:sk|rk|pk)[-_][A-Za-z0-9_-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bgh[opsur]_[A-Za-z0-9]{16,}|\bgithub_pat_"
    r"|\bglpat-|\bxox[a-z]-|\bAKIA[A-Z0-9]{12,}|\bAIza[A-Za-z0-9_-]{20,}|\beyJ[A-Za-z0-9_-]{10,}\.|-----BEGIN "
    r"|(?:password|passwd|pwd|token|secret|apikey|api_key|accountkey|sharedaccesskey|sig)=[^\s;&]",
    re.IGNORECASE,
)
_ARGUMENT = re.compile(
    r"(^|_)(api_?key|access_?key|private_?key|secret|passw(or)?d|passphrase|credentials?|bearer|jwt|"
    r"(api|auth|access|hf)_?token)$",
    re.IGNORECASE,
)
"""Narrower than for variables: arguments such as `max_tokens`, `stop_token` and `key` are no secrets."""
_NO_SECRETS = frozenset({"PWD", "OLDPWD", "TOKENIZERS_PARALLELISM"})


def is_secret_variable(name: str, value: str) -> bool:
    """Return whether an environment variable looks like a secret.

    It does by its name (token, key, password, …) or by its value (an address with a login, a key in one of the
    well-known forms).
    """
    return name not in _NO_SECRETS and bool(_VARIABLE.search(name) or _VALUE.search(value))


def is_written_secret(name: str, value: object) -> bool:
    """Return whether an argument of a function has a secret for its value, rather than `env:NAME`.

    Args:
        name: Of the argument.
        value: Its value; only a text can be one.
    """
    if not isinstance(value, str) or not value or value.startswith("env:"):
        return False
    return bool(_ARGUMENT.search(name) or _VALUE.search(value))
