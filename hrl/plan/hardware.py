"""What a device can do: published peaks of GPUs, and what this machine's cores measure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hrl.errors import RefusedError
from hrl.models.flops import PEAK_FLOPS, peak_flops
from hrl.nearest import did_you_mean

CPU = "cpu"
GIB = 1 << 30


class HardwareError(RefusedError, ValueError):
    """There is no hardware of this name in the table."""


@dataclass(frozen=True)
class Hardware:
    """A device and what connects it to others. Rates count one direction.

    Attributes:
        name: As in `--gpu`.
        flops: Peak of dense bfloat16 products, FLOP/s.
        memory: Bytes of a device.
        memory_rate: Peak of its memory, bytes/s.
        link_rate: To the devices of the same machine, bytes/s of one device.
        network_rate: To other machines, bytes/s of all devices of a machine together.
        host_rate: To the machine's memory, bytes/s of one device.
        per_machine: Devices of a machine.
        product_share: Share of `flops` that forward and backward reach, attention and what lies between products
            included.
    """

    name: str
    flops: float
    memory: float
    memory_rate: float
    link_rate: float
    network_rate: float
    host_rate: float
    per_machine: int
    product_share: float

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are processes that share the cores and the memory of a machine."""
        return self.name == CPU

    def of_machines(self, devices: int) -> Hardware:
        """Return the same devices, another number of them in a machine; each brings its part of the network."""
        return replace(self, per_machine=devices, network_rate=self.network_rate * devices / self.per_machine)

    def shared_by(self, processes: int) -> Hardware:
        """Return what each of several processes has of a machine's cores and of the rate of its memory."""
        return replace(self, flops=self.flops / processes, memory_rate=self.memory_rate / processes)


# Memory is what torch says of the cards; 79.1 GiB of an H100 with 80 GB is in vllm-project/vllm #27508.
# Peaks are those of the vendor's data sheets for the SXM form: memory and NVLink (half of the sum of both directions),
# PCIe 4 (A100, A800) or 5, and the network of the vendor's own machine with eight of them (DGX: 8 × 200 Gbit/s for
# A100, else 8 × 400). `product_share` of A100 and H100 is the hardware FLOP utilisation of FSDP training at 2,048 to
# 8,192 tokens in llm-foundry's benchmarks (scripts/train/benchmarking/README.md: A100 65 to 74 %, H100 47 to 59 %).
# A800, H800 and H200 have the chips of A100 and H100; those of B200, H20 and of all below are guesses. Cards without
# NVLink exchange over PCIe, in machines of at most eight with one network card of 100 Gbit/s. Memory of an RTX 4090 is
# what torch says in reports of users (23.6 GiB), and of an L40 (44.4); cards that correct errors have less of 24 GB.
GPUS: Mapping[str, Hardware] = {
    "a100": Hardware("a100", PEAK_FLOPS["A100"], 79.1 * GIB, 2.039e12, 300e9, 200e9, 25e9, 8, 0.70),
    "a800": Hardware("a800", PEAK_FLOPS["A800"], 79.1 * GIB, 2.039e12, 200e9, 200e9, 25e9, 8, 0.70),
    "h100": Hardware("h100", PEAK_FLOPS["H100"], 79.1 * GIB, 3.35e12, 450e9, 400e9, 50e9, 8, 0.55),
    "h800": Hardware("h800", PEAK_FLOPS["H800"], 79.1 * GIB, 3.35e12, 200e9, 400e9, 50e9, 8, 0.55),
    "h20": Hardware("h20", PEAK_FLOPS["H20"], 95.0 * GIB, 4.0e12, 450e9, 400e9, 50e9, 8, 0.75),
    "h200": Hardware("h200", PEAK_FLOPS["H200"], 139.5 * GIB, 4.8e12, 450e9, 400e9, 50e9, 8, 0.55),
    "b200": Hardware("b200", PEAK_FLOPS["B200"], 178.0 * GIB, 8.0e12, 900e9, 400e9, 50e9, 8, 0.50),
    "a100-40gb": Hardware("a100-40gb", PEAK_FLOPS["A100"], 39.4 * GIB, 1.555e12, 300e9, 200e9, 25e9, 8, 0.70),
    "l40s": Hardware("l40s", PEAK_FLOPS["L40S"], 44.4 * GIB, 0.864e12, 25e9, 12.5e9, 25e9, 8, 0.60),
    "l4": Hardware("l4", PEAK_FLOPS["L4"], 22.0 * GIB, 0.300e12, 25e9, 12.5e9, 25e9, 8, 0.60),
    "a10": Hardware("a10", PEAK_FLOPS["A10"], 22.0 * GIB, 0.600e12, 25e9, 12.5e9, 25e9, 8, 0.60),
    "rtx3090": Hardware("rtx3090", PEAK_FLOPS["RTX 3090"], 23.6 * GIB, 0.936e12, 25e9, 12.5e9, 25e9, 8, 0.60),
    "rtx4090": Hardware("rtx4090", PEAK_FLOPS["RTX 4090"], 23.6 * GIB, 1.008e12, 25e9, 12.5e9, 25e9, 8, 0.60),
    "rtx5090": Hardware("rtx5090", PEAK_FLOPS["RTX 5090"], 31.4 * GIB, 1.792e12, 50e9, 12.5e9, 50e9, 8, 0.60),
}
#: The same of a CPU: the update of 104 of 16 × 8 samples took 8.43 s at 445 GFLOP/s (tests/plan/recorded.py).
CPU_PRODUCT_SHARE = 0.65
_COPIED_BYTES = 1 << 28


def hardware_named(name: str) -> Hardware:
    """Return the hardware of a name in `GPUS`, or `cpu` for this machine, which is measured in about a second.

    Raises:
        HardwareError: There is none.
    """
    wanted, name = name, name.lower()
    if name == CPU:
        return this_machine()
    if name not in GPUS:
        known = (*GPUS, CPU)
        hint = did_you_mean(name, known, f"There are {', '.join(known)}.")
        raise HardwareError(f"--gpu {wanted} is not known. {hint}")
    return GPUS[name]


def this_machine() -> Hardware:
    """Return this machine's cores, with the rate of a product and that of a copy as measured now."""
    from hrl.cluster.machine import available_cores  # imports ray
    from hrl.preflight.memory_look import memory_here

    threads = torch.get_num_threads()
    torch.set_num_threads(available_cores())
    try:
        flops, rate = peak_flops(torch.device("cpu")), _copy_rate()
    finally:
        torch.set_num_threads(threads)
    assert flops is not None  # a CPU's is measured
    return cpu(flops, rate, memory_here())


def cpu(flops: float, memory_rate: float, memory: float) -> Hardware:
    """Return a machine without a GPU; its processes exchange through its memory, and it has no network."""
    return Hardware(
        CPU, flops, memory, memory_rate, memory_rate / 2, memory_rate / 2, memory_rate, 1, CPU_PRODUCT_SHARE
    )


def _copy_rate() -> float:
    """Return the bytes read and written in a second by the fastest of a few copies that exceed every cache."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source).copy_(source)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * _COPIED_BYTES / best
