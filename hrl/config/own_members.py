"""Estimators and losses of the user's own: a key names one as `my.py:name`, and that file registers it.

The file is run when a configuration that names it is read, because rules between keys ask for the member's traits.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from hrl.algos.registry import (
    ESTIMATOR_TRAITS,
    IN_FILE,
    POLICY_LOSS_TRAITS,
    EstimatorTraits,
    Traits,
    estimator_traits,
    member_name,
)
from hrl.files import expanded
from hrl.nearest import did_you_mean
from hrl.user_file import UserFileError, load_user_file


class MemberError(Exception):
    """A value names a file that can't be run, or that registers nothing of that name.

    Attributes:
        what: Is wrong, as the words after the key.
        hint: The way out.
    """

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what, hint)
        self.what, self.hint = what, hint


@dataclass(frozen=True)
class _Family:
    """A family with members in users' files; its registry imports torch, and so does a file that adds to it."""

    title: str
    table: Mapping[str, Traits]
    module: str
    registry: str
    decorator: str


_FAMILIES = (
    _Family(
        "advantage estimator", ESTIMATOR_TRAITS, "hrl.algos.advantages", "ADVANTAGE_ESTIMATORS", "register_adv_est"
    ),
    _Family("policy loss", POLICY_LOSS_TRAITS, "hrl.algos.policy_losses", "POLICY_LOSSES", "register_policy_loss"),
)


@dataclass(frozen=True)
class _Loaded:
    """What a file registered when it was run.

    Attributes:
        digest: Of the file's content then.
        names: Per family, what it added to the table.
    """

    digest: str
    names: tuple[frozenset[str], ...]


_LOADED: dict[Path, _Loaded] = {}


def load_member(value: str, table: Collection[str]) -> None:
    """Run the file that a value names, unless this process has, and make sure that it registers the name.

    Args:
        value: As in `my_loss.py:mine`.
        table: Of the family.

    Raises:
        MemberError: There is no such file, it fails, or it registers nothing of that name.
    """
    number, family = next((n, family) for n, family in enumerate(_FAMILIES) if family.table is table)
    file = value.removesuffix(f":{member_name(value)}")
    registered = _load(file, value).names[number]
    if member_name(value) not in registered:
        listed = ", ".join(sorted(registered)) or "none"
        otherwise = f"It registers {listed}; a decorator @{family.decorator}({member_name(value)!r}) adds one."
        hint = did_you_mean(member_name(value), sorted(registered), otherwise)
        raise MemberError(f"names {value!r}, and {file} registers no {family.title} of that name.", hint)


def traits_of_estimator(value: object) -> EstimatorTraits:
    """Return the needs of the estimator that a value names, before it is validated; none for what is refused later."""
    if not isinstance(value, str):
        return EstimatorTraits()
    if IN_FILE in value:
        try:
            load_member(value, ESTIMATOR_TRAITS)
        except MemberError:  # told where the key is validated
            return EstimatorTraits()
    return estimator_traits(value)


def _load(file: str, value: str) -> _Loaded:
    path = expanded(file).resolve()
    try:
        digest = sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    except OSError as error:
        raise MemberError(f"names {value!r}, and {file} can't be read: {error.strerror}.", "") from error
    loaded = _LOADED.get(path)
    if loaded is not None and loaded.digest == digest and not _missing(loaded):
        return loaded
    if loaded is not None:  # in a session that edits its file
        _take_back(loaded.names)
    before = [set(family.table) for family in _FAMILIES]
    try:
        module = load_user_file(file)
    except UserFileError as error:
        raise MemberError(f"names {value!r}: {str(error).rstrip('.')}.", "") from error
    except Exception as error:  # the user's own code, which may raise anything
        _take_back(_added(before))
        raise MemberError(f"names {value!r}, and {file} raises {type(error).__name__}: {error}.", "") from error
    # Ranks, on whichever node, get its functions whole: what a pickle finds among the modules is sent by name only.
    del sys.modules[module.__name__]
    _LOADED[path] = loaded = _Loaded(digest, _added(before))
    return loaded


def _added(before: Sequence[Collection[str]]) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(family.table).difference(names) for family, names in zip(_FAMILIES, before, strict=True))


def _missing(loaded: _Loaded) -> bool:
    """Return whether something that a file registered has been taken away since."""
    return any(names - family.table.keys() for names, family in zip(loaded.names, _FAMILIES, strict=True))


def _take_back(names: Sequence[Collection[str]]) -> None:
    for family, taken in zip(_FAMILIES, names, strict=True):
        for name in taken:
            if name in family.table:
                del getattr(sys.modules[family.module], family.registry)[name]
