"""Hardware by its name."""

import pytest

from hrl.models.flops import PEAK_FLOPS
from hrl.plan.hardware import GPUS, HardwareError, cpu, hardware_named


def test_peaks_are_those_of_the_table_of_cards():
    of_torch = {name: name.upper().removesuffix("-40GB").replace("RTX", "RTX ") for name in GPUS}
    assert {name: card.flops for name, card in GPUS.items()} == {name: PEAK_FLOPS[of_torch[name]] for name in GPUS}


def test_an_unknown_card_is_refused_with_the_nearest():
    with pytest.raises(HardwareError, match="--gpu h10 is not known. Did you mean h100"):
        hardware_named("h10")


def test_a_card_is_known_in_capitals_too():
    assert hardware_named("H100") == GPUS["h100"]


def test_devices_bring_their_part_of_the_network():
    four = GPUS["h100"].of_machines(4)
    assert (four.per_machine, four.network_rate, four.link_rate) == (4, 200e9, 450e9)


def test_processes_share_a_machine_without_a_gpu():
    two = cpu(100.0, 10.0, 64.0).shared_by(2)
    assert (two.flops, two.memory_rate, two.memory) == (50.0, 5.0, 64.0)


def test_this_machine_is_measured():
    here = hardware_named("cpu")
    assert here.is_cpu
    assert here.flops > 1e9
    assert here.memory_rate > 1e8
