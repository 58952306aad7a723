"""Compare runs with the model of cost.

`python docs/scaling/compare.py RUN_FOLDER … [--gpu NAME | --rates GFLOP/s GB/s]`

Each step is predicted from its own lengths and from the rows that its update ran. The table has the median of every
phase, the median of what the model is off by, and the step it is off most. The first step, which compiles, is left out,
and so are steps after a validation, whose samples were drawn beside it.
On a CPU the rates of this machine are measured, unless both are given.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

from hrl.cluster.precision import with_dtypes
from hrl.config.compose import compose_kind
from hrl.config.outline import outline_of
from hrl.config.run_kind import PPO
from hrl.plan.hardware import CPU, Hardware, cpu, hardware_named
from hrl.plan.lengths import Lengths
from hrl.plan.shapes import shapes_of
from hrl.plan.step import CostModel
from hrl.plan.workload import Workload
from hrl.preflight.memory_look import memory_here
from hrl.report.run_folder import read_jsonl

MEASURED = "timing_s/"
KNOWN = {
    "prompt": "prompt_length/mean",
    "response": "response_length/mean",
    "turns": "episode/turns/mean",
    "environment_tokens": "episode/environment_tokens/mean",
    "environment_s": "episode/environment_s/mean",
    "shared": "actor/shared_tokens",
}
"""What is known of a step's rows → its metric."""
HEAD = (
    "| run | phase | steps | run s | model s | off by | at most |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


def compared(run: Path, hardware: Hardware) -> list[str]:
    """Return a row for each phase that takes a hundredth of a step or more, and one for the whole step."""
    config = compose_kind(PPO, ["--config-path", str(run.resolve()), "--config-name", "config"])
    config = with_dtypes(config, "cpu" if hardware.is_cpu else "cuda")
    shapes = shapes_of(outline_of(config))
    seconds: dict[str, list[tuple[float, float]]] = {}
    was_validated = False
    for step in read_jsonl(run / "metrics.jsonl"):
        was_sampled_before, was_validated = was_validated, f"{MEASURED}testing" in step
        if step["step"] < 2 or was_sampled_before or f"{MEASURED}step" not in step:
            continue
        lengths = {name: step[metric] for name, metric in KNOWN.items() if metric in step}
        known = Lengths(**lengths)
        rows = Workload.of(config, known).sequences
        work = Workload.of(config, replace(known, teaching=step.get("actor/rows_run", rows) / rows))
        cost = CostModel(config, shapes, hardware, work).cost()
        for name, model in [(phase.name, phase.seconds) for phase in cost.phases] + [("step", cost.seconds)]:
            if MEASURED + name in step:
                seconds.setdefault(name, []).append((step[MEASURED + name], model))
    if not seconds:
        return [f"| {run} | has no step after its first | | | | | |"]
    return list(_rows(str(run), seconds))


def _rows(run: str, seconds: dict[str, list[tuple[float, float]]]) -> Iterator[str]:
    step_s = median(measured for measured, _ in seconds["step"])
    for name, pairs in seconds.items():
        measured, model = (median(side) for side in zip(*pairs, strict=True))
        if measured < step_s / 100:
            continue
        offs = [said / found - 1 for found, said in pairs]
        farthest = max(offs, key=abs)
        both = f"{measured:.2f} | {model:.2f}"
        yield f"| {run} | {name} | {len(pairs)} | {both} | {median(offs):+.0%} | {farthest:+.0%} |"


def main() -> None:
    """Print the comparison."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--gpu", default=CPU, metavar="NAME", help="what they ran on, if not this CPU")
    parser.add_argument(
        "--rates", nargs=2, type=float, metavar=("GFLOP/s", "GB/s"), help="of a CPU, as measured before"
    )
    options = parser.parse_args()
    rates = options.rates
    hardware = cpu(1e9 * rates[0], 1e9 * rates[1], memory_here()) if rates else hardware_named(options.gpu)
    sys.stdout.write(f"{hardware.flops / 1e9:,.0f} GFLOP/s, memory {hardware.memory_rate / 1e9:,.1f} GB/s\n\n")
    sys.stdout.write("\n".join(HEAD) + "\n")
    for run in options.runs:
        sys.stdout.write("\n".join(compared(run, hardware)) + "\n")


if __name__ == "__main__":
    main()
