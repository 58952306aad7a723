"""The peers: their released packages, in a folder of their own that only benchmarks import from.

They are installed without their dependencies, so that hrl's stay as they are; `_SMALL` is what their modules import
besides.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

FOLDER = Path(__file__).parent / ".peers"
VERL, TRL, OPENRLHF = "verl 0.9.1", "TRL 1.16.0", "OpenRLHF 0.11.2"
_PACKAGES = ("verl==0.9.1", "trl==1.16.0", "openrlhf==0.11.2")
_SMALL = ("tensordict==0.10.0", "TransferQueue==0.1.11", "codetiming==1.4.0", "orjson==3.13.0")

#: What verl's modules import, and what of them is measured here doesn't use.
VERL_NEEDS = ("peft", "peft.utils", "peft.utils.save_and_load", "torchdata", "torchdata.stateful_dataloader")
#: The same of OpenRLHF's.
OPENRLHF_NEEDS = (
    "pylatexenc",
    *("peft", "peft.tuners", "peft.tuners.lora"),
    *("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed"),
    *("torchdata", "torchdata.stateful_dataloader"),
    *("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", "deepspeed.runtime.zero.partition_parameters"),
)


def install() -> None:
    """Install the peers where they are missing.

    Raises:
        CalledProcessError: A package could not be had; pip has said why.
    """
    stamp, wanted = FOLDER / "installed.txt", "\n".join((*_PACKAGES, *_SMALL))
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable, "--no-deps"]
    subprocess.run([*command, "--target", str(FOLDER), *_PACKAGES, *_SMALL], check=True)
    stamp.write_text(wanted)


def importable() -> None:
    """Let this process import the peers, behind everything that hrl brings."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


@contextmanager
def stand_ins(*names: str) -> Iterator[None]:
    """Let peers be imported whose modules import packages that are not there and that what is called doesn't use.

    Args:
        names: Of these packages, and of their modules that are imported. Those that are there stay what they are.
    """
    # What looks whether these are installed must look before they are stood in for.
    import transformers.integrations.deepspeed
    import transformers.utils  # noqa: F401

    missing = {
        name: MagicMock(__spec__=ModuleSpec(name, None), __path__=[]) for name in names if name not in sys.modules
    }
    sys.modules.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def without_its_package(name: str) -> ModuleType:
    """Return a peer's module whose package can't be imported here, and isn't needed: an empty one stands in for it.

    verl's packages of engines insist on builds for CUDA.
    """
    package = name.rpartition(".")[0]
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(FOLDER.joinpath(*package.split(".")))]
    return importlib.import_module(name)
