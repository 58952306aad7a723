"""The plan of a run: what its step costs as given, and in the best layout found."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hrl.cluster.precision import with_dtypes
from hrl.config.outline import outline_of
from hrl.config.ppo import PPOTrainerConfig
from hrl.plan.hardware import CPU, Hardware
from hrl.plan.launch_line import LaunchLine, PlanError
from hrl.plan.layout import Changes, Layout, best_layout
from hrl.plan.shapes import shapes_of
from hrl.plan.step import CostModel, StepCost
from hrl.plan.workload import Workload

_MOST_DEVICES = 4096


@dataclass(frozen=True)
class Lengths:
    """What is known of the rows beforehand; None where it is not.

    Attributes:
        prompt: Mean tokens of a prompt.
        response: Mean tokens of a response.
        teaching: Share of the groups whose samples differ in reward.
    """

    prompt: float | None = None
    response: float | None = None
    teaching: float = 1.0


@dataclass(frozen=True)
class Plan:
    """What `hrl plan` says.

    Attributes:
        line: The launch line on the devices that were asked for.
        model: The model of cost as given.
        cost: What a step takes as given, whether it fits or not.
        misfit: Why it does not fit; None if it does.
        best: The best layout found.
        apart: The best one in which half of every machine's devices sample and half train; None if that was not tried
            or does not fit.
    """

    line: LaunchLine
    model: CostModel
    cost: StepCost
    misfit: str | None
    best: Layout
    apart: Layout | None

    @property
    def best_line(self) -> LaunchLine:
        """The launch line of the best layout."""
        return self.line.with_values(self.best.changes)


def plan(line: LaunchLine, hardware: Hardware, devices: int | None, lengths: Lengths) -> Plan:
    """Return the plan of a launch line.

    Args:
        line: The line; nothing is started, and no file but the models' `config.json` is opened.
        hardware: A device.
        devices: Their number; None takes the line's own.
        lengths: Of the rows.

    Raises:
        PlanError: No layout fits; says how many devices it takes.
        ConfigError: The line is not valid.
    """
    line = line.with_values(_devices(hardware, devices))
    model = cost_model(line.config(), hardware, lengths)
    best = best_layout(model)
    if best is None:
        raise PlanError(_too_large(line, model, hardware, lengths))
    return Plan(line, model, model.cost(), model.misfit(), best, _apart(line, model, hardware, lengths))


def cost_model(config: PPOTrainerConfig, hardware: Hardware, lengths: Lengths) -> CostModel:
    """Return the model of cost of a configuration."""
    config = with_dtypes(config, "cpu" if hardware.is_cpu else "cuda")
    work = Workload.of(config, lengths.prompt, lengths.response, lengths.teaching)
    return CostModel(config, shapes_of(outline_of(config)), hardware, work)


def _devices(hardware: Hardware, devices: int | None) -> Changes:
    """Return the keys that ask for a number of devices.

    Raises:
        PlanError: They would not fill their machines.
    """
    if devices is None:
        return ()
    inside = devices if hardware.is_cpu else min(devices, hardware.per_machine)
    machines, left = divmod(devices, inside)
    if left:
        raise PlanError(f"--gpus {devices} fills no number of machines of {inside}: take a multiple of {inside}")
    return ("trainer.nnodes", machines), ("trainer.n_gpus_per_node", inside)


def _apart(line: LaunchLine, model: CostModel, hardware: Hardware, lengths: Lengths) -> Layout | None:
    """Return the best layout with engines on half of each machine; the two halves take turns."""
    trainer = model.config.trainer
    half = trainer.n_gpus_per_node // 2
    if (
        hardware.is_cpu
        or not half
        or model.placement.actor != model.placement.rollout
        or len(trainer.resource_pools) > 1
    ):
        return None
    pools = {"train": [half] * trainer.nnodes, "sample": [half] * trainer.nnodes}
    roles = dict.fromkeys(("actor", "ref", "critic", "rm"), "train") | {"rollout": "sample"}
    changes: Changes = (("trainer.resource_pools", pools), ("trainer.role_pools", roles))
    found = best_layout(cost_model(line.with_values(changes).config(), hardware, lengths))
    return None if found is None else replace(found, changes=changes + found.changes)


def _too_large(line: LaunchLine, model: CostModel, hardware: Hardware, lengths: Lengths) -> str:
    """Say why nothing fits, and on how many devices something would."""
    trainer = model.config.trainer
    devices = trainer.nnodes * trainer.n_gpus_per_node
    why = f"no layout fits {devices} × {hardware.name}. As given, {model.misfit()}"
    if hardware.name == CPU:
        return f"{why}. A smaller model, a smaller KV cache or fewer processes would"
    more = devices
    while more < _MOST_DEVICES:
        more = 2 * more if more >= hardware.per_machine else min(2 * more, hardware.per_machine)
        wider = line.with_values(_devices(hardware, more))
        if best_layout(replace(model, config=cost_model(wider.config(), hardware, lengths).config)) is not None:
            return f"{why}. With --gpus {more} there is a layout that fits"
    return f"{why}. Not even {_MOST_DEVICES} do"
