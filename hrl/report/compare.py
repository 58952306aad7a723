"""Several runs in one page: their curves over each other, and what differs in configuration, numbers and answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from hrl.report.answers import Series, last_validations, that_differ
from hrl.report.charts import CHARTS, any_metric, charts_of, ends_of, metrics_of, run_columns
from hrl.report.html_report import Page, curves, flat, page_of, section, shown_series, thresholds_of
from hrl.report.outcome import read_outcome
from hrl.report.run_folder import read_config, read_metrics

_PROMPTS_SHOWN = 8
_SAME_FOR_NOBODY = ("trainer.default_local_dir", "trainer.experiment_name")
"""Keys in which any two runs differ."""


_CHECKSUM = "/weights_checksum"


def compare_page(folders: Sequence[Path]) -> Page:
    """Return the page that compares runs.

    Args:
        folders: Their folders, at least two.

    Raises:
        OSError: A file can't be read.
        ValueError: A file of a run is damaged; names file and line.
    """
    names = short_names(folders)
    records = [read_metrics(folder) for folder in folders]
    runs = [run_columns(each) for each in records]
    configs = [read_config(folder) for folder in folders]
    drawn = charts_of(runs, names)
    sections = {
        "header": section("comparison_header", names),
        "summary": section("runs", _runs(folders, names, runs)),
        "curves": curves(drawn, runs, _common_thresholds(configs)),
        "numbers": section("numbers", names, final_numbers(runs) + equal_weights(records)),
        "differences": section("differences", names, differences(configs)),
        "answers": _answers(folders, names),
    }
    return page_of(" · ".join(names), sections, drawn, runs, names)


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each run: the last parts of its path, as many as tell the runs apart."""
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{folder} ({number})" for number, folder in enumerate(folders, start=1)]  # the same one twice


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the keys in which configurations differ, with the value in each; a dash where there is no such key."""
    flattened = [dict(flat(config)) for config in configs]
    keys = dict.fromkeys(key for values in flattened for key in values)
    rows = [(key, [_value(values, key) for values in flattened]) for key in keys if key not in _SAME_FOR_NOBODY]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def final_numbers(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[float | None]]]:
    """Return the last value of the metrics that the charts show, for each run."""
    found = dict.fromkeys(name for chart in CHARTS for name in metrics_of(chart, runs))
    rows = []
    for name in found:
        ends = [ends_of(columns, name) for columns in runs]
        rows.append((name, [None if each is None else each[1] for each in ends]))
    return [(name, values) for name, values in rows if any(value is not None for value in values)]


def equal_weights(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[str, list[float | None]]]:
    """Return, for each model that all runs train, up to which of their common steps all have the same weights.

    Args:
        runs: The records of every run.

    Returns:
        Rows of the table of numbers; 0 where the first common step differs already.
    """
    rows: list[tuple[str, list[float | None]]] = []
    for name in dict.fromkeys(key for records in runs for record in records for key in record):
        if not name.endswith(_CHECKSUM):
            continue
        sums = [{record["step"]: record[name] for record in records if name in record} for records in runs]
        common = sorted(set.intersection(*(set(each) for each in sums)))
        same = list(takewhile(lambda step: len({each[step] for each in sums}) == 1, common))  # noqa: B023  used at once
        if common:
            rows.append((f"{name}: equal up to step", [float(same[-1]) if same else 0.0] * len(runs)))
    return rows


def _value(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False, default=str) if key in values else "–"


def _common_thresholds(configs: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    first, *others = map(thresholds_of, configs)
    return {name: limit for name, limit in first.items() if all(other.get(name) == limit for other in others)}


def _runs(folders: Sequence[Path], names: Sequence[str], runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "folder": str(folder),
            "colour": line.colour,
            "dash": line.dash,
            "status": read_outcome(folder).status,
            "steps": columns["steps"][-1] if columns["steps"] else 0,
        }
        for folder, name, columns, line in zip(folders, names, runs, any_metric(len(runs), names).lines, strict=True)
    ]


def _answers(folders: Sequence[Path], names: Sequence[str]) -> str:
    """Return the answers of each run's last validation to the prompts that all of them had, where they differ."""
    found = last_validations([folder / "rollouts" for folder in folders])
    if not found:
        return ""
    different = that_differ(found)
    shown = different[:_PROMPTS_SHOWN]
    disagree = sum(each.differs_in_score for each in found)
    about = f"Scores differ on {disagree} of {len(found)} validation prompts that all runs answered"
    if not disagree:
        about += f"; words do on {len(different)}"
    about += f"; here are {len(shown)}." if len(shown) < len(different) else "."
    title = "The last validation, side by side"
    return section("answers", title, about, [_shown(each, names) for each in shown], "answer")


def _shown(series: Series, names: Sequence[str]) -> dict[str, Any]:
    shown = shown_series(series, [f"{name}, step {a.step}" for name, a in zip(names, series.answers, strict=True)])
    return shown | {"change": None}  # no run comes before another
