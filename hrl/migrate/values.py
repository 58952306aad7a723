"""Flags of a command line, and their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


def flags_of(words: Sequence[str]) -> tuple[dict[str, tuple[Any, str]], list[str]]:
    """Return the flags of a command line, in the way of argparse.

    Returns:
        Name → its value (True without one, a list of several) and how it was written; and words that belong to no flag.
    """
    flags: dict[str, tuple[Any, str]] = {}
    stray: list[str] = []
    name: str | None = None
    texts: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            texts[name] = [value] if equals else []
        elif name is None:
            stray.append(word)
        else:
            texts[name].append(word)
    for name, values in texts.items():
        read = [value_of(text) for text in values]
        flags[name] = (True if not read else read[0] if len(read) == 1 else read, " ".join([f"--{name}", *values]))
    return flags, stray


def value_of(text: str) -> Any:
    """Return a number, a truth value or null where the text is one, else the text."""
    try:
        return float(text) if _is_exponential(text) else _plain(yaml.safe_load(text), text)
    except (yaml.YAMLError, ValueError, RecursionError):  # also of a number of thousands of digits, or of `²e5`
        return text


def _is_exponential(text: str) -> bool:
    """Return whether it is a number such as `5e-7`, which YAML takes for a text."""
    mantissa, e, exponent = text.lower().partition("e")
    return bool(e) and mantissa.replace(".", "", 1).lstrip("-").isdigit() and exponent.lstrip("+-").isdigit()


def _plain(value: Any, text: str) -> Any:
    return (
        value
        if value is None or isinstance(value, bool | int | float)
        else {"True": True, "False": False}.get(text, text)
    )
