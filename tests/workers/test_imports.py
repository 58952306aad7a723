"""What a bare machine can import: the maths, the kernels, the training engine and the weight sync."""

from __future__ import annotations

import subprocess
import sys

#: On the first machine with a GPU there may be torch, transformers and nothing else.
ABSENT = ("hydra", "omegaconf", "ray", "tensordict", "vllm")
MODULES = (
    "hrl.algos",
    "hrl.batching",
    "hrl.workers.engine.engine",
    "hrl.models.packed_model",
    "hrl.models.ops.attention",
    "hrl.models.ops.log_prob",
    "hrl.models.ops.rms_norm",
    "hrl.workers.runtime",
    "hrl.workers.weight_sync.broadcast",
    "hrl.workers.weight_sync.cuda_ipc",
    "hrl.workers.weight_sync.receiver",
    "tests.first_light.handles",
    "tests.first_light.kernels",
    "tests.first_light.ladder",
    "tests.first_light.runner",
    "tests.first_light.step",
)
SCRIPT = """
import importlib, sys
absent, modules = (words.split(",") for words in sys.argv[1:])
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"{name} is not installed on this machine", name=name)
sys.meta_path.insert(0, Absent())
for module in modules:
    importlib.import_module(module)
"""


def test_they_need_none_of_the_packages_around_them() -> None:
    command = [sys.executable, "-c", SCRIPT, ",".join(ABSENT), ",".join(MODULES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_a_rank_begins_before_anything_large_is_imported() -> None:
    """Its preludes start processes that have as much to import as it has itself."""
    modules = "hrl.single_controller.rank_process, hrl.workers.rollout.early_process"
    script = (
        f"import {modules}, sys; print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
