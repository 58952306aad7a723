"""The GPU locks are complete and consistent by the packages' own metadata: a pin has the companions that it needs."""

from __future__ import annotations

import json

import pytest
from packaging.specifiers import SpecifierSet

from tests.contracts.lock import ENVIRONMENTS, LOCKS, REQUIREMENTS, active, canonical, extras_asked_for, pins_of, record

RECORD = json.loads(REQUIREMENTS.read_text())
#: They exist as source only, so that no index tells their requirements; none has any that the lock lacks.
SOURCE_ONLY = {"antlr4-python3-runtime", "cellpylib", "pycosat", "zss"}


def complaints(pins: dict[str, str], recorded: dict[str, list[str]]) -> list[str]:
    """What the pins lack or contradict, in any environment."""
    lines = {name.partition("==")[0]: found for name, found in recorded.items()}
    extras = extras_asked_for(lines)
    found = set()
    for environment in ENVIRONMENTS:
        for name, requirements in lines.items():
            for requirement in active(requirements, extras.get(name, ()), environment):
                pinned = pins.get(canonical(requirement.name))
                if pinned is None:
                    found.add(f"{name} needs {requirement.name}{requirement.specifier}, which is not pinned")
                elif not requirement.specifier.contains(pinned, prereleases=True):
                    found.add(f"{name} needs {requirement.name}{requirement.specifier}, pinned is {pinned}")
    return sorted(found)


@pytest.mark.parametrize("lock", sorted(RECORD))
def test_what_every_pin_needs_is_pinned(lock: str) -> None:
    assert complaints(pins_of(LOCKS / lock), RECORD[lock]) == []


@pytest.mark.parametrize("lock", sorted(RECORD))
def test_the_record_is_of_the_pins(lock: str) -> None:
    pins = {name: version for name, version in pins_of(LOCKS / lock).items() if name not in SOURCE_ONLY}
    assert set(RECORD[lock]) == {f"{name}=={version}" for name, version in pins.items()}


def test_every_gpu_lock_is_recorded() -> None:
    assert {path.name for path in LOCKS.glob("gpu*.lock")} == set(RECORD)


@pytest.mark.parametrize("lock", sorted(RECORD))
def test_compiled_kernels_are_those_of_their_library(lock: str) -> None:
    pins = pins_of(LOCKS / lock)
    for kernels in ("flashinfer-cubin", "flashinfer-jit-cache"):
        assert pins.get(kernels, pins["flashinfer-python"]) == pins["flashinfer-python"]


def test_the_lock_for_a_machine_without_a_network_brings_its_kernels() -> None:
    pins = pins_of(LOCKS / "gpu-torch2.11.lock")
    assert pins["flashinfer-cubin"] == pins["flashinfer-python"]
    assert pins["torch"] == "2.11.0"
    assert pins["vllm"] in SpecifierSet(">=0.24,<0.27")  # those that are built for this torch


def test_a_missing_companion_and_a_wrong_one_are_found() -> None:
    def package(name: str, version: str, *requires: str) -> dict:
        return {"metadata": {"name": name, "version": version, "requires_dist": list(requires)}}

    report = {
        "install": [
            package("Engine", "1.0", "kernels==2.0", "Extra_ed[fast]>=1", "old; python_version < '3.10'"),
            package("extra-ed", "1.5", "speed>=3; extra == 'fast'", "docs; extra == 'docs'"),
            package("kernels", "2.1"),
        ]
    }
    recorded = record(report)
    assert recorded["engine==1.0"] == ["Extra_ed[fast]>=1", "kernels==2.0"]
    assert complaints({"engine": "1.0", "extra-ed": "1.5", "kernels": "2.1"}, recorded) == [
        "engine needs kernels==2.0, pinned is 2.1",
        "extra-ed needs speed>=3, which is not pinned",
    ]
    assert complaints({"engine": "1.0", "extra-ed": "1.5", "kernels": "2.0", "speed": "3"}, recorded) == []
