"""Several runs in one page: their curves over each other, and what differs in configuration, numbers and answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hrl.report.answers import by_prompt
from hrl.report.charts import CHARTS, charts_of, ends_of, metrics_of, run_columns
from hrl.report.html_report import Page, curves, flat, page_of, section, shown_text
from hrl.report.outcome import read_outcome
from hrl.report.run_folder import read_jsonl, rollouts_steps
from hrl.report.samples import Sample, question, read_samples, sample_facts

_PROMPTS_SHOWN = 8
_SAME_FOR_NOBODY = ("trainer.default_local_dir", "trainer.experiment_name")
"""Keys in which any two runs differ."""


def compare_page(folders: Sequence[Path]) -> Page:
    """Return the page that compares runs.

    Args:
        folders: Their folders, at least two.

    Raises:
        OSError: A file can't be read.
        ValueError: A file of a run is damaged; names file and line.
    """
    names = short_names(folders)
    metrics = [folder / "metrics.jsonl" for folder in folders]
    runs = [run_columns(read_jsonl(file)) if file.exists() else run_columns([]) for file in metrics]
    drawn = charts_of(runs, names)
    sections = {
        "header": section("comparison_header", names),
        "summary": section("runs", _runs(folders, names, runs)),
        "curves": curves(drawn, runs),
        "numbers": section("numbers", names, final_numbers(runs)),
        "differences": section("differences", names, differences([_config(folder) for folder in folders])),
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


def _value(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False, default=str) if key in values else "–"


def _config(folder: Path) -> dict[str, Any]:
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    return dict(config or {})


def _runs(folders: Sequence[Path], names: Sequence[str], runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "folder": str(folder),
            "colour": f"c{number}",
            "status": read_outcome(folder).status,
            "steps": columns["steps"][-1] if columns["steps"] else 0,
        }
        for number, (folder, name, columns) in enumerate(zip(folders, names, runs, strict=True))
    ]


def _answers(folders: Sequence[Path], names: Sequence[str]) -> str:
    """Return the answers of each run's last validation to the prompts that all of them had."""
    last = []
    for folder in folders:
        steps = rollouts_steps(folder / "rollouts", "val")
        if not steps:
            return ""
        last.append((steps[-1], by_prompt(read_samples(folder / "rollouts", steps[-1], "val"))))
    common = [prompt for prompt in last[0][1] if all(prompt in answers for _, answers in last)]
    if not common:
        return ""
    samples = [(prompt, [answers[prompt][0] for _, answers in last]) for prompt in common]
    samples.sort(key=lambda row: -_disagreement(row[1]))
    shown = [_shown(of_runs, names, [step for step, _ in last]) for _, of_runs in samples[:_PROMPTS_SHOWN]]
    disagree = sum(_disagreement(of_runs) > 0 for _, of_runs in samples)
    about = f"Scores differ on {disagree} of {len(common)} validation prompts that all runs answered"
    about += f"; here are {len(shown)}." if len(shown) < len(common) else "."
    return section("answers", "The last validation, side by side", about, shown, "answer")


def _disagreement(samples: Sequence[Sample]) -> float:
    scores = [sample["score"] for sample in samples if sample.get("score") is not None]
    return max(scores) - min(scores) if scores else 0.0


def _shown(samples: Sequence[Sample], names: Sequence[str], steps: Sequence[int]) -> dict[str, Any]:
    answers = []
    for sample, name, step in zip(samples, names, steps, strict=True):
        facts = [f"{fact}: {value}" for fact, value in sample_facts(sample) if fact != "truth"]
        label, response = f"{name}, step {step}", shown_text(sample["response"])
        answers.append({"label": label, "response": response, "facts": shown_text(" · ".join(facts))})
    first = samples[0]
    truth = first.get("ground_truth")
    return {
        "sample": {"question": shown_text(question(first)), "prompt": shown_text(first["prompt"])},
        "truth": None if truth is None else shown_text(str(truth)),
        "answers": answers,
        "change": None,
    }
