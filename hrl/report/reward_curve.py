"""The picture a run leaves: did the reward rise (or the loss fall), and where did the time go."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrl.report.phases import phase_groups
from hrl.report.run_folder import read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _FAINT, _GRID = "#22303c", "#7b8794", "#e3e7eb"
_REWARD, _VALIDATION = "#2f6db5", "#d1581d"
# Groups of phases bottom to top, as a step runs them; what no group covers is "other".
_GROUPS = phase_groups()
_GROUP_COLOURS = ("#2f6db5", "#8fb8de", "#c9b458", "#d1581d", "#6d4c91", "#c5ccd3")


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


def series(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of one metric, where a step has it as a number."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def phase_seconds(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
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


def _draw_curve(axes: Axes, records: Sequence[Mapping[str, Any]], curve: Curve) -> None:
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


def _draw_seconds(axes: Axes, records: Sequence[Mapping[str, Any]]) -> None:
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
