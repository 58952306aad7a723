"""The base of all errors that a user can act on, and the error that lists all problems of a configuration."""

import errno
import os
import re
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class HrlError(Exception):
    """Something a user can act on: the message names key, row, sample or rank, and the way out.

    A command shows the message alone and logs the traceback; any other exception is a bug of hrl, whose traceback is
    shown.

    Attributes:
        may_pass: Whether a machine failed and not the run, so that starting the run again may help
            (`trainer.max_restarts`).
    """

    may_pass = False


def may_pass(error: BaseException | None) -> bool:
    """Return whether an error, or one that led to it, came from a machine and not from the run."""
    while error is not None:
        if getattr(error, "may_pass", False):
            return True
        error = error.__cause__
    return False


class RefusedError(HrlError):
    """What was asked for can't work, or what was named is not there; asking again without a change is no use.

    A command that ends with it has exit status 2, as after arguments that make no sense.
    """


class UnreachableError(HrlError):
    """Something elsewhere that was asked, e.g. a hub of models, can't be reached; later the same may work."""


class NonFiniteError(HrlError, ArithmeticError):
    """A number is NaN or infinite that a run can't go on without; the exit status is 3."""


class DatasetError(RefusedError, ValueError):
    """A source, a row or a whole data set can't be used; the message names file, row and the way out."""


def system_error(error: Exception) -> OSError | None:
    """Return the system's error that a library written in Rust tells of in words, such as a full disk; else None."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else None


_WAY_OUT = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "its owner can allow it, or name another place"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room there, or name another place"),
    errno.EROFS: "name a place that can be written",
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN), "look after the disk or its mount"),
    errno.ENAMETOOLONG: "name another place",
}


def refusal_of_system(error: OSError) -> str:
    """Return in a line what the system refuses to do with a file, and the way out; nothing for another error.

    Others, such as a file that is not there where hrl takes it for granted, may be bugs of hrl, and so may be those
    without the name of a file: they need a traceback.
    """
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    if error.errno not in _WAY_OUT or not names:
        return ""
    return f"{' → '.join(names)}: {error.strerror}; {_WAY_OUT[error.errno]}"


class Reason(StrEnum):
    """Why a key or value is refused."""

    ALTERNATIVE = "alternative"
    """hrl has it in another way, which the hint names."""
    ABSENT = "feature absent"
    """hrl does not have it, and the hint says so."""
    UNREADABLE = "unreadable"
    """It has no meaning, e.g. an empty number or text that is not an argument."""


class Problem(NamedTuple):
    """One thing that is wrong with a configuration, and the way out.

    Attributes:
        key: The key as the user wrote it.
        what: What is wrong, as the predicate of a sentence whose subject is the key: "is 3, must be …".
        hint: The way out.
        involves: Other keys it rests on; while one of those is itself in doubt, this problem is not reported.
        reason: Why; None where what was written is a mistake in itself.
    """

    key: str
    what: str
    hint: str = ""
    involves: tuple[str, ...] = ()
    reason: Reason | None = None

    def __str__(self) -> str:
        return " ".join(part for part in (self.key, self.what, self.hint) if part)


class ConfigError(RefusedError, ValueError):
    """The configuration can't be run. `str()` lists all problems, numbered.

    Attributes:
        problems: The problems, in the order of the list.
    """

    where = "in the configuration"

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} {self.where}:"
        return "\n".join([head, *(f"  {i}. {problem}" for i, problem in enumerate(self.problems, 1))])
