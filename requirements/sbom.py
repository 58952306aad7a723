"""Write a CycloneDX bill of materials of everything that hrl's lock files pin, to standard output.

It needs no network: names and versions are the locks', licences those that the installed packages name. A package that
is not installed here, such as the CUDA builds on a machine without a GPU, has no licence in it.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

LOCKS = Path(__file__).parent
#: Packages whose metadata name no licence → what their licence file says.
SAID_ELSEWHERE = {"oss-harmony": "Apache-2.0", "smolagents": "Apache-2.0", "setuptools": "MIT", "zss": "BSD-3-Clause"}


def pins(folder: Path = LOCKS) -> dict[tuple[str, str], list[str]]:
    """Return name and version of every pin → the lock files that have it."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in sorted(folder.glob("*.lock")):
        for line in file.read_text(encoding="utf-8").splitlines():
            text = line.partition("#")[0].partition(";")[0].strip()
            if text:
                name, equals, version = text.partition("==")
                if not equals:
                    raise ValueError(f"{file}: {line!r} is no pin name==version")
                found.setdefault((normal(name), version.strip()), []).append(file.name)
    return found


def normal(name: str) -> str:
    """Return a package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def installed() -> dict[str, Distribution]:
    """Return the installed packages, those in the folders of trackers and of agents' frameworks among them."""
    places = [*sys.path, *(str(Path(sys.prefix) / folder) for folder in ("trackers", "agents"))]
    return {normal(each.metadata["Name"]): each for each in reversed(list(distributions(path=places)))}


def licence(name: str, package: Distribution | None) -> str | None:
    """Return the licence that a package's metadata name, None if it is not installed."""
    if package is None:
        return None
    told = package.metadata
    classifiers = [
        each.rpartition(" :: ")[2] for each in told.get_all("Classifier") or [] if each.startswith("License ::")
    ]
    text = (told.get("License") or "").strip().splitlines()
    short = text[0][:100] if text else ""
    return told.get("License-Expression") or "; ".join(classifiers) or short or SAID_ELSEWHERE.get(name)


def bill(locked: Mapping[tuple[str, str], list[str]], packages: Mapping[str, Distribution]) -> dict[str, Any]:
    """Return the bill as CycloneDX 1.6; the same locks and packages give the same one."""
    components = []
    for (name, version), files in sorted(locked.items()):
        named = licence(name, packages.get(name))
        component: dict[str, Any] = {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}@{version}",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name}@{version}",
            "properties": [{"name": "hrl:lock", "value": file} for file in files],
        }
        if named is not None:
            component["licenses"] = [{"license": {"name": named}}]
        components.append(component)
    content = json.dumps(components, sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {"component": {"type": "application", "bom-ref": "hrl", "name": "hrl"}},
        "components": components,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(bill(pins(), installed()), indent=1) + "\n")
