"""Write a picture of the run's curve and `report.html`, a single self-contained file.

Both are made from the files in the run folder, not from memory. So the report of a resumed run begins with its very
first validation, and a failed run is reported as far as it got.
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

from hrl.config.sources import source_title
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
# Groups of phases from bottom to top, in the order of a step; "other" is the time outside of all groups.
_GROUPS = phase_groups()
_GROUP_COLOURS = ("#2f6db5", "#8fb8de", "#c9b458", "#d1581d", "#6d4c91", "#c5ccd3")

Records = Sequence[Mapping[str, Any]]
"""Of `metrics.jsonl`, one per step."""


@dataclass(frozen=True)
class Curve:
    """The curve that is drawn over the steps.

    Attributes:
        file_name: Name of the picture.
        metric: Name of the training metric.
        label: Name of the metric in the legend.
        validation: Pattern of the corresponding validation metrics; its group is their source.
        axis: Label of the axis.
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
        """Return the outcome of a run that ended with this error, or None for a run without an error."""
        if error is None:
            return cls("finished")
        if isinstance(error, KeyboardInterrupt):
            return cls("interrupted")
        return cls("failed", f"{type(error).__name__}: {error}")


def write_html_report(folder: Path, outcome: Outcome, total_steps: int) -> Path:
    """Write `report.html` into a run folder; parts that the run has no data for are left out.

    Args:
        folder: The run folder, with at least `config.yaml` and `environment.json`.
        outcome: How the run ended.
        total_steps: Number of planned steps.

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
        title=dict(_flat(config)).get("trainer.experiment_name") or folder.name,
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


def run_summary(config: Mapping[str, Any], records: Records, total_steps: int) -> list[tuple[str, str]]:
    """Summarise a run in a few lines: model, data, algorithm, batch, engine, steps, time."""
    get = dict(_flat(config)).get
    prompts, samples = get("data.train_batch_size"), get("actor_rollout_ref.rollout.n")
    engine, rate = get("actor_rollout_ref.rollout.name"), get("actor_rollout_ref.actor.optim.lr", get("optim.lr"))
    done = max((record["step"] for record in records), default=0)
    seconds = sum(record.get("timing_s/step") or 0.0 for record in records)
    sampled = samples and prompts and f"{prompts} prompts × {samples} samples = {prompts * samples} sequences"
    facts = {
        "model": get("actor_rollout_ref.model.path", get("model.path")),
        "data": _listed(get("data.train_files")),
        "validation": _listed(get("data.val_files")),
        "algorithm": get("algorithm.adv_estimator", get("algorithm.loss_type")),
        "learning rate": None if rate is None else f"{rate:g}",
        "batch": sampled or (prompts and f"{prompts} rows"),
        "engine": engine and f"{engine}, temperature {get('actor_rollout_ref.rollout.temperature')}",
        "steps": f"{done} of {total_steps}",
        "time in steps": f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min",
    }
    return [(name, str(fact)) for name, fact in facts.items() if fact]


def validation_summary(records: Records) -> dict[str, Any] | None:
    """Return the first and the last validation of a run, a row per source and metric; None without a validation."""
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
    """Return for every phase its median seconds, how often it ran, and its share of the measured time."""
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
    """Return the answers of the first and the last validation to the same prompts."""
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
    """Return the best, the median and the worst sample of the last step."""
    steps = rollouts_steps(rollouts)
    if not steps:
        return None
    records = read_samples(rollouts, steps[-1])
    picked = [(label, _shown(record)) for label, record in best_median_worst(records)]
    return {"step": steps[-1], "total": len(records), "picked": picked} if picked else None


def _shown(record: Sample) -> dict[str, Any]:
    """Format a sample for the template, with control characters spelled out."""
    return {
        "question": readable(question(record)),
        "prompt": readable(record["prompt"]),
        "response": readable(record["response"]),
        "score": record.get("score"),
        "facts": [(readable(name), readable(fact)) for name, fact in sample_facts(record)],
    }


# ---------------------------------------------------------------------------------------------- small helpers


def _listed(files: Any) -> str:
    """Join the names of sources with commas."""
    return ", ".join(map(source_title, files)) if isinstance(files, list) else str(files or "")


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of a nested mapping."""
    for name, fact in facts.items():
        if isinstance(fact, Mapping):
            yield from _flat(fact, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", fact


# ---------------------------------------------------------------------------------------------- the picture


def series(records: Records, name: str) -> tuple[list[int], list[float]]:
    """Return the steps that have a value of a metric, and the values."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def phase_seconds(records: Records) -> dict[str, list[float]]:
    """Return seconds per step by group of phases that ever ran, with `other` for the time outside of all timers."""
    seconds = {
        kind: [sum(record.get(_TIMER + name) or 0.0 for name in names) for record in records]
        for kind, names in _GROUPS.items()
    }
    totals = [record.get("timing_s/step") or 0.0 for record in records]
    seconds["other"] = [max(0.0, total - sum(parts)) for total, *parts in zip(totals, *seconds.values(), strict=True)]
    return {kind: values for kind, values in seconds.items() if any(values)}


def write_reward_curve(metrics_file: str | Path, picture: str | Path, title: str = "", curve: Curve = REWARD) -> Path:
    """Draw the curve of a run from its `metrics.jsonl`.

    The upper part is the curve, by default the mean training reward of every step and the validation score of each
    data source; the lower part shows the seconds of every step by phase.

    Args:
        metrics_file: `metrics.jsonl` of the run.
        picture: The PNG file to write.
        title: Headline, for example model and algorithm.
        curve: The curve of the upper part.

    Returns:
        The picture's path.

    Raises:
        FileNotFoundError: There is no such metrics file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_jsonl(Path(metrics_file))
    figure = Figure(figsize=(9, 6.2), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)  # a canvas of its own needs no display and leaves pyplot's global state alone
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
