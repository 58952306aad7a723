"""Draw what prefix trees save: `python docs/pictures/prefix_trees.py` writes the SVG beside this file.

It is drawn from `bench/results/prefix_trees.json`, which `make bench NAME=prefix_trees` writes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import vl_convert

from bench.results import read

PICTURE = Path(__file__).with_suffix(".svg")
CASES = {
    "turns in common": "8 samples, turns in common",
    "branches": "3 episodes of 6 turns, a branch each",
    "turns of their own": "8 samples, turns of their own",
    "nothing shared": "8 rows, nothing shared",
}
"""Case of the benchmark → its name in the picture."""
PACKINGS = {"hrl, rows whole": "whole rows", "hrl, prompts once": "prompts once"}
"""Peer of the benchmark → its name in the picture."""
TREES = "trees"
QUANTITIES = {"tokens": "tokens that are computed", "CPU seconds": "CPU seconds of an update"}


def bars() -> list[dict[str, Any]]:
    """Return a bar for each quantity, case and packing; trees were measured against each peer, and are their mean.

    Raises:
        FileNotFoundError: The benchmark has not run.
    """
    found = read("prefix_trees")
    if found is None:
        raise FileNotFoundError("bench/results/prefix_trees.json: make bench NAME=prefix_trees writes it")
    values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in found.rows:
        if row.label in CASES and row.quantity in QUANTITIES:
            values[row.quantity, row.label, PACKINGS[row.peer]].append(row.theirs)
            values[row.quantity, row.label, TREES].append(row.ours)
    return [
        {
            "quantity": QUANTITIES[quantity],
            "case": CASES[case],
            "packing": packing,
            "value": mean(each),
            "figure": f"{mean(each):,.{0 if quantity == 'tokens' else 2}f}",
        }
        for (quantity, case, packing), each in values.items()
    ]


def draw(file: Path) -> None:
    """Draw the bars, a panel for each quantity."""
    packings = [*PACKINGS.values(), TREES]
    x = {"field": "value", "type": "quantitative", "title": None}
    y = {"field": "case", "type": "nominal", "title": None, "sort": list(CASES.values()), "axis": {"labelLimit": 240}}
    offset = {"field": "packing", "sort": packings}
    number = {"field": "figure", "type": "nominal"}
    chart = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "data": {"values": bars()},
        "facet": {"column": {"field": "quantity", "title": None, "sort": list(QUANTITIES.values())}},
        "resolve": {"scale": {"x": "independent"}},
        "spec": {
            "width": 260,
            "height": 220,
            "encoding": {"y": y, "x": x, "yOffset": offset},
            "layer": [
                {
                    "mark": "bar",
                    "encoding": {
                        "color": {
                            "field": "packing",
                            "type": "nominal",
                            "title": None,
                            "sort": packings,
                            "scale": {"domain": packings, "range": ["#b9c4cf", "#6f9fd0", "#2f7d4f"]},
                        }
                    },
                },
                {"mark": {"type": "text", "align": "left", "dx": 3, "fontSize": 10}, "encoding": {"text": number}},
            ],
        },
        "config": {"background": "#ffffff"},
    }
    file.write_text(vl_convert.vegalite_to_svg(json.dumps(chart)), encoding="utf-8")


if __name__ == "__main__":
    draw(PICTURE)
