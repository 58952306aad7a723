"""The step lines that README.md shows are those that the console prints today, of a run of the quickstart."""

import re
from pathlib import Path

import pytest

from hrl.config import compose_cli
from hrl.report.console import PLAIN_WIDTH
from hrl.report.run_folder import read_jsonl
from hrl.report.step_line import Layout
from hrl.trainer.kinds import KINDS

ROOT = Path(__file__).parents[2]
LINES = re.findall(r"^step .+$", (ROOT / "README.md").read_text(), re.MULTILINE)
METRICS = {
    "reward": ("reward/mean",),
    "val": ("val/bundled/addition/mean@1", "val/bundled/addition/n"),
    "len": ("response_length/mean",),
    "kl": ("actor/ppo_kl",),
    "ent": ("actor/entropy",),
    "grad": ("actor/grad_norm",),
    "lr": ("actor/lr",),
    "gen": ("timing_s/gen",),
    "upd": ("timing_s/update_actor",),
}
"""Label → the metrics that the quickstart shows there."""


def layout(total: int) -> Layout:
    return Layout(KINDS["ppo"].line(compose_cli([])), total)


def labels(line: str) -> list[str]:
    return re.findall(r"[a-z/]{2,}", line)


def metrics_of(line: str) -> dict[str, float]:
    """The metrics from which a line was printed, as far as it shows them."""
    found = {
        name: float(value)
        for label, value in re.findall(r"([a-z]+) +(-?\d[\d.]*(?:e[+-]\d+)?)", line.partition("  ")[2])
        for name in METRICS.get(label, ())
    }
    seconds, rate = re.search(r"([\d.]+)s ", line), re.search(r"(\d+) tok/s", line)
    assert seconds is not None and rate is not None
    return found | {"timing_s/step": float(seconds[1]), "perf/throughput": float(rate[1])}


def test_there_are_lines() -> None:
    assert len(LINES) >= 3


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_what_the_console_prints(line: str) -> None:
    counted = re.match(r"step +(\d+)/(\d+)", line)
    assert counted is not None
    step, total = map(int, counted.groups())
    assert layout(total).text(step, metrics_of(line), PLAIN_WIDTH) == line
    record = read_jsonl(ROOT / "tests" / "report" / "quickstart_metrics.jsonl")[1]
    assert labels(line) == labels(layout(total).text(1, record, PLAIN_WIDTH)), "no column is missing"
