"""Which name, path or number was probably meant by one that can't be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

_NAMES_SHOWN = 6


def edit_distance(one: str, other: str) -> int:
    """Return the number of typing errors that turn one name into the other.

    A typing error is a letter left out, put in, or swapped with its neighbour; a wrong letter counts as two.

    This is optimal string alignment (a restricted Damerau-Levenshtein distance): `grpo` is nearer to `gpro` than to
    `gspo`.
    """
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, counterpart in enumerate(other, 1):
            cost = min(rows[-1][j] + 1, row[j - 1] + 1, rows[-1][j - 1] + 2 * (letter != counterpart))
            if i > 1 and j > 1 and one[i - 2 : i] == other[j - 2 : j][::-1]:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]


def nearest(name: str, choices: Iterable[str]) -> list[str]:
    """Return the choices that `name` probably misspells: the nearest ones, or none if none is near enough.

    A name of up to five letters may have one typing error, one of up to eleven two, a longer one three. If no choice is
    that near, choices that begin with the name count, and those that have all its words (three or more) and one more.
    """
    wanted = _plain(name)
    budget = 1 + (len(wanted) > 5) + (len(wanted) > 11)
    found: dict[str, int] = {}
    for choice in choices:
        if abs(len(choice) - len(wanted)) <= budget:
            distance = edit_distance(wanted, _plain(choice))
            if distance <= budget:
                found[choice] = distance
    if found:
        return sorted(choice for choice, distance in found.items() if distance == min(found.values()))
    return sorted(choice for choice in choices if _lacks_something(wanted, _plain(choice)))


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _lacks_something(one: str, other: str) -> bool:
    """Return whether `other` begins with `one` or its singular, or has all its words (three or more) and one more."""
    if len(one) > 3 and other.startswith(one.removesuffix("s")):
        return True
    words, others = set(one.split("_")), set(other.split("_"))
    return len(words) >= 3 and words < others and len(others - words) == 1


def did_you_mean(name: str, choices: Iterable[str], otherwise: str = "") -> str:
    """Return the hint for a misspelt name: the choices nearest to it, or `otherwise` if none is near."""
    close = nearest(name, choices)
    return f"Did you mean {' or '.join(close)}?" if close else otherwise


def nearest_path(missing: Path) -> Path | None:
    """Return the existing path whose spelling is nearest to a missing one, or the same name one folder further down.

    Args:
        missing: A path that does not exist.

    Returns:
        None if nothing there is similar.
    """
    wanted = Path(os.path.abspath(missing))
    found = Path(wanted.anchor)
    for name in wanted.parts[1:]:
        if not (found / name).exists():
            close = next(iter(nearest(name, _names_in(found))), None)
            if close is None:
                break
            name = close
        found = found / name
    else:
        return found
    deeper = [wanted.parent / name / wanted.name for name in _names_in(wanted.parent)]
    return next((path for path in deeper if path.exists()), None)


def meant_by(missing: Path, fits: Callable[[Path], bool]) -> str | None:
    """Return the path of the wanted kind that was probably meant by a missing one, as it would be written.

    Args:
        missing: A path that does not exist.
        fits: Returns whether a path is of the wanted kind.
    """
    close = nearest_path(missing)
    return _as_written(close, missing) if close is not None and fits(close) else None


def way_to(missing: Path, fits: Callable[[Path], bool]) -> str:
    """Return the hint for a missing path: the path that was probably meant, or what is there instead.

    Args:
        missing: A path that does not exist.
        fits: Returns whether a path is of the wanted kind.
    """
    close = meant_by(missing, fits)
    if close is not None:
        return f"Did you mean {close}?"
    parent = Path(os.path.abspath(missing)).parent
    if not parent.is_dir():
        return f"The folder {parent} does not exist either."
    names = [name for name in _names_in(parent) if fits(parent / name)]
    return f"{parent} has {listing(names)}." if names else f"Nothing of the kind is in {parent}."


def listing(names: list[str]) -> str:
    """Join the first few names, and say how many more there are."""
    if not names:
        return "nothing"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _as_written(path: Path, pattern: Path) -> str:
    """Return the path relative to the working folder if `pattern` is relative, else as it is."""
    return str(path) if pattern.is_absolute() else os.path.relpath(path)


def _names_in(folder: Path) -> list[str]:
    """Return the sorted names in a folder without hidden files; nothing if it can't be read."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        return []


def nearest_divisors(number: int, wanted: int) -> str:
    """Return the divisors of a number below and above one that is none, joined by "and"."""
    divisors = [candidate for candidate in range(1, number + 1) if number % candidate == 0]
    below = [candidate for candidate in divisors if candidate < wanted][-1:]
    above = [candidate for candidate in divisors if candidate > wanted][:1]
    return " and ".join(map(str, below + above))
