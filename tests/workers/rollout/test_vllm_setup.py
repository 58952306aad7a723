"""How a vLLM engine is set up and ended, as far as that can be seen without starting one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hrl.models.tokenizer import TokenIds
from hrl.processes.child_environment import changed_environment
from hrl.workers.rollout.base import RolloutError
from hrl.workers.rollout.vllm_engine import (
    END,
    FIRST,
    ProcessLife,
    VllmEngine,
    _engine_processes,
    environment_of,
    request_errors,
    require_supported,
)
from tests.workers.rollout.settings import engine_setup

CORES = len(os.sched_getaffinity(0))


def environment(device: str, num_threads: int | None, ranks: int = 1) -> dict[str, str | None]:
    tokens = TokenIds(0, (1,), 128)
    setup = engine_setup(
        "vllm",
        "folder",
        tokens,
        32,
        device=torch.device(device),
        num_threads=num_threads,
        tensor_model_parallel_size=ranks,
    )
    return environment_of(setup)


@pytest.mark.parametrize(
    ("device", "asked", "expected"),
    [("cpu", None, str(CORES)), ("cpu", 3, "3"), ("cuda", None, None), ("cuda", 3, "3")],
)
def test_an_engine_on_a_gpu_has_its_own_idea_of_threads_unless_asked(device, asked, expected):
    assert environment(device, asked)["OMP_NUM_THREADS"] == expected


def test_threads_are_shared_by_the_ranks_of_an_engine():
    assert environment("cuda", 8, ranks=4)["OMP_NUM_THREADS"] == "2"
    assert environment("cuda", 1, ranks=4)["OMP_NUM_THREADS"] == "1"


def test_the_number_of_threads_that_ray_sets_for_an_actor_does_not_reach_an_engine_on_a_gpu(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    with changed_environment(environment("cuda", None)):
        assert "OMP_NUM_THREADS" not in os.environ

    assert os.environ["OMP_NUM_THREADS"] == "1"


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    made = ModuleType(name)
    made.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, made)


@pytest.mark.parametrize("version", ["0.24.0", "0.27.1", "0.32.0", "0.32.0+cu130", "0.32.1.dev3+g12ab", "0.24.0rc2"])
def test_versions_of_the_span_are_taken(version: str) -> None:
    require_supported(version)


@pytest.mark.parametrize("version", ["0.23.9", "0.33.0", "1.0.0", "0.8.5.post1", "dev", ""])
def test_other_versions_are_refused_with_the_span(version: str) -> None:
    with pytest.raises(RolloutError, match=r"from 0\.24 up to, not including, 0\.33.*pip install 'vllm>=0\.24,<0\.33'"):
        require_supported(version)


def engine(device: str = "cpu") -> VllmEngine:
    return VllmEngine(engine_setup("vllm", "folder", TokenIds(0, (1,), 128), 32, device=torch.device(device)))


@pytest.mark.parametrize(("line", "version"), [("__version__ = version = '0.33.1'", "0.33.1"), (None, "dev")])
def test_another_version_is_refused_before_any_of_it_is_imported(monkeypatch, tmp_path, line, version):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('a module that has moved')")
    if line is not None:
        (tmp_path / "vllm" / "_version.py").write_text(line)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    refused = engine()

    with pytest.raises(RolloutError, match=rf"^vLLM {re.escape(version)} is installed"):
        asyncio.run(refused.prepare())

    assert not _engine_processes()


def test_a_vllm_that_cannot_be_imported_is_named_with_its_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)

    with pytest.raises(RolloutError, match="^rollout.name=vllm needs vLLM, which can't be imported .*vllm"):
        asyncio.run(engine().prepare())


def test_the_span_is_that_of_pyproject() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    first, end = (".".join(map(str, bound)) for bound in (FIRST, END))
    assert project["optional-dependencies"]["gpu"] == [f"vllm>={first},<{end}"]


def test_errors_of_old_and_new_versions_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    ancestor, generate, dead = (type(name, (Exception,), {}) for name in ("VLLMError", "Generate", "Dead"))
    module(monkeypatch, "vllm.v1.engine.exceptions", EngineGenerateError=generate, EngineDeadError=dead)
    module(monkeypatch, "vllm.exceptions", VLLMError=ancestor)
    assert request_errors() == (ancestor, RuntimeError, ValueError)
    module(monkeypatch, "vllm.exceptions")
    assert request_errors() == (generate, dead, RuntimeError, ValueError)


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


def test_a_process_that_does_not_leave_is_ended():
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        process.stdout.readline()  # it ignores SIGTERM by now
        life = ProcessLife(process.pid)

        begun = time.monotonic()
        life.end(grace_s=0.2)

        assert 0.2 <= time.monotonic() - begun < 30
        assert process.wait(30) == -signal.SIGKILL
