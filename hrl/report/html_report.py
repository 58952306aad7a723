"""`report.html`: a run as one page that needs nothing but itself.

It is made from the files in the run folder, not from memory. So the report of a resumed run begins with its very first
validation, and a failed run is reported as far as it got. The live view shows the same page.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from hrl.config.alarms import ALARMS
from hrl.config.arithmetic import count
from hrl.config.sources import source_title
from hrl.files import write_whole
from hrl.metrics import source_and_metric
from hrl.report.answers import Series, describe, that_differ, training_series, validation_series
from hrl.report.charts import (
    TIMER,
    Drawn,
    Records,
    any_metric,
    charts_of,
    css_colours,
    ends_of,
    run_columns,
    specification,
    vega,
)
from hrl.report.conversation import Line, conversation, is_episode, runs_of
from hrl.report.outcome import Outcome, read_outcome
from hrl.report.phases import TITLES
from hrl.report.profile import read_profiles
from hrl.report.run_folder import (
    CONFIG,
    OBJECT,
    TEXT,
    TEXTS,
    WHOLE,
    read_config,
    read_jsonl,
    read_metrics,
    read_object,
    require_kinds,
    rollouts_steps,
)
from hrl.report.samples import (
    ALL_SOURCES,
    Sample,
    answer_text,
    best_median_worst,
    expected,
    question,
    read_samples,
    readable,
    require_sample,
    sample_facts,
)
from hrl.report.thumbnails import data_uris

_PROMPTS_SHOWN = 8
_LONGEST_TEXT = 6000
_SAID_ABOVE = ("truth", "score", "advantage")
_TRAINED = {True: "trained on", False: "not trained on"}


@dataclass(frozen=True)
class Page:
    """What a page shows.

    Attributes:
        title: Of the window.
        sections: Name → HTML, in order.
        charts: The curves, as `specification` and lines.
        runs: The numbers that they are drawn from, a value of `run_columns` for each run.
        any: The chart of any metric.
        running: Whether the run goes on.
    """

    title: str
    sections: Mapping[str, str]
    charts: Sequence[Mapping[str, Any]]
    runs: Sequence[Mapping[str, Any]]
    any: Mapping[str, Any] = field(default_factory=dict)
    running: bool = False

    def numbers(self) -> dict[str, Any]:
        """Return what the page's script draws."""
        return {"charts": self.charts, "runs": self.runs, "any": self.any}


def write_html_report(folder: Path) -> Path:
    """Write `report.html` into a run folder; parts that the run has no data for are left out.

    Args:
        folder: The run folder, with at least `config.yaml`.

    Returns:
        The path of the report.

    Raises:
        OSError: A file can't be read or written.
        ValueError: A file of the run is damaged; names file and line.
    """
    return write_whole(folder / "report.html", render(run_page(folder)))


def run_page(folder: Path) -> Page:
    """Return the page of a run, from its folder; errors are those of `write_html_report`."""
    rollouts = folder / "rollouts"
    records = read_metrics(folder)
    config = read_config(folder)
    config_text = (folder / CONFIG).read_text(encoding="utf-8")
    outcome = read_outcome(folder)
    columns = run_columns(records)
    drawn = charts_of([columns])
    title = dict(flat(config)).get("trainer.experiment_name") or folder.name
    shown = Outcome(outcome.status, readable(outcome.reason))
    sections = {
        "header": section("header", title, shown),
        "summary": section("summary", run_summary(config, records, outcome.total_steps)),
        "alarms": _alarms(folder / "alarms.jsonl", records),
        "first-look": _first_look(folder / "first_look.json"),
        "curves": curves(drawn, [columns], thresholds_of(config)),
        "validation": section("validation", validation_summary(records)),
        "answers": _answers("The same validation prompts over time", "step", validation_series(rollouts), "validation"),
        "training": _answers(
            "Training prompts that came again", "training step", training_series(rollouts), "training"
        ),
        "samples": _last_samples(rollouts),
        "timing": section("timing", rows) if (rows := timing_summary(records)) else "",
        "profile": section("profile", profiles) if (profiles := read_profiles(folder)) else "",
        "again": section(
            "again",
            config_text,
            list(flat(read_object(folder / "environment.json"))),
        ),
    }
    return page_of(title, sections, drawn, [columns], running=outcome.status == "running")


# ---------------------------------------------------------------------------------------------- any page


def page_of(
    title: str,
    sections: Mapping[str, str],
    drawn: Sequence[Drawn],
    runs: Sequence[Mapping[str, Any]],
    names: Sequence[str] = ("",),
    *,
    running: bool = False,
) -> Page:
    """Return a page with these sections and curves."""
    charts = [_for_script(each) for each in drawn]
    return Page(title, sections, charts, runs, _for_script(any_metric(len(runs), names)), running)


def curves(drawn: Sequence[Drawn], runs: Sequence[Mapping[str, Any]], thresholds: Mapping[str, float | None]) -> str:
    """Return the section of the curves, in which the script draws.

    Args:
        drawn: The charts.
        runs: Their numbers, see `run_columns`.
        thresholds: Those of the alarms that are on (`trainer.alarms`); of these, the ones that any run could be judged
            by are named with the charts.
    """
    charts = [
        {
            "chart": each.chart,
            "alarms": [
                ALARMS[name].when(threshold)
                for name in each.chart.alarms
                if (threshold := thresholds.get(name)) is not None
                and any(f"health/{name}" in columns["values"] for columns in runs)
            ],
            "left_out": each.left_out,
            "entries": [(line, _ends(runs[line.run], line.metric)) for line in each.lines],
        }
        for each in drawn
    ]
    return section("curves", charts, max(columns["every"] for columns in runs))


def _ends(columns: Mapping[str, Any], metric: str) -> list[str]:
    """Return the first and the last value of a metric, or the only one, or none."""
    ends = ends_of(columns, metric)
    points = sum(value is not None for value in columns["values"].get(metric, ()))
    return [] if ends is None else [f"{value:.4g}" for value in ends[-min(points, 2) :]]


def thresholds_of(config: Mapping[str, Any]) -> Mapping[str, float | None]:
    """Return the thresholds of a run's alarms; those of a run of before there were any are off."""
    return (config.get("trainer") or {}).get("alarms") or {}


def render(page: Page, *, live: bool = False) -> str:
    """Return a page as HTML.

    Args:
        page: What it shows.
        live: Whether it asks its server for news.
    """
    numbers = json.dumps({**page.numbers(), "live": live}, separators=(",", ":")).replace("<", "\\u003c")
    return str(
        _environment()
        .get_template("page.html.jinja")
        .render(
            title=page.title,
            sections={name: html for name, html in page.sections.items() if html or live},
            policy=policy(live=live),
            colours=css_colours(),
            css=_file("page.css"),
            script=_file("page.js"),
            vega=vega(),
            payload=numbers,
            live=live,
        )
    )


def policy(*, live: bool) -> str:
    """Return the content security policy of a page: its own scripts run, nothing is loaded, no text is evaluated.

    Args:
        live: Whether it may ask its server for news.
    """
    hashes = (hashlib.sha256(script.encode()).digest() for script in (vega(), _file("page.js")))
    allowed = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in hashes)
    connect = "; connect-src 'self'" if live else ""
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}{connect}"


def _for_script(drawn: Drawn) -> dict[str, Any]:
    lines = [asdict(line) for line in drawn.lines]
    stack = drawn.chart.form == "stack"
    return {"name": drawn.chart.name, "stack": stack, "lines": lines, "spec": specification(drawn)}


@functools.cache
def _environment() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("hrl.report"), autoescape=True, undefined=jinja2.StrictUndefined
    )


def section(name: str, *arguments: Any) -> str:
    """Render a macro of `sections.html.jinja`; the result is marked as safe to put into a page."""
    return getattr(_environment().get_template("sections.html.jinja").module, name)(*arguments)  # type: ignore[no-any-return]


@functools.cache
def _file(name: str) -> str:
    return resources.files("hrl.report").joinpath("templates", name).read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------- from the metrics


def run_summary(config: Mapping[str, Any], records: Records, total_steps: int | None) -> list[tuple[str, str]]:
    """Summarise a run in a few lines: model, data, algorithm, batch, engine, steps, time."""
    get = dict(flat(config)).get
    prompts, samples = get("data.train_batch_size"), get("actor_rollout_ref.rollout.n")
    engine, rate = get("actor_rollout_ref.rollout.name"), get("actor_rollout_ref.actor.optim.lr", get("optim.lr"))
    done = max((record["step"] for record in records), default=0)
    seconds = sum(record.get("timing_s/step") or 0.0 for record in records)
    sampled = samples and prompts and f"{prompts} prompts × {samples} samples = {prompts * samples} sequences"
    facts = {
        "model": get("actor_rollout_ref.model.path", get("model.path")),
        "data": _listed(get("data.train_files")),
        "validation": _listed(get("data.val_files")),
        "algorithm": get("algorithm.adv_estimator"),
        "loss": get("algorithm.loss_type"),
        "learning rate": None if rate is None else f"{rate:g}",
        "batch": sampled or (prompts and f"{prompts} rows"),
        "engine": engine and f"{engine}, temperature {get('actor_rollout_ref.rollout.temperature')}",
        "steps": str(done) if total_steps is None else f"{done} of {total_steps}",
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
    names = {*first, *last}
    shown = [name for name in names if name.startswith("val/") and not name.endswith("/n")]
    found = [(*source_and_metric(name, names), name) for name in shown]
    for source, metric, name in sorted(found, key=lambda row: (not row[0], row)):
        missing = None if source else 0.0  # such a counter is absent where it is zero
        before, after = first.get(name, missing), last.get(name, missing)
        change = None if before is None or after is None else after - before
        n = last.get(f"val/{source}/n", first.get(f"val/{source}/n"))
        rows.append(
            {
                "source": readable(source or ALL_SOURCES),
                "metric": readable(metric),
                "n": n,
                "first": before,
                "last": after,
                "change": change,
            }
        )
    return {
        "rows": rows,
        "first_step": first["step"],
        "last_step": last["step"],
        "several": len(validations) > 1,
    }


def timing_summary(records: Records) -> list[dict[str, Any]]:
    """Return for every phase its median seconds, how often it ran, and its share of the measured time."""
    timers = {name.removeprefix(TIMER) for record in records for name in record if name.startswith(TIMER)}
    order = [name for name in TITLES if name in timers] + sorted(timers - set(TITLES) - {"step"})
    seconds = {name: [s for r in records if (s := r.get(TIMER + name)) is not None] for name in order}
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


def _alarms(file: Path, records: Records) -> str:
    """Return the alarms that were raised, with whether each still is."""
    raised = read_jsonl(file) if file.exists() else []
    if not raised:
        return ""
    last = {name: value for record in records for name, value in record.items() if name.startswith("health/")}
    facts = ("alarm", "step", "raised", "seen", "meaning", "remedy")
    for line, record in enumerate(raised, start=1):
        require_kinds(f"{file}, line {line},", record, dict.fromkeys(facts, TEXT) | {"step": WHOLE})
    return section(
        "alarms",
        [
            {"still": last.get(f"health/{each.get('alarm')}") == 1} | {name: each.get(name, "?") for name in facts}
            for each in raised
        ],
    )


def _first_look(file: Path) -> str:
    """Return what the first samples said."""
    if not file.exists():
        return ""
    look = read_object(file)
    kinds = {"headline": TEXT, "advice": TEXTS, "example": OBJECT}
    require_kinds(str(file), look, kinds, ("headline", "advice"))
    if (example := look.get("example")) is not None:
        require_sample(str(file), example)
        example = _shown(example, file.parent / "rollouts")
    return section("first_look", shown_text(look["headline"]), example, [shown_text(line) for line in look["advice"]])


# ---------------------------------------------------------------------------------------------- from the samples


def _answers(title: str, kind: str, found: Sequence[Series], id: str) -> str:
    """Return the answers to the same prompts at several steps that differ, those that changed most first."""
    if not found:
        return ""
    shown = that_differ(found)[:_PROMPTS_SHOWN]
    about = f"From the first to the last time that a prompt was answered: {describe(found, len(shown))}."
    labels = ([f"{kind} {answer.step}" for answer in each.answers] for each in shown)
    return section("answers", title, about, [shown_series(*each) for each in zip(shown, labels, strict=True)], id)


def shown_series(series: Series, labels: Sequence[str]) -> dict[str, Any]:
    """Format the answers to a prompt for the template; `labels` tell them apart."""
    answers = []
    for answer, label in zip(series.answers, labels, strict=True):
        score = "no score" if answer.score is None else f"score {answer.score:.2f}"
        several = f", mean of {answer.samples} samples; one of them:" if answer.samples > 1 else ""
        facts = [f"{name}: {fact}" for name, fact in _facts(answer.sample) if name not in _SAID_ABOVE]
        response = shown_text(answer_text(answer.sample))
        answers.append({"label": f"{label}: {score}{several}", "response": response, "facts": " · ".join(facts)})
    sample = series.answers[-1].sample
    truth = expected(sample)
    shown = {"question": shown_text(question(sample)), "prompt": shown_text(sample["prompt"]), "pictures": []}
    return {
        "sample": shown,
        "truth": None if truth is None else shown_text(str(truth)),
        "answers": answers,
        "change": series.change,
    }


def _last_samples(rollouts: Path) -> str:
    """Return the best, the median and the worst sample of the last step."""
    steps = rollouts_steps(rollouts)
    if not steps:
        return ""
    records = read_samples(rollouts, steps[-1])
    picked = [(label, _shown(record, rollouts)) for label, record in best_median_worst(records)]
    return section("samples", {"step": steps[-1], "total": len(records), "picked": picked}) if picked else ""


def _shown(record: Sample, rollouts: Path) -> dict[str, Any]:
    """Format a sample for the template; its pictures are in the folder `rollouts`."""
    return {
        "pictures": data_uris(record.get("images") or (), rollouts),
        "question": shown_text(question(record)),
        "prompt": shown_text(record["prompt"]),
        "response": shown_text(record["response"]),
        "chat": _chat(record) if is_episode(record) else None,
        "branches": _tokens(record) if is_episode(record) else None,
        "facts": _facts(record),
    }


def _chat(record: Sample) -> list[dict[str, Any]]:
    """Format an episode for the template, a bubble for each line."""
    return [
        {
            "role": readable(line.role),
            "text": shown_text(line.text),
            "reasoning": shown_text(line.reasoning),
            "calls": [shown_text(call) for call in line.calls],
            "is_policy": line.turn is not None,
            "label": _bubble_label(line),
            "reward": "" if line.reward is None else f"{line.reward:+.3g}",
        }
        for line in conversation(record)
    ]


def _tokens(record: Sample) -> list[list[dict[str, str]]]:
    """Format the tokens of each branch for the template, a span for each run of one origin."""
    return [
        [
            {
                "kind": "trained" if run.trained else "sampled" if run.origin == "policy" else "told",
                "title": f"{readable(run.origin)}, {count(run.tokens, 'token')}, {_TRAINED[run.trained]}",
                "text": shown_text(run.text),
            }
            for run in branch
        ]
        for branch in runs_of(record)
    ]


def _bubble_label(line: Line) -> str:
    if line.turn is None:
        return readable(line.role)
    tokens = "" if line.tokens is None else f", {line.tokens} tokens"
    return f"{readable(line.role)}, turn {line.turn + 1}{tokens}"


def _facts(record: Sample) -> list[tuple[str, str]]:
    return [(readable(name), shown_text(fact)) for name, fact in sample_facts(record)]


def shown_text(text: str) -> str:
    """Return a model's text with control characters spelled out, and its middle left out if it is very long."""
    if len(text) > _LONGEST_TEXT:
        half = _LONGEST_TEXT // 2
        text = f"{text[:half]}\n[… {len(text) - 2 * half} characters; rollouts/ has them …]\n{text[-half:]}"
    return readable(text)


# ---------------------------------------------------------------------------------------------- small helpers


def _listed(files: Any) -> str:
    """Join the names of sources with commas."""
    return ", ".join(map(source_title, files)) if isinstance(files, list) else str(files or "")


def flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of a nested mapping."""
    for name, fact in facts.items():
        if isinstance(fact, Mapping):
            yield from flat(fact, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", fact
