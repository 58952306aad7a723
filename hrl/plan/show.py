"""What `hrl plan` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from hrl.config.arithmetic import count
from hrl.config.compose import TRAIN_FILES
from hrl.plan.lengths import SINGLE_ANSWERS
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
    for line in lines(plan):
        console.print(line, soft_wrap=True)


def lines(plan: Plan) -> Iterator[Text]:
    """Yield the lines of a plan; the headings are bold, what does not fit is red."""
    model, best = plan.model, plan.best
    memory = model.hardware.memory
    yield Text(f"{model.work.prompts:,} prompts × {model.work.samples} samples on {_devices(plan)}", style="bold")
    yield Text(f"  {_lengths(plan)}")
    if model.work.episodes is not None:
        yield Text(f"  {_episodes(plan)}")
    if not model.packs_rows:
        yield Text("  rows are padded, not packed: passes of the trainer count the padding, and prompts once a sample")
    if not plan.line.names_rows:
        yield Text(f"  {TRAIN_FILES} is not given: a plan opens no rows, the run will want some")
    if plan.misfit is None:
        yield from _of_cost("As given", plan.cost, memory)
    else:
        yield Text("")
        yield Text(f"As given it does not fit: {plan.misfit}.", style="red")
    if best.changes:
        yield from _of_cost("Best layout found", best.cost, memory)
    else:
        yield Text("")
        yield Text("No layout was found that is better.")
    yield Text("")
    yield Text(f"  {plan.best_line}")
    yield from _other(plan)
    if not model.hardware.is_cpu:
        yield Text("")
        yield Text("Computed, not measured: hrl has not run on a GPU. docs/scaling.md has the assumptions.")


def _lengths(plan: Plan) -> str:
    """Return the lengths, and which of them are assumed."""
    work, data = plan.model.work, plan.model.config.data
    is_sum = None not in (plan.lengths.turn_tokens, plan.lengths.environment_tokens)
    response = work.response if work.episodes is not None and is_sum else plan.lengths.response
    parts = (
        ("prompts", work.prompt, data.max_prompt_length, plan.lengths.prompt, "--prompt-tokens"),
        ("responses", work.response, data.max_response_length, response, "--response-tokens"),
    )
    said = [f"{what} of {mean:,.0f} tokens, at most {most:,}" for what, mean, most, _, _ in parts]
    assumed = [option for *_, given, option in parts if given is None]
    hint = f" (means assumed, half of the most: {', '.join(assumed)})" if assumed else ""
    return f"{'; '.join(said)}{hint}"


def _episodes(plan: Plan) -> str:
    """Return how episodes are spent, and what of that is assumed."""
    work, lengths = plan.model.work, plan.lengths
    episodes = work.episodes or SINGLE_ANSWERS
    shared = "prompts are shared" if work.shared is None else f"{work.shared:.0%} of the tokens are shared"
    knows_split = lengths.turn_tokens is not None or lengths.environment_tokens is not None
    assumed = [
        option
        for option, is_known in (
            ("--turns", lengths.turns is not None),
            ("--turn-tokens", knows_split),
            ("--environment-seconds", lengths.environment_s is not None),
            ("--shared-tokens", lengths.shared is not None),
        )
        if not is_known
    ]
    tokens = f"{work.sampled:,.0f} tokens of the policy's, {work.environment_tokens:,.0f} of the environment's"
    hint = f" (assumed: {', '.join(assumed)})" if assumed else ""
    return f"episodes of {work.turns:.3g} turns: {tokens}, {episodes.environment_s:.3g} s with it; {shared}{hint}"


def _other(plan: Plan) -> Iterator[Text]:
    """Yield what the best layout of the other kind takes: engines on devices of their own, or on all."""
    if plan.apart is None or plan.together is None:
        return
    seconds = (plan.together if plan.best is plan.apart else plan.apart).cost.seconds
    where = "on all devices, beside" if plan.best is plan.apart else "on half of the devices, apart from"
    yield Text("")
    yield Text(f"With engines {where} the trainer: {seconds:,.1f} s a step.")


def _devices(plan: Plan) -> str:
    """Return the number of devices, or what was measured of this machine."""
    hardware, number = plan.model.hardware, plan.cost.devices
    if not hardware.is_cpu:
        return f"{number:,} × {hardware.name}"
    rates = f"{hardware.flops / 1e9:,.0f} GFLOP/s, copies {hardware.memory_rate / 1e9:.1f} GB/s"
    return f"{count(number, 'process', 'processes')} of this machine (products {rates})"


def _of_cost(title: str, cost: StepCost, memory: float) -> Iterator[Text]:
    rate = f"{cost.tokens_per_second:,.0f} tokens/s of prompts and responses"
    each = f", {cost.tokens_per_second / cost.devices:,.0f} on each device" if cost.devices > 1 else ""
    yield Text("")
    yield Text(f"{title}: {cost.seconds:,.1f} s a step, {rate}{each}", style="bold")
    for phase in cost.phases:
        share = phase.seconds / cost.seconds
        yield Text(f"  {_PHASES[phase.name]:16}{phase.seconds:10,.2f} s {share:4.0%}  mostly {phase.largest}")
    if cost.overlap_s > 0.005:
        yield Text(f"  {'of these at once':16}{-cost.overlap_s:10,.2f} s")
    peak = max((ledger.peak for ledger in cost.ledgers), key=lambda phase: phase.num_bytes)
    used = f"{gib(peak.num_bytes)} GiB"
    yield Text(f"  {'memory':16}{used:>12}       of {memory / GIB:.1f} GiB, in the phase {peak.name}")
    bottleneck = cost.bottleneck
    where = f"{_PHASES[bottleneck.phase]} ({bottleneck.share:.0%} of the step)"
    yield Text(f"  bottleneck: {where}, mostly {bottleneck.cause}")


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
        "overlap_seconds": cost.overlap_s,
        "tokens_per_second": cost.tokens_per_second,
        "phases": {phase.name: {"seconds": phase.seconds, "terms": phase.terms} for phase in cost.phases},
        "memory_bytes": cost.peak_bytes,
        "bottleneck": cost.bottleneck._asdict(),
    }
