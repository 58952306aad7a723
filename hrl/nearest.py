"""The existing path that was probably meant by one that does not exist."""

from __future__ import annotations

import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

_SIMILAR_ENOUGH = 0.6
_NAMES_SHOWN = 6


def nearest_path(missing: Path) -> Path | None:
    """Return the path whose names are spelt most like those of a missing one, or the same name one folder further down.

    Args:
        missing: A path that does not exist.

    Returns:
        None if nothing there is similar.
    """
    wanted = Path(os.path.abspath(missing))
    found = Path(wanted.anchor)
    for name in wanted.parts[1:]:
        if not (found / name).exists():
            close = _closest(name, _names_in(found))
            if close is None:
                break
            name = close
        found = found / name
    else:
        return found
    deeper = [wanted.parent / name / wanted.name for name in _names_in(wanted.parent)]
    return next((path for path in deeper if path.exists()), None)


def way_to(missing: Path, fits: Callable[[Path], bool]) -> str:
    """Return a sentence that leads from a missing path to what is there.

    Args:
        missing: A path that does not exist.
        fits: Whether another path could be meant, by what it is.
    """
    close = nearest_path(missing)
    if close is not None and fits(close):
        return f"Did you mean {_as_written(close, missing)}?"
    parent = Path(os.path.abspath(missing)).parent
    if not parent.is_dir():
        return f"The folder {parent} does not exist either."
    names = [name for name in _names_in(parent) if fits(parent / name)]
    return f"{parent} has {listing(names)}." if names else f"Nothing of the kind is in {parent}."


def listing(names: list[str]) -> str:
    """Some names in one line: the first few, and how many more there are."""
    if not names:
        return "nothing"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _as_written(path: Path, pattern: Path) -> str:
    """Relative where the pattern was, absolute otherwise."""
    return str(path) if pattern.is_absolute() else os.path.relpath(path)


def _closest(name: str, names: list[str]) -> str | None:
    by_lower = {other.lower(): other for other in reversed(names)}
    close = get_close_matches(name.lower(), by_lower, n=1, cutoff=_SIMILAR_ENOUGH)
    return by_lower[close[0]] if close else None


def _names_in(folder: Path) -> list[str]:
    """Return what a folder holds, sorted, hidden files left out; nothing where it can't be read."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        return []
