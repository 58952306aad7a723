"""Types of arguments for `type=` of argparse, which shows their message."""

from __future__ import annotations

from argparse import ArgumentTypeError


def whole_number(text: str) -> int:
    """Return a whole number."""
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no whole number") from None


def at_least_one(text: str) -> int:
    """Return a whole number that is at least 1."""
    number = whole_number(text)
    if number < 1:
        raise ArgumentTypeError(f"{number} is not at least 1")
    return number
