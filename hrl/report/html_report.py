"""What a run leaves for people: a picture of its curve, and `report.html`, one file that needs nothing else.

Both are made from what lies in the run folder, not from the run's memory. So a resumed run reports from its very first
validation, and a run that failed as far as it came.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, Self

import yaml

from hrl.report.phases import TITLES, phase_groups
from hrl.report.run_folder import read_jsonl, rollouts_steps, write_text
from hrl.report.samples import (
    Sample,
    best_median_worst,
    change_of_score,
    compare_validations,
    describe_changes,
    question,
    read_samples,
    readable,
    sample_facts,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PAIRS_SHOWN = 10
_TIMER = "timing_s/"

_INK, _FAINT, _GRID = "#22303c", "#7b8794", "#e3e7eb"
_REWARD, _VALIDATION = "#2f6db5", "#d1581d"
# Groups of phases bottom to top, as a step runs them; what no group covers is "other".
_GROUPS = phase_groups()
_GROUP_COLOURS = ("#2f6db5", "#8fb8de", "#c9b458", "#d1581d", "#6d4c91", "#c5ccd3")

Records = Sequence[Mapping[str, Any]]
"""Of `metrics.jsonl`, one per step."""


@dataclass(frozen=True)
class Curve:
    """What is drawn over the steps.

    Attributes:
        file_name: Of the picture.
        metric: Of training.
        label: Its name in the legend.
        validation: Pattern of the validation metrics that belong to it, with the source as its group.
        axis: Name of the axis.
    """

    file_name: str
    metric: str
    label: str
    validation: str
    axis: str


REWARD = Curve("reward_curve.png", "reward/mean", "training reward (mean)", r"val/(.+)/mean@\d+", "score")
LOSS = Curve("loss_curve.png", "train/loss", "training loss", r"val/(.+)/loss", "loss")
CURVES = (REWARD, LOSS)


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
    comparison = compare_validations(rollouts)
    if comparison is None:
        return None
    shown = comparison.pairs[:_PAIRS_SHOWN]
    return {
        "first_step": comparison.first_step,
        "last_step": comparison.last_step,
        "description": describe_changes(comparison.pairs, len(shown)),
        "pairs": [(_shown(before), _shown(after), change_of_score((before, after))) for before, after in shown],
    }


def _last_samples(rollouts: Path) -> dict[str, Any] | None:
    """Best, median and worst sample of the last step."""
    steps = rollouts_steps(rollouts)
    if not steps:
        return None
    records = read_samples(rollouts, steps[-1])
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


# ---------------------------------------------------------------------------------------------- the picture


def series(records: Records, name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of one metric, where a step has it as a number."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def phase_seconds(records: Records) -> dict[str, list[float]]:
    """Seconds per step and kind of phase, `other` being what no timer covers; kinds that never ran are left out."""
    seconds = {
        kind: [sum(record.get(f"timing_s/{name}") or 0.0 for name in names) for record in records]
        for kind, names in _GROUPS.items()
    }
    totals = [record.get("timing_s/step") or 0.0 for record in records]
    seconds["other"] = [max(0.0, total - sum(parts)) for total, *parts in zip(totals, *seconds.values(), strict=True)]
    return {kind: values for kind, values in seconds.items() if any(values)}


def write_reward_curve(metrics_file: str | Path, picture: str | Path, title: str = "", curve: Curve = REWARD) -> Path:
    """Draws what `metrics.jsonl` of a run tells.

    Above: mean training reward of every step and the validation score of each data source, or another curve. Below:
    the seconds of every step by phase.

    Args:
        metrics_file: `metrics.jsonl` of the run.
        picture: The PNG file to write.
        title: Headline, for example model and algorithm.
        curve: What is drawn above.

    Returns:
        The picture's path.

    Raises:
        FileNotFoundError: There is no such metrics file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_jsonl(Path(metrics_file))
    figure = Figure(figsize=(9, 6.2), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)  # an own canvas: no display, and pyplot's global state stays untouched
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    _draw_curve(upper, records, curve)
    _draw_seconds(lower, [record for record in records if record.get("timing_s/step") is not None])
    if title:
        upper.set_title(title, loc="left", color=_INK, fontsize=12, fontweight="bold")
    canvas.print_png(picture)
    return Path(picture)


def _draw_curve(axes: Axes, records: Records, curve: Curve) -> None:
    steps, values = series(records, curve.metric)
    if steps:
        axes.plot(steps, values, color=_REWARD, linewidth=1.8, label=curve.label)
    pattern = re.compile(curve.validation)
    sources = {name: found[1] for record in records for name in record if (found := pattern.fullmatch(name))}
    for number, (name, source) in enumerate(sorted(sources.items())):
        steps, scores = series(records, name)
        style = ("-", "--", ":", "-.")[number % 4]
        axes.plot(steps, scores, style, color=_VALIDATION, marker="o", markersize=5, label=f"validation: {source}")
        axes.annotate(
            f"{scores[-1]:.2f}", (steps[-1], scores[-1]), textcoords="offset points", xytext=(7, -3), color=_VALIDATION
        )
    axes.set_ylabel(curve.axis, color=_INK)
    _style(axes)


def _draw_seconds(axes: Axes, records: Records) -> None:
    steps = [record["step"] for record in records]
    bottom = [0.0] * len(steps)
    kinds = [*_GROUPS, "other"]
    for kind, values in phase_seconds(records).items():
        colour = _GROUP_COLOURS[kinds.index(kind)]
        axes.bar(steps, values, bottom=bottom, width=0.85, color=colour, label=kind)
        bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    axes.set_ylabel("seconds per step", color=_INK)
    axes.set_xlabel("step", color=_INK)
    axes.xaxis.get_major_locator().set_params(integer=True)
    _style(axes)


def _style(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_FAINT, labelcolor=_INK)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5), labelcolor=_INK)
