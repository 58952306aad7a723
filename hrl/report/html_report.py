"""The page a run leaves: `report.html`, one file that needs nothing else, made from what lies in the run folder.

Reading the folder and not the run's memory means that a resumed run reports from its very first validation, and a run
that failed reports as far as it came.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, Self

import yaml

from hrl.report.phases import TITLES
from hrl.report.reward_curve import CURVES
from hrl.report.rollout_log import (
    Sample,
    before_and_after,
    best_median_worst,
    change_of_score,
    describe_changes,
    question,
    readable,
    sample_facts,
)
from hrl.report.run_folder import RolloutKind, read_jsonl, rollouts_file, rollouts_steps, write_text

_PAIRS_SHOWN = 10
_TIMER = "timing_s/"

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: Literal["finished", "interrupted", "failed"]
    reason: str = ""

    @classmethod
    def of(cls, error: BaseException | None) -> Self:
        """Return the outcome of a run that ended with this error, or without one."""
        if error is None:
            return cls("finished")
        if isinstance(error, KeyboardInterrupt):
            return cls("interrupted")
        return cls("failed", f"{type(error).__name__}: {error}")


def write_html_report(folder: Path, outcome: Outcome, *, total_steps: int | None = None) -> Path:
    """Write `report.html` of a run folder; parts the run has no data for are left out.

    Args:
        folder: The run folder, with at least `config.yaml` and `environment.json`.
        outcome: How the run ended.
        total_steps: Steps the run was to have; by default what its configuration says.

    Returns:
        The path of the report.

    Raises:
        OSError: A file can't be read or written.
        ValueError: A file of the run is damaged; names file and line.
    """
    rollouts = folder / "rollouts"
    metrics_file = folder / "metrics.jsonl"
    drawn = [(curve, folder / curve.file_name) for curve in CURVES if (folder / curve.file_name).exists()]
    records = read_jsonl(metrics_file) if metrics_file.exists() else []
    config_text = (folder / "config.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(config_text)
    page = _template().render(
        title=_pick(config, "trainer.experiment_name") or folder.name,
        outcome=Outcome(outcome.status, readable(outcome.reason)),
        summary=run_summary(config, records, total_steps),
        pictures=[(curve.axis, base64.b64encode(file.read_bytes()).decode("ascii")) for curve, file in drawn],
        validation=validation_summary(records),
        changes=_changes(rollouts),
        samples=_last_samples(rollouts),
        timing=timing_summary(records),
        config=config_text,
        environment=list(_flat(json.loads((folder / "environment.json").read_text(encoding="utf-8")))),
    )
    return write_text(folder / "report.html", page)


def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hrl.report"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("report.html.jinja")


# ---------------------------------------------------------------------------------------------- from the metrics


def run_summary(config: Mapping[str, Any], records: Records, total_steps: int | None = None) -> list[tuple[str, str]]:
    """Return what ran, in a few lines: model, data, algorithm, batch, engine, steps, time."""
    rollout = _pick(config, "actor_rollout_ref.rollout") or {}
    prompts, samples = _pick(config, "data.train_batch_size"), rollout.get("n")
    engine, temperature = rollout.get("name"), rollout.get("temperature")
    rate = _pick(config, "actor_rollout_ref.actor.optim.lr") or _pick(config, "optim.lr")
    done = max((record["step"] for record in records), default=0)
    planned = total_steps or _pick(config, "trainer.total_training_steps")
    seconds = sum(record.get("timing_s/step") or 0.0 for record in records)
    facts = {
        "model": _pick(config, "actor_rollout_ref.model.path") or _pick(config, "model.path"),
        "data": _listed(_pick(config, "data.train_files")),
        "validation": _listed(_pick(config, "data.val_files")),
        "algorithm": _pick(config, "algorithm.adv_estimator") or _pick(config, "algorithm.loss_type"),
        "learning rate": None if rate is None else f"{rate:g}",
        "batch": prompts and (_sampled(prompts, samples) if samples else f"{prompts} rows"),
        "engine": engine and f"{engine}, temperature {temperature}",
        "steps": f"{done} of {planned}" if planned else str(done),
        "time in steps": f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min",
    }
    return [(name, str(fact)) for name, fact in facts.items() if fact]


def _sampled(prompts: int, samples: int) -> str:
    return f"{prompts} prompts × {samples} samples = {prompts * samples} sequences"


def validation_summary(records: Records) -> dict[str, Any] | None:
    """First and last validation of a run, a row per source and metric; None where it never validated."""
    validations = [record for record in records if any(name.startswith("val/") for name in record)]
    if not validations:
        return None
    first, last = validations[0], validations[-1]
    rows = []
    for name in sorted({*first, *last}):
        if not name.startswith("val/") or name.endswith("/n"):
            continue
        source, metric = name.removeprefix("val/").rsplit("/", 1)
        before, after = first.get(name), last.get(name)
        change = None if before is None or after is None else after - before
        n = last.get(f"val/{source}/n", first.get(f"val/{source}/n"))
        rows.append({"source": source, "metric": metric, "n": n, "first": before, "last": after, "change": change})
    return {
        "rows": rows,
        "first_step": first["step"],
        "last_step": last["step"],
        "several": len(validations) > 1,
    }


def timing_summary(records: Records) -> list[dict[str, Any]]:
    """Median seconds of every phase over the steps that had it, how often it ran, its share of the time measured."""
    timers = {name.removeprefix(_TIMER) for record in records for name in record if name.startswith(_TIMER)}
    order = [name for name in TITLES if name in timers] + sorted(timers - set(TITLES) - {"step"})
    seconds = {name: [s for r in records if (s := r.get(_TIMER + name)) is not None] for name in order}
    total = sum(map(sum, seconds.values()))
    return [
        {
            "phase": TITLES.get(name, name),
            "median_s": median(values),
            "times": len(values),
            "share": sum(values) / total if total else 0.0,
        }
        for name, values in seconds.items()
        if values
    ]


# ---------------------------------------------------------------------------------------------- from the samples


def _changes(rollouts: Path) -> dict[str, Any] | None:
    """Answers of the first and the last validation to the same prompts."""
    kind: RolloutKind = "val"
    steps = rollouts_steps(rollouts, kind)
    if len(steps) < 2:
        return None
    first, last = (read_jsonl(rollouts_file(rollouts, step, kind)) for step in (steps[0], steps[-1]))
    pairs = before_and_after(first, last)
    if not pairs:
        return None
    shown = pairs[:_PAIRS_SHOWN]
    return {
        "first_step": steps[0],
        "last_step": steps[-1],
        "description": describe_changes(pairs, len(shown)),
        "pairs": [(_shown(before), _shown(after), change_of_score((before, after))) for before, after in shown],
    }


def _last_samples(rollouts: Path) -> dict[str, Any] | None:
    """Best, median and worst sample of the last step."""
    steps = rollouts_steps(rollouts)
    if not steps:
        return None
    records = read_jsonl(rollouts_file(rollouts, steps[-1]))
    picked = [(label, _shown(record)) for label, record in best_median_worst(records)]
    return {"step": steps[-1], "total": len(records), "picked": picked} if picked else None


def _shown(record: Sample) -> dict[str, Any]:
    """Return a sample as the template shows it: control characters are spelled out, numbers formatted."""
    return {
        "question": readable(question(record)),
        "prompt": readable(record["prompt"]),
        "response": readable(record["response"]),
        "score": record.get("score"),
        "facts": [(readable(name), readable(fact)) for name, fact in sample_facts(record)],
    }


# ---------------------------------------------------------------------------------------------- small helpers


def _pick(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, None where the configuration has no such key."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _listed(files: Any) -> str:
    """File names with commas between them."""
    return ", ".join(map(str, files)) if isinstance(files, list) else str(files or "")


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield a nested mapping as dotted names and texts."""
    for name, fact in facts.items():
        if isinstance(fact, Mapping):
            yield from _flat(fact, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(fact)
