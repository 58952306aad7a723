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


def port(text: str) -> int:
    """Return the number of a port; 0 for a free one."""
    number = whole_number(text)
    if not 0 <= number <= 65535:
        raise ArgumentTypeError(f"{number} is no port")
    return number


def positive(text: str) -> float:
    """Return a number above 0."""
    number = _number(text)
    if not number > 0:
        raise ArgumentTypeError(f"{text} is not above 0")
    return number


def not_negative(text: str) -> float:
    """Return a number that is 0 or more."""
    number = _number(text)
    if not number >= 0:
        raise ArgumentTypeError(f"{text} is below 0")
    return number


def share(text: str) -> float:
    """Return a number from 0 to 1."""
    number = _number(text)
    if not 0 <= number <= 1:
        raise ArgumentTypeError(f"{text} is not between 0 and 1")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number") from None
