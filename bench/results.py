"""What the benchmarks found: files of figures, and the page and the pictures that are made of them."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.harness import Comparison
from bench.origin import Origin

HERE = Path(__file__).parent
FOLDER = HERE / "results"
PAGE = HERE / "RESULTS.md"


@dataclass(frozen=True)
class Found:
    """What one run of a benchmark found."""

    origin: Origin
    rows: Sequence[Comparison]


def write(file: Path, found: Found) -> None:
    """Write a benchmark's figures, for `read`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


def read(name: str) -> Found | None:
    """Return the figures of a benchmark's last run; None if it has not run."""
    file = FOLDER / f"{name}.json"
    if not file.is_file():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    rows = [{**row, "spread": tuple(row["spread"]), "rounds": tuple(row["rounds"])} for row in found["rows"]]
    return Found(Origin(**found["origin"]), [Comparison(**row) for row in rows])


def below_floor(found: Mapping[str, Found]) -> list[str]:
    """Return a sentence for every comparison that misses its floor."""
    return [
        f"{name}: {row.label}: {row.ratio:.1f} times less {row.quantity} than {row.peer}; the floor is {row.floor:g}"
        for name, one in found.items()
        for row in one.rows
        if not row.holds
    ]


def write_page(found: Mapping[str, Found]) -> None:
    """Write the page of results, and a picture of growth for each benchmark that has one."""
    lines = [
        "# Results",
        "",
        "Written by `make bench`; do not edit. Each row is hrl's code against a peer's released code, on the same",
        "input. Their results are compared, and nothing is written where these differ; the text of a benchmark says",
        "where that is less than equality. The two run in turns, and times are medians of `rounds`, hrl's and the",
        "peer's where these differ. Take the ratios: seconds differ from machine to machine, and by tens of percent",
        "from run to run. `±` is the largest distance of a round from the median, hrl's and the peer's. A floor is the",
        "ratio that `make bench` insists on; a row without one only shows growth. Behind a commit, `+` says that the",
        "tree had changes besides.",
        "",
    ]
    for name, one in found.items():
        lines += _section(name, one)
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _section(name: str, found: Found) -> list[str]:
    title, _, rest = _docstring(name).partition("\n")
    rows = found.rows
    lines = [f"## {title.rstrip('.')}", "", f"`make bench NAME={name}`", "", f"{found.origin}", ""]
    lines += [*rest.strip().splitlines(), ""]
    lines += [
        "| case | quantity | hrl | peer | | ratio | floor | rounds | ± |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
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
            ", ".join(map(str, dict.fromkeys(row.rounds))),
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
