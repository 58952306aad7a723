"""A ledger of memory as plain data and on the screen: a line for each phase, a column for each kind of thing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_GIB = 1 << 30


class Saving(NamedTuple):
    """What one key saves.

    Attributes:
        key: Of the configuration.
        value: Its other value.
        num_bytes: By which the peak falls.
    """

    key: str
    value: Any
    num_bytes: float

    def __str__(self) -> str:
        """Return `key=value (GiB less)`."""
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.key}={value} ({_gib(self.num_bytes)} GiB less)"


def shown(table: Mapping[str, Any]) -> RenderableType:
    """Return a table for a console, in GiB; columns of nothing are left out.

    Args:
        table: As `hrl.preflight.memory_look.table_of` makes it.
    """
    phases = table["phases"]
    columns = [column for column in phases[0]["columns"] if any(phase["columns"][column] for phase in phases)]
    grid = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    there = "" if table["capacity"] is None else f", of {_gib(table['capacity'])}"
    grid.add_column(f"GiB{there}", no_wrap=True)
    for name in (*columns, "together"):
        grid.add_column(name, justify="right", no_wrap=True)
    for phase in phases:
        cells = [_gib(phase["columns"][column]) for column in columns]
        style = "bold" if phase["phase"] == table["peak"] else ""
        grid.add_row(phase["phase"], *cells, _gib(phase["bytes"]), style=style)
    peak = next(phase for phase in phases if phase["phase"] == table["peak"])
    largest = table["dominates"]
    words = f"most in {table['peak']}, of which {largest} {_gib(peak['entries'][largest])}"
    if table["savings"]:
        words += "; less with " + ", or ".join(str(Saving(**saving)) for saving in table["savings"])
    return Padding(Group(grid, Text(words)), (0, 0, 0, 2))


def _gib(num_bytes: float) -> str:
    """Return GiB with as many decimals as help; nothing for nothing."""
    if num_bytes == 0:
        return ""
    gib = num_bytes / _GIB
    return f"{gib:,.0f}" if gib >= 99.95 else f"{gib:.1f}" if gib >= 0.95 else f"{gib:.2f}"
