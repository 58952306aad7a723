"""A CUDA build of torchvision beside a CPU build of torch is told, where transformers ends in a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hrl.models import companions
from hrl.models.companions import CompanionError, refuse_broken_companions

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Package → version, of packages that can't be imported."""
    versions = {"torch": "2.13.0+cpu"}
    monkeypatch.setattr(companions, "_version", lambda name: versions.get(name, ""))
    for name in companions.COMPANIONS:
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    return versions


@pytest.mark.parametrize("name", companions.COMPANIONS)
def test_another_build_that_breaks_is_told_with_the_way_out(installed: dict[str, str], name: str) -> None:
    installed[name] = "0.28.0+cu130"
    with pytest.raises(CompanionError, match=f"{name} 0.28.0.cu130 is not built for torch 2.13.0.cpu.*pip uninstall"):
        refuse_broken_companions()


@pytest.mark.parametrize(
    "versions",
    [
        {},
        {"torchvision": "0.28.0+cpu"},  # of the same build: whatever is wrong with it is another matter
        {"torch": "2.13.0", "torchvision": "0.28.0"},
    ],
)
def test_companions_that_are_missing_or_fit_are_not_imported(
    installed: dict[str, str], versions: dict[str, str]
) -> None:
    installed |= versions
    refuse_broken_companions()


def test_check_says_it_without_a_traceback(tmp_path: Path) -> None:
    if "+" not in companions._version("torch"):
        pytest.skip("this torch does not say its build")
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "torchvision-0.28.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.28.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.28.0\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    for command in (["hrl.cli", "check"], ["hrl.trainer.main_ppo"]):
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 1
        assert "torchvision 0.28.0 is not built for torch" in done.stderr and "Traceback" not in done.stderr
