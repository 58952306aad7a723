"""What a process sees in a folder: driver and ranks compare it, to know that they write to one disk."""

from __future__ import annotations

from pathlib import Path


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder, by path relative to it; empty where there is no such folder."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
