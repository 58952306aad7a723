"""The plan of a run: what its step costs as given, and in the best layout found."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hrl.cluster.precision import with_dtypes
from hrl.config.outline import outline_of
from hrl.config.ppo import PPOTrainerConfig
from hrl.plan.hardware import CPU, Hardware
from hrl.plan.launch_line import LaunchLine, PlanError
from hrl.plan.layout import Changes, Layout, best_layout
from hrl.plan.lengths import Lengths, response_of, turns_of
from hrl.plan.shapes import shapes_of
from hrl.plan.step import CostModel, StepCost
from hrl.plan.workload import Workload

_MOST_DEVICES = 4096
_PER_MACHINE = "trainer.n_gpus_per_node"
OF_EPISODES = {
    "turns": "--turns",
    "turn_tokens": "--turn-tokens",
    "environment_tokens": "--environment-tokens",
    "environment_s": "--environment-seconds",
    "shared": "--shared-tokens",
}
"""What is known of episodes → the option that says it."""


@dataclass(frozen=True)
class Plan:
    """What `hrl plan` says.

    Attributes:
        line: The launch line on the devices that were asked for.
        lengths: What was known of the rows.
        model: The model of cost as given.
        cost: What a step takes as given, whether it fits or not.
        misfit: Why it does not fit; None if it does.
        best: The best layout found, without a change if that is the given one.
        apart: The best of those in which half of every machine's devices sample and half train; None if that was not
            tried or does not fit.
        together: The best of those in which all devices do both, or of the given pools; None if none fits.
    """

    line: LaunchLine
    lengths: Lengths
    model: CostModel
    cost: StepCost
    misfit: str | None
    best: Layout
    apart: Layout | None
    together: Layout | None

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
    line = line.with_values(_devices(line, hardware, devices))
    config = line.config()
    per_machine = config.trainer.n_gpus_per_node
    if not hardware.is_cpu and (config.trainer.nnodes > 1 or per_machine > hardware.per_machine):
        hardware = hardware.of_machines(per_machine)
    _check_lengths(config, lengths)
    _check_episodes(config, lengths)
    model = cost_model(config, hardware, lengths)
    _check_placement(model, devices)
    misfit, given = model.misfit(), Layout((), model, model.cost())
    together, apart = best_layout(model), _apart(line, model, hardware, lengths)
    found = [layout for layout in (None if misfit else given, together, apart) if layout is not None]
    if not found:
        raise PlanError(_too_large(line, model, hardware, lengths))
    best = min(found, key=lambda layout: layout.cost.seconds)
    return Plan(line, lengths, model, given.cost, misfit, best, apart, together)


def cost_model(config: PPOTrainerConfig, hardware: Hardware, lengths: Lengths) -> CostModel:
    """Return the model of cost of a configuration."""
    config = with_dtypes(config, "cpu" if hardware.is_cpu else "cuda")
    return CostModel(config, shapes_of(outline_of(config)), hardware, Workload.of(config, lengths))


def _devices(line: LaunchLine, hardware: Hardware, devices: int | None) -> Changes:
    """Return the keys that ask for a number of devices; machines are as large as the line says.

    Raises:
        PlanError: They would not fill their machines.
    """
    if devices is None:
        return ()
    given = line.value_of(_PER_MACHINE) or ""
    size = int(given) if given.isdecimal() and int(given) > 0 else hardware.per_machine
    inside = devices if hardware.is_cpu else min(devices, size)
    machines, left = divmod(devices, inside)
    if left:
        raise PlanError(
            f"--gpus {devices} fills no number of machines of {inside}: take a multiple of {inside}, or say how many "
            f"GPUs a machine has by {_PER_MACHINE}="
        )
    return ("trainer.nnodes", machines), (_PER_MACHINE, inside)


def _check_placement(model: CostModel, devices: int | None) -> None:
    """Raise a PlanError if no policy learns, or if the pools of the line have another number of devices."""
    placement = model.placement
    if not placement.trains:
        raise PlanError("trainer.role_pools.actor is null, so nothing learns: only steps that train are planned")
    trainer = model.config.trainer
    on_cpus = [] if model.hardware.is_cpu else [role for role in placement.roles if not placement.uses_gpu(role)]
    if on_cpus:
        pool = placement.devices(placement.roles[on_cpus[0]])[0].pool
        raise PlanError(
            f"{', '.join(on_cpus)} would compute on CPUs (trainer.pool_options.{pool}.use_gpu=false), of which a plan "
            "on GPUs knows nothing: leave the option out to plan it on a GPU"
        )
    of_others = {pool for pool, options in trainer.pool_options.items() if options.is_derived}
    pooled = sum(sum(sizes) for pool, sizes in trainer.resource_pools.items() if pool not in of_others)
    if devices is not None and pooled != devices:
        raise PlanError(
            f"--gpus {devices} does not go with trainer.resource_pools, which have {pooled} devices: change the pools, "
            "or leave out --gpus"
        )


def _check_lengths(config: PPOTrainerConfig, lengths: Lengths) -> None:
    """Raise a PlanError if a mean length is above the longest that the line allows."""
    for what, mean, key in (
        ("prompt", lengths.prompt, "max_prompt_length"),
        ("response", lengths.response, "max_response_length"),
    ):
        longest = getattr(config.data, key)
        if mean is not None and mean > longest:
            raise PlanError(
                f"--{what}-tokens {mean:g} is above data.{key}={longest}: take a smaller mean, or raise the key"
            )


def _check_episodes(config: PPOTrainerConfig, lengths: Lengths) -> None:
    """Raise a PlanError if what is said of episodes does not go with the line, or one number with another."""
    settings, longest = config.environment, config.data.max_response_length
    given = {option: getattr(lengths, name) for name, option in OF_EPISODES.items()}
    said = [f"{option} {value:g}" for option, value in given.items() if value is not None]
    if not settings.is_used:
        if said:
            raise PlanError(
                f"{said[0]} is of episodes, and environment.path is null: set it, or leave out {said[0].split()[0]}"
            )
        return
    for option, mean, key, most in (
        ("--turns", lengths.turns, "max_turns", settings.max_turns),
        ("--turn-tokens", lengths.turn_tokens, "max_turn_tokens", settings.max_turn_tokens),
    ):
        if mean is not None and most is not None and mean > most:
            raise PlanError(
                f"{option} {mean:g} is above environment.{key}={most}: take a smaller mean, or raise the key"
            )
    turns, environment = turns_of(config, lengths), lengths.environment_tokens or 0.0
    if None not in (lengths.response, lengths.turn_tokens, lengths.environment_tokens):
        raise PlanError(
            "--response-tokens follows from --turns, --turn-tokens and --environment-tokens: leave out one of them"
        )
    if lengths.shared == 1.0:
        raise PlanError("--shared-tokens 1 leaves nothing to compute: take a smaller share")
    room = min(response_of(config, lengths), longest)
    if turns * (lengths.turn_tokens or 0.0) + environment > room or environment == room:
        tokens = [one for one in said if "-tokens" in one and not one.startswith("--shared")]
        raise PlanError(
            f"episodes of {turns:g} turns with {' and '.join(tokens)} do not go into responses of {room:g} tokens: "
            f"take smaller means, or raise --response-tokens or data.max_response_length={longest}"
        )


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
        wider = line.with_values(_devices(line, hardware, more))
        if best_layout(replace(model, config=cost_model(wider.config(), hardware, lengths).config)) is not None:
            return f"{why}. With --gpus {more} there is a layout that fits"
    return f"{why}. Not even {_MOST_DEVICES} do"
