"""Compare a run with the model of cost: `python docs/scaling/compare.py RUN_FOLDER [GPU | GFLOP/s GB/s]`.

Each step is predicted from its own lengths and from the rows that its update ran; shown are medians over all steps but
the first, which compiles, and the median of what the model is off by. On a CPU the rates of this machine are measured,
unless both are given.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from hrl.cluster.precision import with_dtypes
from hrl.config.compose import compose_kind
from hrl.config.outline import outline_of
from hrl.config.run_kind import PPO
from hrl.plan.hardware import Hardware, cpu, hardware_named
from hrl.plan.shapes import shapes_of
from hrl.plan.step import CostModel
from hrl.plan.workload import Workload
from hrl.preflight.memory_look import memory_here
from hrl.report.run_folder import read_jsonl

MEASURED = "timing_s/"


def compared(run: Path, hardware: Hardware) -> list[str]:
    """Return a line for each phase that takes a hundredth of a step or more."""
    config = compose_kind(PPO, ["--config-path", str(run), "--config-name", "config"])
    config = with_dtypes(config, "cpu" if hardware.is_cpu else "cuda")
    shapes = shapes_of(outline_of(config))
    measured: dict[str, list[float]] = {}
    predicted: dict[str, list[float]] = {}
    for step in read_jsonl(run / "metrics.jsonl"):
        if step["step"] < 2 or "timing_s/step" not in step:
            continue
        lengths = [step[f"{part}_length/mean"] for part in ("prompt", "response")]
        work = Workload.of(config, *lengths)
        work = Workload.of(config, *lengths, step.get("actor/rows_run", work.sequences) / work.sequences)
        cost = CostModel(config, shapes, hardware, work).cost()
        for name, seconds in [(phase.name, phase.seconds) for phase in cost.phases] + [("step", cost.seconds)]:
            measured.setdefault(name, []).append(step[MEASURED + name])
            predicted.setdefault(name, []).append(seconds)
    lines = [f"{'phase':14}{'run s':>9}{'model s':>9}{'off by':>8}"]
    for name, seconds in measured.items():
        off = median(ours / theirs for ours, theirs in zip(predicted[name], seconds, strict=True)) - 1
        if median(seconds) > median(measured["step"]) / 100:
            lines.append(f"{name:14}{median(seconds):9.2f}{median(predicted[name]):9.2f}{off:+8.0%}")
    return lines


def main(run: str, *machine: str) -> None:
    """Print the comparison."""
    if len(machine) == 2:
        hardware = cpu(1e9 * float(machine[0]), 1e9 * float(machine[1]), memory_here())
    else:
        hardware = hardware_named(*machine or ("cpu",))
    sys.stdout.write("\n".join(compared(Path(run).resolve(), hardware)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
