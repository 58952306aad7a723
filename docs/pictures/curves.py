"""Draw the curves of the examples: `python docs/pictures/curves.py` draws each file of `curves`, into an SVG beside it.

`python docs/pictures/curves.py RUN_FOLDER NAME` first writes `curves/NAME.jsonl`, the metrics of a run that are drawn.
The charts are those of a run's report. What is printed is for the table of docs/examples.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

from hrl.report.charts import CHARTS, LOSS_OVERVIEW, OVERVIEW, Picture, Records, metrics_of, run_columns, write_picture
from hrl.report.run_folder import read_jsonl

CURVES = Path(__file__).with_name("curves")
SHOWN = (OVERVIEW, *(chart for chart in CHARTS if chart.name in ("reward-parts", "environment")))
SHOWN_OF_PAIRS = (LOSS_OVERVIEW, *(chart for chart in CHARTS if chart.name == "preferences"))
"""Of a reward model."""


def keep(run: Path, name: str) -> None:
    """Write what is drawn of a run into `curves`."""
    records = read_jsonl(run / "metrics.jsonl")
    columns = [run_columns(records)]
    drawn = {metric for chart in (*SHOWN, *SHOWN_OF_PAIRS) for metric in metrics_of(chart, columns)}
    prompts = {metric for record in records for metric in record if metric.startswith("val/") and metric.endswith("/n")}
    lines = [{key: value for key, value in record.items() if key in drawn | prompts | {"step"}} for record in records]
    (CURVES / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def figures(records: Records) -> str:
    """Return cells of the table: the mean of the first and the last three steps, and of the first and last validation.

    Of a reward model, the figures are shares of pairs that are ranked right.
    """
    train = "rewards/accuracies" if any("train/loss" in record for record in records) else "reward/mean"
    values = [record[train] for record in records if train in record]
    held_out = [record[name] for record in records for name in record if _is_score(name, record)]
    return f"{mean(values[:3]):.2f} → {mean(values[-3:]):.2f} | {held_out[0]:.2f} → {held_out[-1]:.2f}"


def _is_score(name: str, record: Mapping[str, float]) -> bool:
    """Return whether a metric is the validation score of a source, and not of one of its parts."""
    source, _, kind = name.rpartition("/")
    return kind == "rewards_accuracies" or (kind.startswith("mean@") and f"{source}/n" in record)


def draw(folder: Path) -> list[Path]:
    """Draw every curve into a folder, and return the pictures."""
    drawn = []
    for file in sorted(CURVES.glob("*.jsonl")):
        records = read_jsonl(file)
        shown = SHOWN_OF_PAIRS if any("train/loss" in record for record in records) else SHOWN
        drawn.append(write_picture(records, folder, Picture(f"{file.stem}.svg", shown), file.stem))
    return [picture for picture in drawn if picture is not None]


if __name__ == "__main__":
    if sys.argv[1:]:
        keep(Path(sys.argv[1]), sys.argv[2])
    for picture in draw(CURVES):
        sys.stdout.write(f"{picture.stem} | {figures(read_jsonl(picture.with_suffix('.jsonl')))}\n")
