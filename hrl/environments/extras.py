"""How to install what an environment needs: into the Python that runs, in the versions that hrl was made for."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from importlib import metadata


def install_line(extra: str) -> str:
    """Return the command that installs the packages of an extra of hrl, which is on no index itself.

    Args:
        extra: Its name in `pyproject.toml`.
    """
    try:
        required = metadata.requires("hrl") or []
    except metadata.PackageNotFoundError:  # a source tree on the path
        required = []
    pins = [
        one.partition(";")[0].strip()
        for one in required
        if re.search(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""", one)
    ]
    program = shlex.quote(sys.executable)
    by = f"{program} -m pip install" if importlib.util.find_spec("pip") else f"uv pip install --python {program}"
    packages = pins or [f"hrl[{extra}]"]
    return " ".join([by, *(f"'{package}'" for package in packages)])
