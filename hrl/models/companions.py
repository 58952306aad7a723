"""Packages beside torch that transformers imports where they are there, and that must be built for the same torch."""

from __future__ import annotations

from importlib import import_module, metadata

from hrl.errors import HrlError

COMPANIONS = ("torchvision", "torchaudio")
"""hrl needs none of them."""


class CompanionError(HrlError, ImportError):
    """A package beside torch is of another build than torch, and nothing that imports it works."""


def refuse_broken_companions() -> None:
    """Import the companions of another build than torch's, before transformers does so.

    A resolver that finds torch's CPU build takes the others' CUDA builds from the package index.

    Raises:
        CompanionError: One can't be imported.
    """
    torch = _version("torch")
    build = torch.partition("+")[2]
    for name in COMPANIONS if build else ():
        version = _version(name)
        if not version or version.partition("+")[2] == build:
            continue
        try:
            import_module(name)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            raise CompanionError(
                f"{name} {version} is not built for torch {torch}, and transformers can't be imported beside it "
                f"({error}). hrl needs neither torchvision nor torchaudio: pip uninstall {' '.join(COMPANIONS)}"
            ) from error


def _version(package: str) -> str:
    """Return the version of a package, empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
