"""Imported by the process that `tests.processes.warm` forks, first of all."""

import importlib

from hrl.processes.imports import quick_imports

MODULES = ("torch", "torch.distributed.fsdp", "tensordict", "transformers.models.llama.modeling_llama")

# Its forks look for garbage in what is theirs alone.
with quick_imports():
    for name in MODULES:
        importlib.import_module(name)
