"""A picture of a placement in text: which role's which rank is on which device."""

from collections.abc import Iterator, Sequence

from hrl.config.arithmetic import Fact
from hrl.config.outline import RunConfiguration
from hrl.config.placement import Device, resolve_placement
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.trainer import PoolOptions

_MOST_DEVICES = 16
"""So many devices are shown one by one; of more, neighbours that hold the same share a line."""


def placement_picture(config: RunConfiguration) -> list[Fact]:
    """Show which role's which rank is on which device: a line for each, `+` within a process, `|` between processes.

    Machines are those of the pool that reserves the devices. Which machine of the cluster that is, Ray decides.
    """
    if not isinstance(config, PPOTrainerConfig):
        return []
    placement = resolve_placement(config)
    processes: dict[Device, list[tuple[list[str], int]]] = {}
    order = list(placement.roles)
    for pool in sorted(placement.pools, key=lambda pool: order.index(placement.roles_on(pool)[0])):
        for rank, device in enumerate(placement.devices(pool)):
            processes.setdefault(device, []).append((placement.roles_on(pool), rank))
    lines = []
    for pool, sizes in placement.reservations.items():
        first = 0
        for machine, size in enumerate(sizes, 1):
            devices = [Device(pool, number) for number in range(first, first + size)]
            title = f"{pool}, machine {machine}" if len(sizes) > 1 else pool
            title += _node_in_words(placement.options_of(pool), machine)
            for start, end in _runs([processes.get(each, []) for each in devices], placement.num_devices):
                named = f"device {start}" if end == start + 1 else f"devices {start} to {end - 1}"
                held = [processes.get(each, []) for each in devices[start:end]]
                lines.append(Fact(f"{title}: {named}", _held_in_words(held)))
            first += size
    return lines


def _node_in_words(options: PoolOptions, machine: int) -> str:
    node = options.nodes[0 if len(options.nodes) == 1 else machine - 1] if options.nodes else None
    said = [f"on {node}"] if node else []
    said += [options.accelerator_type] if options.accelerator_type else []
    said += [] if options.use_gpu else ["CPUs alone"]
    return f" ({', '.join(said)})" if said else ""


def _runs(held: Sequence[Sequence[tuple[list[str], int]]], num_devices: int) -> Iterator[tuple[int, int]]:
    """Yield beginning and end of the neighbours that share a line."""
    start = 0
    for place in range(1, len(held) + 1):
        is_like = place < len(held) and [roles for roles, _ in held[place]] == [roles for roles, _ in held[start]]
        if not is_like or num_devices <= _MOST_DEVICES:
            yield start, place
            start = place


def _held_in_words(held: Sequence[Sequence[tuple[list[str], int]]]) -> str:
    if not held[0]:
        return "free"

    def ranks(place: int) -> str:
        first, last = held[0][place][1], held[-1][place][1]
        return f"{first}" if first == last else f"{first}-{last}"

    return " | ".join(
        " + ".join(f"{role} {ranks(place)}" for role in roles) for place, (roles, _) in enumerate(held[0])
    )
