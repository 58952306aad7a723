"""What `hrl plan` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hrl.config.arithmetic import count
from hrl.plan.plan import Plan
from hrl.plan.step import StepCost
from hrl.preflight.memory_ledger import GIB, gib

_PHASES = {
    "gen": "sampling",
    "reward": "reward model",
    "old_log_prob": "old log-probs",
    "ref": "reference",
    "values": "values",
    "adv": "advantages",
    "update_critic": "critic's update",
    "update_actor": "policy's update",
    "weight_sync": "weight sync",
}
"""Phase → its name in words."""


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    model, best = plan.model, plan.best
    work = model.work
    console.print(Text(f"{work.prompts:,} prompts × {work.samples} samples on {_devices(plan)}", style="bold"))
    lengths = f"prompts of {work.prompt:,.0f} tokens, responses of {work.response:,.0f}, at most"
    console.print(f"  lengths: {lengths} {work.longest_response:,} (--prompt-tokens, --response-tokens)")
    if plan.misfit is None:
        _show_cost("As given", plan.cost, console, model.hardware.memory)
    else:
        console.print(Text(f"\nAs given it does not fit: {plan.misfit}.", style="red"))
    if not best.changes:
        console.print("\nNo layout was found that is better.")
    else:
        _show_cost("Best layout found", best.cost, console, model.hardware.memory)
    console.print()
    console.print(Text(f"  {plan.best_line}"), soft_wrap=True)
    if plan.apart is not None:
        seconds = plan.apart.cost.seconds
        console.print(f"\nWith engines on half of the devices, apart from the trainer: {seconds:,.1f} s a step.")
    if not model.hardware.is_cpu:
        console.print("\nComputed, not measured: hrl has not run on a GPU. docs/scaling.md has the assumptions.")


def _devices(plan: Plan) -> str:
    """Return the number of devices, or what was measured of this machine."""
    hardware, number = plan.model.hardware, plan.cost.devices
    if not hardware.is_cpu:
        return f"{number:,} × {hardware.name}"
    rates = f"{hardware.flops / 1e9:,.0f} GFLOP/s, copies {hardware.memory_rate / 1e9:.1f} GB/s"
    return f"{count(number, 'process', 'processes')} of this machine (products {rates})"


def _show_cost(title: str, cost: StepCost, console: Console, memory: float) -> None:
    rate = f"{cost.tokens_per_second:,.0f} tokens/s"
    each = f", {cost.tokens_per_second / cost.devices:,.0f} for each device" if cost.devices > 1 else ""
    console.print()
    console.print(Text(f"{title}: {cost.seconds:,.1f} s a step, {rate}{each}", style="bold"))
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify)  # type: ignore[arg-type]
    for phase in cost.phases:
        table.add_row(f"  {_PHASES[phase.name]}", f"{phase.seconds:,.2f} s", f"mostly {phase.largest}")
    peak = max((ledger.peak for ledger in cost.ledgers), key=lambda phase: phase.num_bytes)
    table.add_row("  memory", f"{gib(peak.num_bytes)} GiB", f"of {memory / GIB:.1f}, in the phase {peak.name}")
    console.print(table)
    bottleneck = cost.bottleneck
    console.print(f"  bottleneck: {_PHASES[bottleneck.phase]}, {bottleneck.cause} ({bottleneck.share:.0%} of the step)")


def as_data(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain data."""
    return {
        "hardware": plan.model.hardware.name,
        "devices": plan.cost.devices,
        "given": _cost_data(plan.cost) | {"fits": plan.misfit is None, "misfit": plan.misfit},
        "best": _cost_data(plan.best.cost) | {"changes": dict(plan.best.changes), "line": str(plan.best_line)},
        "apart": None if plan.apart is None else _cost_data(plan.apart.cost) | {"changes": dict(plan.apart.changes)},
    }


def _cost_data(cost: StepCost) -> dict[str, Any]:
    return {
        "seconds": cost.seconds,
        "tokens_per_second": cost.tokens_per_second,
        "phases": {phase.name: {"seconds": phase.seconds, "terms": phase.terms} for phase in cost.phases},
        "memory_bytes": cost.peak_bytes,
        "bottleneck": cost.bottleneck._asdict(),
    }
