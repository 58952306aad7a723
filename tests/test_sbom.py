"""The bill of materials has every pin of every lock file, and the licence of whatever is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

LOCKS = Path(__file__).parents[1] / "requirements"


@pytest.fixture(scope="module")
def sbom() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sbom", LOCKS / "sbom.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_pin_is_in_it_once_with_its_locks_and_every_installed_one_names_its_licence(sbom: ModuleType) -> None:
    packages = sbom.installed()
    bill = sbom.bill(sbom.pins(), packages)
    assert json.loads(json.dumps(bill)) == bill
    listed = {
        component["purl"]: [each["value"] for each in component["properties"]] for component in bill["components"]
    }
    assert len(listed) == len(bill["components"])
    pinned = 0
    for file in LOCKS.glob("*.lock"):
        for line in file.read_text().splitlines():
            if line and not line.startswith("#"):
                name, _, version = line.partition("==")
                assert file.name in listed[f"pkg:pypi/{sbom.normal(name)}@{version.strip()}"]
                pinned += 1
    assert pinned == sum(map(len, listed.values())) > 500
    unlicensed = [each["name"] for each in bill["components"] if each["name"] in packages and "licenses" not in each]
    assert unlicensed == []


def test_the_same_locks_make_the_same_bill_and_another_pin_another_one(sbom: ModuleType) -> None:
    one, again = (sbom.bill({("a", "1"): ["x.lock"]}, {}) for _ in range(2))
    assert one == again
    assert sbom.bill({("a", "2"): ["x.lock"]}, {})["serialNumber"] != one["serialNumber"]


def test_a_line_that_is_no_pin_is_refused(sbom: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "x.lock").write_text("a>=1\n")
    with pytest.raises(ValueError, match=r"x.lock: 'a>=1' is no pin"):
        sbom.pins(tmp_path)
