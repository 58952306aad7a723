"""Which keys of a configuration the code reads while it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hrl.config.section import Section, WholeConfig, leaves, section_of

PACKAGE = Path(__file__).parents[2] / "hrl"
#: These touch every key, whatever it means: the schema and its rules, and what replaces `dtype=auto`.
NOT_A_READER = (PACKAGE / "config", PACKAGE / "cluster" / "precision.py")
#: Of the configuration's own code, what a run asks: properties of a section, micro-batches, the number of steps, roles
#: and pools.
ASKED_BY_A_RUN = tuple(
    PACKAGE / "config" / f"{name}.py"
    for name in ("ppo", "offline", "model", "reward", "outline", "placement", "trainer")
)


class KeyReads:
    """Records which attributes of sections the package reads in this process.

    A section does not know where it stands: it is followed from the whole configuration downwards. A copy that
    `model_copy` or a pickle has made stands where its class stands, if that is one place only.
    """

    def __init__(self) -> None:
        self._keys: dict[type[WholeConfig], set[str]] = {}
        self._places: dict[int, tuple[Section, type[WholeConfig], str]] = {}  # holds sections, so that no id is reused

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is read until the end of the block."""

        def read(section: Section, name: str) -> Any:
            value = object.__getattribute__(section, name)
            if name in type(section).__pydantic_fields__:
                self._note(section, name, value, Path(sys._getframe(1).f_code.co_filename))
            return value

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Section, "__getattribute__", read)
            yield

    def unread(self, root: type[WholeConfig]) -> set[str]:
        """Return the keys that nobody read."""
        return leaves(root).keys() - self._keys.get(root, set())

    def _note(self, section: Section, name: str, value: object, reader: Path) -> None:
        for root, path in self._places_of(section):
            key = f"{path}.{name}".lstrip(".")
            if isinstance(value, Section):
                self._places[id(value)] = value, root, key
            elif reader in ASKED_BY_A_RUN or (
                reader.is_relative_to(PACKAGE) and not any(reader.is_relative_to(part) for part in NOT_A_READER)
            ):
                self._keys.setdefault(root, set()).add(key)

    def _places_of(self, section: Section) -> list[tuple[type[WholeConfig], str]]:
        if isinstance(section, WholeConfig):
            return [(type(section), "")]
        if id(section) in self._places:
            return [self._places[id(section)][1:]]
        known = [(root, path) for root in self._keys for path, kind in section_types(root) if kind is type(section)]
        return known if len(known) == 1 else []


def section_types(kind: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections below a section as (dotted path, class)."""
    for name, field in kind.model_fields.items():
        if (below := section_of(field)) is not None:
            yield f"{path}.{name}".lstrip("."), below
            yield from section_types(below, f"{path}.{name}")
