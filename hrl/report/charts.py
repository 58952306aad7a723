"""The charts of a run: which there are, what each shows, and how Vega-Lite draws them.

The page and the picture of a run are drawn from the same specifications. A chart shows those of its metrics that the
run has; one without any is left out.
"""

from __future__ import annotations

import functools
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hrl.files import write_whole
from hrl.processes.child_environment import child_environment
from hrl.report.phases import phase_groups
from hrl.report.samples import readable

Records = Sequence[Mapping[str, Any]]
"""Of `metrics.jsonl`, one per step."""

TIMER = "timing_s/"
MAX_POINTS = 1000
"""Points of a line; of a longer run, each is the mean of several steps."""
MAX_LINES = 10
"""Lines of a chart, unless more runs than that are compared; what is left out is named below it."""
_DIGITS = 5
_SECONDS = "seconds of "
"""Prefix of the columns that `run_columns` adds: the seconds of a group of phases."""


# ---------------------------------------------------------------------------------------------- colours

COLOURS: Mapping[str, tuple[str, str]] = {
    "ink": ("#1f2a35", "#e2e7ec"),
    "faint": ("#5c6874", "#9aa6b2"),
    "line": ("#dfe4e9", "#333d47"),
    "paper": ("#ffffff", "#14191e"),
    "panel": ("#f5f7f9", "#1d242b"),
    "good": ("#19784a", "#56c98d"),
    "bad": ("#b3361e", "#f08a70"),
    "warn": ("#875a00", "#e0b050"),
    "c0": ("#2563b0", "#74aef0"),
    "c1": ("#c2410c", "#f29457"),
    "c2": ("#0f7b5f", "#4fc9a4"),
    "c3": ("#9d3c8a", "#e08fd0"),
    "c4": ("#8a6100", "#d9b64c"),
    "c5": ("#5b4bb3", "#a99cf5"),
    "c6": ("#b0244f", "#f487a5"),
    "c7": ("#4d6372", "#a9bccb"),
}
"""Name → colour on a light and on a dark page. In a page they are CSS variables, so that charts change with it."""

_NUM_COLOURS = sum(re.fullmatch(r"c\d", name) is not None for name in COLOURS)
_DASHES: tuple[list[int], ...] = ([], [6, 3], [2, 2], [8, 3, 2, 3], [1, 3])


def css_colours() -> str:
    """Return the colours as CSS declarations, each for a light and a dark page."""
    return " ".join(f"--{name}: light-dark({light}, {dark});" for name, (light, dark) in COLOURS.items())


# ---------------------------------------------------------------------------------------------- which charts


class Metrics(NamedTuple):
    r"""Metrics of a chart.

    Attributes:
        pattern: Regular expression for a whole name.
        label: Their label; `\1` stands for the first group of the pattern.
        has_prompts: Of a validation's metrics, whether the first group has to be a source, with `val/<source>/n`
            (True), or must not be one, as with a part of the reward (False); None for either.
    """

    pattern: str
    label: str
    has_prompts: bool | None = None


@dataclass(frozen=True)
class Chart:
    """A chart over the steps of a run.

    Attributes:
        name: Its name in the page, of letters and dashes.
        title: Headline.
        about: What it shows, and what is healthy.
        metrics: What it draws, in this order.
        form: Lines, or parts of a whole on top of each other.
        from_zero: Whether the axis begins at 0.
        number: Format of the axis, for d3-format; empty for one that follows from its numbers.
        alarms: The alarms that watch what it shows (names in `ALARMS`).
    """

    name: str
    title: str
    about: str
    metrics: tuple[Metrics, ...]
    form: Literal["lines", "stack"] = "lines"
    from_zero: bool = False
    number: str = ""
    alarms: tuple[str, ...] = ()


_MEAN = r"val/([^/]+(?:/[^/]+)*)/mean@\d+"
OVERVIEW = Chart(
    "reward",
    "Reward",
    "The mean score of each step's samples, what shaping made of it, and the validation score of each source.",
    (
        Metrics(r"reward/mean", "training"),
        Metrics(r"reward/shaped_mean", "training, shaped"),
        Metrics(_MEAN, r"validation: \1", has_prompts=True),
    ),
    alarms=("zero_reward", "reward_hacking"),
)
LOSS_OVERVIEW = Chart(
    "loss",
    "Loss",
    "The loss of each step, and that of each validation source. Validation that rises while training falls is "
    "overfitting.",
    (Metrics(r"train/loss", "training"), Metrics(r"val/(.+)/loss", r"validation: \1")),
    alarms=("overfitting",),
)
SECONDS = Chart(
    "seconds",
    "Seconds per step",
    "Where the time of a step goes; other is what no phase covers.",
    tuple(Metrics(re.escape(_SECONDS + group), group) for group in (*phase_groups(), "other")),
    form="stack",
    from_zero=True,
)
CHARTS = (
    OVERVIEW,
    LOSS_OVERVIEW,
    Chart(
        "reward-parts",
        "Parts of the reward",
        "The mean of each part of the reward, before its weight, in training and validation.",
        (Metrics(r"reward/(.+)/mean", r"\1"), Metrics(_MEAN, r"validation: \1", has_prompts=False)),
    ),
    Chart(
        "reward-spread",
        "Spread of the reward",
        "Standard deviation over a step's samples. Without spread there is nothing to learn from.",
        (Metrics(r"reward/std", "standard deviation"),),
        from_zero=True,
        alarms=("no_spread",),
    ),
    Chart(
        "validation-k",
        "Validation with several samples",
        "pass@k: one of k is right; maj@k: the majority is; best@k and worst@k: the best and the worst of k.",
        (Metrics(r"val/(.+/(?:pass|maj|best|worst)@\d+)", r"\1"),),
    ),
    Chart(
        "preferences",
        "Preferences",
        "How often the chosen answer is preferred over the rejected one; 0.5 is chance.",
        (Metrics(r"rewards/accuracies", "training"), Metrics(r"val/(.+)/rewards_accuracies", r"validation: \1")),
    ),
    Chart(
        "margins",
        "Rewards of chosen and rejected answers",
        "The margin is their difference and should grow. If both fall, the model moves away from the chosen ones too.",
        (
            Metrics(r"rewards/margins", "margin"),
            Metrics(r"rewards/(chosen|rejected)", r"\1"),
            Metrics(r"val/(.+)/rewards_margins", r"margin, validation: \1"),
        ),
    ),
    Chart(
        "perplexity",
        "Perplexity",
        "The exponential of the mean loss per token.",
        (Metrics(r"train/perplexity", "training"), Metrics(r"val/(.+)/perplexity", r"validation: \1")),
    ),
    Chart(
        "length",
        "Response length",
        "Tokens of a response. A length that grows while validation stands still pays for words.",
        tuple(Metrics(f"response_length/{name}", name) for name in ("mean", "max", "min")),
        from_zero=True,
        alarms=("length_drift",),
    ),
    Chart(
        "truncation",
        "Cut responses",
        "Share of responses that reached the length limit or were given up.",
        (Metrics(r"response_length/clip_ratio", "at the limit"), Metrics(r"response/aborted_ratio", "given up")),
        from_zero=True,
        alarms=("truncation",),
    ),
    Chart(
        "turns",
        "Turns",
        "Turns of the policy in an episode, and the tools that it called in them.",
        (
            Metrics(r"episode/turns/(mean|max)", r"turns, \1"),
            Metrics(r"episode/tool_calls/mean", "tool calls, mean"),
            Metrics(r"episode/tool_errors/mean", "tool calls that failed, mean"),
        ),
        from_zero=True,
        alarms=("tool_errors",),
    ),
    Chart(
        "episode-tokens",
        "Tokens of an episode",
        "What the policy samples and learns from, against what it is told.",
        (
            Metrics(r"episode/policy_tokens/mean", "policy"),
            Metrics(r"episode/environment_tokens/mean", "environment"),
        ),
        from_zero=True,
    ),
    Chart(
        "episode-ends",
        "How episodes end",
        "Shares of the episodes: done by their nature, by a limit of the environment or of the run, or failed.",
        (Metrics(r"episode/end/(.+)", r"\1"),),
        form="stack",
        from_zero=True,
        alarms=("episodes_failed", "episodes_cut"),
    ),
    Chart(
        "environment",
        "Numbers of the environment",
        "What the environment itself reports of an episode, mean over those that have it.",
        (Metrics(r"env/(.+)", r"\1"),),
    ),
    Chart(
        "entropy",
        "Entropy",
        "Of the policy per token. Near 0 it explores no more; a steady rise leads to noise.",
        (Metrics(r"actor/entropy", "policy"),),
        alarms=("entropy_low", "entropy_high"),
    ),
    Chart(
        "kl",
        "KL divergence",
        "How far the policy moved: in the update (ppo_kl), and from the reference (kl_loss, reward_kl_penalty).",
        (Metrics(r"actor/(ppo_kl|kl_loss|reward_kl_penalty)", r"\1"),),
        alarms=("kl", "update_kl"),
    ),
    Chart(
        "gradient",
        "Gradient norm",
        "Before clipping. Zero means that nothing is learnt; jumps come before a collapse.",
        (Metrics(r"(actor|critic|train)/grad_norm", r"\1"),),
        from_zero=True,
        alarms=("zero_gradient",),
    ),
    Chart(
        "clip",
        "Clip share",
        "Share of tokens whose ratio was clipped. Where it is large, so are the steps.",
        (
            Metrics(r"actor/pg_clipfrac", "policy"),
            Metrics(r"actor/pg_clipfrac_lower", "policy, lower bound"),
            Metrics(r"critic/vf_clipfrac", "critic"),
        ),
        from_zero=True,
        alarms=("clip_share",),
    ),
    Chart(
        "sampler",
        "Sampler against trainer",
        "Difference of their log-probs for the same tokens; near 0 if both compute alike.",
        (Metrics(r"rollout/logprob_diff_(mean|p99)", r"\1"),),
        from_zero=True,
        alarms=("sampler_gap",),
    ),
    Chart(
        "policy-loss",
        "Policy loss",
        "Not a measure of success: it is near 0 by construction.",
        (Metrics(r"actor/pg_loss", "policy"),),
    ),
    Chart(
        "value-loss",
        "Value loss",
        "Of the critic, with the share of the returns' variance that it explains.",
        (Metrics(r"critic/vf_loss", "loss"), Metrics(r"critic/vf_explained_var", "explained variance")),
    ),
    Chart(
        "no-spread",
        "Groups without spread",
        "Prompts whose samples all scored the same; they teach nothing.",
        (Metrics(r"rollout/zero_variance_groups", "groups"),),
        from_zero=True,
    ),
    Chart(
        "rate",
        "Learning rate",
        "Of each trained model.",
        (Metrics(r"(actor|critic|train)/lr", r"\1"),),
        from_zero=True,
    ),
    SECONDS,
    Chart(
        "throughput",
        "Throughput",
        "Tokens per second and device, prompts included, over the whole step.",
        (Metrics(r"perf/throughput", "tokens/s"),),
        from_zero=True,
        number="~s",
    ),
    Chart(
        "mfu",
        "Use of the device's arithmetic",
        "Share of the peak that the update reached.",
        (Metrics(r"perf/mfu/(.+)", r"\1"),),
        from_zero=True,
    ),
    Chart(
        "memory",
        "Memory",
        "The most that a process and its engine held, in GiB.",
        (Metrics(r"perf/max_memory_gib", "trainer"), Metrics(r"perf/max_child_memory_gib", "engine")),
        from_zero=True,
    ),
)
"""All charts, in the order of the page."""


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        run: Number of the run that it belongs to.
        metric: Its column.
        label: Its name in the legend.
        colour: Name in `COLOURS`.
        dash: Lengths of its dashes; none for a solid line.
    """

    run: int
    metric: str
    label: str
    colour: str
    dash: Sequence[int] = ()


@dataclass(frozen=True)
class Drawn:
    """A chart with the lines that some runs have for it, and the labels of the metrics that are left out."""

    chart: Chart
    lines: tuple[Line, ...]
    left_out: tuple[str, ...] = ()


def charts_of(runs: Sequence[Mapping[str, Any]], names: Sequence[str] = ("",)) -> list[Drawn]:
    """Return the charts for which there is anything to draw.

    A metric is drawn for all runs or for none. The first one is drawn however many runs there are.

    Args:
        runs: Columns of each run, see `run_columns`.
        names: A name for each run; they are shown where there are several.
    """
    drawn = []
    for chart in CHARTS:
        if chart.form == "stack" and len(runs) > 1:
            continue
        found = metrics_of(chart, runs)
        most = max(1, MAX_LINES // len(runs))
        shown = dict(list(found.items())[:most])
        if shown:
            drawn.append(Drawn(chart, tuple(_lines(shown, runs, names)), tuple(found.values())[most:]))
    return drawn


def _lines(shown: Mapping[str, str], runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[Line]:
    """Yield the lines of a chart: colours tell metrics apart in one run, and runs where there are several.

    Where colours run out they begin again with other dashes.
    """
    several = len(runs) > 1
    rounds = math.ceil((len(runs) if several else len(shown)) / _NUM_COLOURS)
    for place, (metric, label) in enumerate(shown.items()):
        for run, columns in enumerate(runs):
            if metric not in columns["values"]:
                continue
            round_, colour = divmod(run if several else place, _NUM_COLOURS)
            yield Line(
                run,
                metric,
                (f"{names[run]}: {label}" if len(shown) > 1 else names[run]) if several else label,
                f"c{colour}",
                _DASHES[((place * rounds if several else 0) + round_) % len(_DASHES)],
            )


def metrics_of(chart: Chart, runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the metrics that a chart shows of those that any of the runs has, with their labels."""
    names = sorted({metric for columns in runs for metric in columns["values"]})
    return {metric: readable(label) for metrics in chart.metrics for metric, label in _matching(metrics, names)}


def _matching(metrics: Metrics, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    sources = {name.removesuffix("/n") for name in names if name.startswith("val/") and name.endswith("/n")}
    for name in names:
        match = re.fullmatch(metrics.pattern, name)
        if match is None:
            continue
        if metrics.has_prompts is not None and metrics.has_prompts != (not sources or f"val/{match[1]}" in sources):
            continue
        yield name, match.expand(metrics.label)


# ---------------------------------------------------------------------------------------------- the numbers


def run_columns(records: Records) -> dict[str, Any]:
    """Return the metrics of a run as columns, with the seconds of each group of phases.

    Returns:
        `steps`; `every`, the number of steps that a point stands for; and `values`, from metric to numbers rounded to
        five digits, with None where a step has no such metric and "NaN" where it was not finite.
    """
    records = [
        {**record, **{_SECONDS + group: seconds for group, seconds in _seconds(record).items()}} for record in records
    ]
    names = sorted({name for record in records for name, value in record.items() if _is_number(value)} - {"step"})
    steps = [record["step"] for record in records]
    every = math.ceil(len(records) / MAX_POINTS) or 1
    starts = range(0, len(records), every)
    values = {name: [_mean([r[name] for r in records[s : s + every] if name in r]) for s in starts] for name in names}
    kept = {name: column for name, column in values.items() if not name.startswith(_SECONDS) or any(column)}
    return {"steps": [steps[min(s + every, len(steps)) - 1] for s in starts], "every": every, "values": kept}


def _seconds(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step by group of phases, and `other` for the time outside of all groups.

    Phases that ran at once share the time in which any of them ran in proportion to their own.
    """
    total = record.get(TIMER + "step")
    if total is None:
        return {}
    seconds = {group: sum(record.get(TIMER + name) or 0.0 for name in names) for group, names in phase_groups().items()}
    if (overlap := record.get("perf/overlap_s") or 0.0) > 0:
        share = 1 - overlap / max(sum(seconds.values()), overlap)
        seconds = {group: share * value for group, value in seconds.items()}
    return seconds | {"other": max(0.0, total - sum(seconds.values()))}


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _mean(values: Sequence[float | None]) -> float | str | None:
    """Return the mean of the finite ones, None without any value, "NaN" if none was finite."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return "NaN" if values else None
    return float(f"{sum(finite) / len(finite):.{_DIGITS}g}")


def ends_of(columns: Mapping[str, Any], metric: str) -> tuple[float, float] | None:
    """Return the first and the last finite value of a metric; None without any."""
    finite = [value for value in columns["values"].get(metric, ()) if isinstance(value, int | float)]
    return (finite[0], finite[-1]) if finite else None


# ---------------------------------------------------------------------------------------------- Vega-Lite

_WHOLE = "datum.value === round(datum.value) ? datum.label : ''"
_OF_A_POINT = "domain('y')[0] === domain('y')[1] ? format(datum.value, '.4~g') : datum.label"
"""Of a single value d3 knows no step, and would round it to a whole number."""
_IN_SIGHT = "first <= datum.step && datum.step <= last"
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


def specification(drawn: Drawn, *, height: int = 170) -> dict[str, Any]:
    """Return a chart for Vega-Lite, whose data (`points`) the page fills in.

    A row of the data is a step, with `s0`, `s1`, … for the lines, and `r0`, `r1`, … for the lines before smoothing.
    The page sets its parameters: `first` and `last` are the ends of the axis, `cursor` is the marked step, `dot0`,
    `dot1`, … are the sizes of a line's points.
    """
    layers = _stack(drawn) if drawn.chart.form == "stack" else _line_layers(drawn)
    cursor = {
        "transform": [{"filter": "datum.step === cursor"}],
        "mark": {"type": "rule", "color": _var("faint"), "strokeDash": [2, 2]},
        "encoding": {"x": _x()},
    }
    return {
        "$schema": _SCHEMA,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit", "contains": "padding", "resize": True},
        "background": None,
        "data": {"name": "points", "values": []},
        "layer": [*layers, cursor],
        "config": _config(),
    }


def _var(colour: str) -> str:
    return f"var(--{colour})"


def _x(**more: Any) -> dict[str, Any]:
    return {
        "field": "step",
        "type": "quantitative",
        "scale": {"domain": [{"expr": "first - 0.5"}, {"expr": "last + 0.5"}], "nice": False},
        "axis": {"title": None, "grid": False, "format": "~d", "labelOverlap": True, "labelExpr": _WHOLE},
        **more,
    }


def _y(chart: Chart, field: str) -> dict[str, Any]:
    axis = {"title": None, "tickCount": 4, "labelExpr": _OF_A_POINT}
    if chart.number:
        axis |= {"format": chart.number}
    return {"field": field, "type": "quantitative", "scale": {"zero": chart.from_zero, "nice": True}, "axis": axis}


def _colours(drawn: Drawn) -> dict[str, Any]:
    return {"domain": [line.label for line in drawn.lines], "range": [_var(line.colour) for line in drawn.lines]}


def _line_layers(drawn: Drawn) -> list[dict[str, Any]]:
    layers: list[dict[str, Any]] = []
    for place, line in enumerate(drawn.lines):
        drawn_as: dict[str, Any] = {"type": "line", "strokeDash": list(line.dash), "strokeJoin": "round"}
        colour = {"datum": line.label, "type": "nominal", "scale": _colours(drawn), "legend": None}
        marks: tuple[tuple[str, dict[str, Any]], ...] = (
            (f"r{place}", {"strokeWidth": 1, "opacity": 0.3}),
            (f"s{place}", {"strokeWidth": 1.75, "point": {"size": {"expr": f"dot{place}"}}}),
        )
        for field, mark in marks:
            layers.append(
                {
                    # A step without the metric leaves no gap; one where it was not finite does.
                    "transform": [{"filter": f"datum.{field} !== null"}, {"filter": _IN_SIGHT}],
                    "mark": drawn_as | mark | {"invalid": "break-paths-show-domains"},
                    "encoding": {"x": _x(), "y": _y(drawn.chart, field), "color": colour},
                }
            )
    return layers


def _stack(drawn: Drawn) -> list[dict[str, Any]]:
    names = {f"s{place}": line.label for place, line in enumerate(drawn.lines)}
    layer = {
        "transform": [
            {"filter": _IN_SIGHT},
            {"fold": list(names), "as": ["field", "value"]},
            {"calculate": f"({json.dumps(names)})[datum.field]", "as": "line"},
            {"calculate": f"indexof({json.dumps(list(names))}, datum.field)", "as": "place"},
            {"calculate": "datum.step - datum.every / 2", "as": "begin"},
            {"calculate": "datum.step + datum.every / 2", "as": "end"},
        ],
        "mark": {"type": "bar", "binSpacing": 0},
        "encoding": {
            "x": _x(field="begin", bin="binned"),
            "x2": {"field": "end"},
            "y": {**_y(drawn.chart, "value"), "stack": "zero"},
            "color": {"field": "line", "type": "nominal", "scale": _colours(drawn), "legend": None},
            "order": {"field": "place"},
        },
    }
    return [layer]


def _config() -> dict[str, Any]:
    axis = {
        "labelColor": _var("faint"),
        "titleColor": _var("faint"),
        "gridColor": _var("line"),
        "domainColor": _var("line"),
        "tickColor": _var("line"),
        "labelFontSize": 11,
    }
    legend = {"labelColor": _var("ink"), "labelFontSize": 12, "symbolOpacity": 1, "orient": "top", "title": None}
    title = {"color": _var("ink"), "anchor": "start", "fontSize": 14, "subtitleColor": _var("faint")}
    return {"axis": axis, "legend": legend, "title": title, "view": {"stroke": None}, "font": "sans-serif"}


def any_metric(num_runs: int, names: Sequence[str]) -> Drawn:
    """Return the chart whose metric the reader of the page chooses, a line for each run."""
    runs = [{"values": {"": ()}}] * num_runs
    return Drawn(Chart("any", "", "", ()), tuple(_lines({"": "value"}, runs, names)))


_BUNDLE = "import sys, vl_convert; sys.stdout.buffer.write(vl_convert.javascript_bundle().encode())"
_BUNDLE_S = 120.0


@functools.cache
def vega() -> str:
    """Return the JavaScript of Vega, Vega-Lite and vega-embed: 0.9 MB, which needs no network.

    It is put together in a process of its own. That takes seconds in which no other thread would run here, so that
    the clock on the screen would stand still.

    Raises:
        OSError: It could not be put together.
    """
    try:
        made = subprocess.run(
            [sys.executable, "-c", _BUNDLE],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_BUNDLE_S,
            start_new_session=True,  # Ctrl-C ends a run, which then writes its report
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"the drawing library was not there after {_BUNDLE_S:.0f} s") from error
    if made.returncode != 0:
        raise OSError(f"the drawing library can't be read: {made.stderr.decode(errors='replace').strip()[-500:]}")
    return f"(() => {{{made.stdout.decode()}}})();"  # else its names would be the page's


# ---------------------------------------------------------------------------------------------- the picture


@dataclass(frozen=True)
class Picture:
    """A picture of a run's curve: a PNG or SVG file of this name, with these charts from top to bottom."""

    file_name: str
    charts: tuple[Chart, ...]


REWARD = Picture("reward_curve.png", (OVERVIEW, SECONDS))
LOSS = Picture("loss_curve.png", (LOSS_OVERVIEW, SECONDS))


def write_picture(records: Records, folder: Path, picture: Picture, title: str = "") -> Path | None:
    """Draw the curve of a run.

    Args:
        records: The run's metrics.
        folder: Where to write the picture.
        picture: Which charts it has.
        title: Headline.

    Returns:
        The file; None if there is nothing to draw.
    """
    import vl_convert

    columns = run_columns(records)
    drawn = [each for each in charts_of([columns]) if each.chart in picture.charts]
    if not drawn:
        return None
    whole = {
        "$schema": _SCHEMA,
        "title": title,
        "background": "white",
        "padding": 16,
        "config": _config(),
        "resolve": {"scale": {"color": "independent"}},
        "vconcat": [_picture_part(each, columns, place) for place, each in enumerate(drawn)],
    }
    text = json.dumps(whole)
    for name, (light, _) in COLOURS.items():
        text = text.replace(_var(name), light)
    path = folder / picture.file_name
    if path.suffix == ".svg":
        return write_whole(path, vl_convert.vegalite_to_svg(text))
    return write_whole(path, vl_convert.vegalite_to_png(text, scale=1.5))


def _picture_part(drawn: Drawn, columns: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return a chart with its data and its legend, for a picture that nobody asks anything."""
    drawn = replace(drawn, lines=tuple(replace(line, label=_with_end(line, columns)) for line in drawn.lines))
    *layers, _ = specification(drawn)["layer"]
    for layer in layers:
        layer["encoding"]["color"]["legend"] = {
            "labelLimit": 0,
            "symbolType": "square" if drawn.chart.form == "stack" else "stroke",
        }
    steps = columns["steps"]
    rows = [
        {"step": step, "every": columns["every"]}
        | {f"{kind}{n}": columns["values"][line.metric][at] for n, line in enumerate(drawn.lines) for kind in "rs"}
        for at, step in enumerate(steps)
    ]
    part = {
        "title": drawn.chart.title,
        "width": 780,
        "height": 300 if place == 0 else 120,
        "data": {"values": rows},
        "layer": layers,
    }
    text = json.dumps(part).replace(_IN_SIGHT, "true").replace("domain('y')", f"domain('concat_{place}_y')")
    values = {"first - 0.5": steps[0] - 0.5, "last + 0.5": steps[-1] + 0.5}
    values |= {f"dot{n}": 25 if len(steps) <= 60 else 0 for n in range(len(drawn.lines))}
    for expression, value in values.items():
        text = text.replace(json.dumps({"expr": expression}), json.dumps(value))
    return dict(json.loads(text))


def _with_end(line: Line, columns: Mapping[str, Any]) -> str:
    ends = ends_of(columns, line.metric)
    return line.label if ends is None or line.metric.startswith(_SECONDS) else f"{line.label} ({ends[1]:.3g})"
