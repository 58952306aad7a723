"""Types of arguments for `type=` of argparse."""

from __future__ import annotations

from argparse import ArgumentTypeError


def at_least_one(text: str) -> int:
    """Return a whole number that is at least 1."""
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"{number} is not at least 1")
    return number
