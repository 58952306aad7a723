"""The keys of a trainer as attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hrl.config.compose import to_yaml
from hrl.config.outline import RunConfiguration
from hrl.config.section import Section, leaves, sections
from hrl.nearest import did_you_mean


class ConfigView:
    """The keys of a trainer, to read and to set; rules between keys are checked when the configuration is next read.

    Args:
        schema: Class of the whole configuration.
        read: Returns the configuration with all defaults.
        write: Sets a key.
        prefix: What stands before the keys of this view.
    """

    def __init__(
        self,
        schema: type[Section],
        read: Callable[[], RunConfiguration],
        write: Callable[[str, Any], None],
        prefix: str = "",
    ) -> None:
        for name, value in (("_schema", schema), ("_read", read), ("_write", write), ("_prefix", prefix)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # questions of Python and of notebooks, not keys
            raise AttributeError(name)
        key = self._key(name)
        if key in sections(self._schema):
            return ConfigView(self._schema, self._read, self._write, f"{key}.")
        value: Any = self._read()
        for part in key.split("."):
            value = getattr(value, part)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._write(self._key(name), value)

    def __dir__(self) -> list[str]:
        below = [key.removeprefix(self._prefix) for key in leaves(self._schema) if key.startswith(self._prefix)]
        return sorted({key.partition(".")[0] for key in below})

    def __repr__(self) -> str:
        node: Any = self._read()
        for part in self._prefix.split(".")[:-1]:
            node = getattr(node, part)
        return to_yaml(node)

    def _key(self, name: str) -> str:
        if name not in (known := dir(self)):
            hint = did_you_mean(name, known, f"There are {', '.join(known)}.")
            raise AttributeError(f"{self._prefix}{name} is not a key of hrl. {hint}")
        return f"{self._prefix}{name}"
