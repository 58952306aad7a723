"""Write the tables and the picture of docs/scaling.md anew: `python docs/scaling/tables.py`."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import vl_convert

from hrl.config.arithmetic import count
from hrl.config.variant import BUDGET
from hrl.plan import assumptions
from hrl.plan.hardware import GPUS
from hrl.plan.launch_line import LaunchLine, PlanError
from hrl.plan.layout import ENGINE_SHARE, OPTIMIZER_OFFLOAD, PARAM_OFFLOAD, RECOMPUTE, REQUESTS, SHARDS, SLEEPS
from hrl.plan.layout import TENSOR_PARALLEL as ENGINE
from hrl.plan.lengths import Lengths
from hrl.plan.plan import Plan, plan
from hrl.plan.step import driver_s
from hrl.plan.sync import sync_s
from hrl.preflight.memory_ledger import GIB
from tests.plan.recorded import DECODING, HOP_TOKENS, HOPS, SMOL, STEPS, SYNC_S, TWO_CORES
from tests.plan.test_recorded import model_of, of_a_token, off_with_episodes

HERE = Path(__file__).parent
PAGE = HERE.with_suffix(".md")
MODELS = ("Qwen2.5-7B", "Qwen2.5-32B", "Llama-3.1-70B", "Qwen3-30B-A3B")
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024)
LINE = (
    "data.train_files=train.parquet", "data.train_batch_size=512", "actor_rollout_ref.rollout.n=16",
    "data.max_prompt_length=1024", "data.max_response_length=8192", "actor_rollout_ref.actor.ppo_mini_batch_size=512",
    "actor_rollout_ref.actor.use_kl_loss=false",
)  # fmt: skip
LENGTHS = Lengths(prompt=256, response=2048)
_SHORT = {
    ENGINE: "engines over {}",
    REQUESTS: "{:,} requests",
    ENGINE_SHARE: "engine {:.0%}",
    BUDGET: "{:,} tokens",
    SHARDS: "shards of {}",
    RECOMPUTE: "recompute {}",
    OPTIMIZER_OFFLOAD: "moments offloaded",
    PARAM_OFFLOAD: "parameters offloaded",
    SLEEPS: "engine stays awake",
}


def planned(model: str, devices: int, gpu: str = "h100") -> Plan | None:
    """Return the plan of the page's line for a model; None if no layout fits."""
    line = LaunchLine.of(["grpo", f"actor_rollout_ref.model.path={HERE / 'models' / model}", *LINE])
    try:
        return plan(line, GPUS[gpu], devices, LENGTHS)
    except PlanError:
        return None


def row(model: str, devices: int) -> str:
    """Return the line of a table."""
    found = planned(model, devices)
    if found is None:
        return f"| {devices:,} | does not fit | | | | | | |"
    cost = found.best.cost
    seconds = {phase.name: phase.seconds for phase in cost.phases}
    rest = cost.seconds - seconds["gen"] - seconds["update_actor"]
    apart = ["engines apart"] if found.best is found.apart else []
    layout = ", ".join([*apart, *(_in_words(key, value) for key, value in found.best.changes if key in _SHORT)])
    return (
        f"| {devices:,} | {cost.seconds:,.0f} | {seconds['gen']:,.0f} | {seconds['update_actor']:,.0f} | {rest:,.0f} | "
        f"{cost.tokens_per_second / devices:,.0f} | {cost.peak_bytes / GIB:.0f} | {layout or 'as given'} |"
    )


def _in_words(key: str, value: Any) -> str:
    return _SHORT[key].format("off" if value is False else value)  # an engine stays awake where it is False


def table(model: str) -> list[str]:
    """Return the table of a model."""
    head = (
        "| GPUs | step s | sampling s | update s | rest s | tokens/s of a GPU | GiB | layout, where not the default |"
    )
    return [head, "| --- | --- | --- | --- | --- | --- | --- | --- |", *(row(model, devices) for devices in COUNTS)]


def curves() -> Iterator[dict[str, Any]]:
    """Yield the points of the picture."""
    for model in MODELS:
        for devices in COUNTS:
            found = planned(model, devices)
            if found is None:
                continue
            cost = found.best.cost
            seconds = {phase.name: phase.seconds for phase in cost.phases}
            shown = {
                "sampling": seconds["gen"],
                "update": seconds["update_actor"],
                "weight sync": seconds["weight_sync"],
            }
            shown["rest"] = cost.seconds - sum(shown.values())
            for phase, value in shown.items():
                yield {"model": model, "GPUs": devices, "phase": phase, "seconds": value}


def draw() -> None:
    """Draw seconds by phase over GPUs, a panel for each model."""
    axis = {"type": "log", "base": 2}
    chart = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "data": {"values": list(curves())},
        "facet": {"field": "model", "type": "nominal", "title": None, "sort": list(MODELS)},
        "columns": 2,
        "spec": {
            "width": 340,
            "height": 210,
            "mark": {"type": "line", "point": True},
            "encoding": {
                "x": {"field": "GPUs", "type": "quantitative", "scale": axis, "axis": {"values": list(COUNTS)}},
                "y": {
                    "field": "seconds",
                    "type": "quantitative",
                    "scale": {"type": "log"},
                    "title": "seconds (predicted)",
                },
                "color": {"field": "phase", "type": "nominal", "sort": ["sampling", "update", "weight sync", "rest"]},
            },
        },
        "config": {"background": "#ffffff"},
    }
    svg = vl_convert.vegalite_to_svg(json.dumps(chart))
    (HERE.parent / "pictures" / "scaling.svg").write_text(svg, encoding="utf-8")


def measured() -> list[str]:
    """Return the table of phases of measured steps on two cores."""
    seconds: dict[tuple[str, str], list[tuple[float, float, bool]]] = {}
    for step in STEPS:
        said = {phase.name: phase.seconds for phase in model_of(step).cost().phases}
        for phase, measured_s in step.seconds.items():
            each = (measured_s, said[phase], phase in step.fixes)
            seconds.setdefault((step.run, f"`{phase}`"), []).append(each)
    lines = [
        "| run | phase | steps | measured s, median | model s, median | off by, median | predicted steps, off by |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (run, phase), steps in seconds.items():
        both = f"{median(one for one, _, _ in steps):.3g} | {median(model for _, model, _ in steps):.3g}"
        offs = [model / one - 1 for one, model, _ in steps]
        predicted = [off for off, (*_, fixes) in zip(offs, steps, strict=True) if not fixes]
        spread = f"{min(predicted):+.0%} to {max(predicted):+.0%}"
        lines.append(f"| {run} | {phase} | {len(steps)} | {both} | {median(offs):+.0%} | {spread} |")
    return lines


def of_episodes() -> list[str]:
    """Return the table of phases of measured steps with episodes on two cores."""
    lines = [
        "| phase | steps | measured s, median | model s, median | off by, median | off by |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for phase, steps in off_with_episodes().items():
        both = " | ".join(f"{median(side):.3g}" for side in zip(*steps, strict=True))
        offs = [said / seconds - 1 for seconds, said in steps]
        lines.append(
            f"| `{phase}` | {len(steps)} | {both} | {median(offs):+.0%} | {min(offs):+.0%} to {max(offs):+.0%} |"
        )
    return lines


def others() -> list[str]:
    """Return the table of what else was measured on two cores."""
    lines = ["| what | measured s | model s | off by | |", "| --- | --- | --- | --- | --- |"]
    for requests, (seconds, fixes) in DECODING.items():
        name = f"vLLM alone, {count(requests, 'request')} of 45 + 32 tokens: each of the 32"
        lines.append(_compared(name, seconds, of_a_token(requests), fixes=fixes))
    sync = sum(sync_s(SMOL, 1, TWO_CORES, assumptions.ON_CPU, shares=True, sleeps=True).values())
    lines += [_compared("weight sync of 269 MB", seconds, sync, fixes=True) for seconds in SYNC_S]
    for ranks, seconds in HOPS.items():
        name = f"driver hop of 1,024 rows to {ranks:,} ranks"
        lines.append(_compared(name, seconds, driver_s(assumptions.ON_CPU, HOP_TOKENS, ranks), fixes=True))
    return lines


def _compared(name: str, seconds: float, model: float, *, fixes: bool) -> str:
    how = "fixes a constant" if fixes else "predicted"
    return f"| {name} | {seconds:.3g} | {model:.3g} | {model / seconds - 1:+.0%} | {how} |"


def hardware() -> list[str]:
    """Return the table of hardware."""
    head = "| | TFLOP/s | GiB | memory TB/s | link GB/s | network of 8 GB/s | bus GB/s | share of products |"
    lines = [head, "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for card in GPUS.values():
        rates = f"{card.memory_rate / 1e12:g} | {card.link_rate / 1e9:g} | {card.network_rate / 1e9:g}"
        more = f"{card.host_rate / 1e9:g} | {card.product_share:.2f}"
        lines.append(f"| {card.name} | {card.flops / 1e12:g} | {card.memory / GIB:g} | {rates} | {more} |")
    return lines


def constants() -> list[str]:
    """Return the table of all other constants, with the meaning and the sources that the module gives."""
    source = Path(assumptions.__file__).read_text(encoding="utf-8")
    doc = " ".join((assumptions.Assumptions.__doc__ or "").split("Attributes:")[1].split())
    names = list(assumptions.Assumptions.__dataclass_fields__)
    lines = ["| constant | GPU | from | CPU | from | meaning |", "| --- | --- | --- | --- | --- | --- |"]
    of_gpu, of_cpu = (source.split(f"{name} = Assumptions(")[1].split("\n)")[0] for name in ("ON_GPU", "ON_CPU"))
    for name, follower in zip(names, [*names[1:], None], strict=True):
        meaning = doc.split(f"{name}: ")[1].split(f" {follower}: ")[0] if follower else doc.split(f"{name}: ")[1]
        cells = []
        for values, text in ((assumptions.ON_GPU, of_gpu), (assumptions.ON_CPU, of_cpu)):
            said = re.search(rf"    {name}=[^,]+,  # (.*)", text)
            cells.append(f"{getattr(values, name):g} | {said[1] if said else 'measured on a CPU, see above it'}")
        lines.append(f"| `{name}` | {cells[0]} | {cells[1]} | {meaning} |")
    return lines


def write(blocks: dict[str, list[str]]) -> None:
    """Put tables between the page's marks `<!-- table NAME -->` and `<!-- end -->`."""
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in blocks.items():
        text, found = re.subn(
            rf"(?s)(<!-- table {re.escape(name)} -->\n).*?(<!-- end -->)",
            lambda mark, lines=lines: f"{mark[1]}\n" + "\n".join(lines) + f"\n\n{mark[2]}",
            text,
        )
        if found != 1:
            sys.exit(f"{PAGE} has {found} places for the table {name}")
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    """Write all."""
    published = runpy.run_path(str(HERE / "published.py"))["rows"]()
    write(
        {
            "measured": measured(),
            "episodes": of_episodes(),
            "others": others(),
            "published": published,
            "hardware": hardware(),
            "constants": constants(),
        }
    )
    write({model: table(model) for model in MODELS})
    draw()


if __name__ == "__main__":
    main()
