"""Mistakes put into the code by hand: each loss's normaliser, sign, mask and clip, and what else decides a number.

They stand in ``mutants/*.txt``, one file for each file of the package::

    file: hrl/algos/kl.py
    tests: tests/algos/test_kl.py tests/algos/test_golden.py

    @ what is wrong then
    - the text that stands there, exactly once
    + the text that the mistake makes of it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "mutants"


class StaleMutantError(ValueError):
    """The text that a mutant replaces is no longer there, or there more than once."""


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        file: The file it is made in.
        tests: The test files that must notice, or single tests as pytest names them.
        breaks: What is wrong then.
        old: What stands there.
        new: What the mistake makes of it.
    """

    file: str
    tests: tuple[str, ...]
    breaks: str
    old: str
    new: str

    def applied_to(self, root: Path) -> str:
        """The file's text with the mistake.

        Raises:
            StaleMutantError: The old text does not occur exactly once.
        """
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise StaleMutantError(f"{self.file}, {self.breaks!r}: {self.old!r} occurs {text.count(self.old)} times")
        return text.replace(self.old, self.new)


def read(path: Path) -> Iterator[Mutant]:
    """The mutants of one file.

    Raises:
        ValueError: A block is not of the form above.
    """
    head, *blocks = path.read_text().split("\n@ ")
    keys = dict(line.split(": ", 1) for line in head.strip().splitlines())
    for block in blocks:
        breaks, *lines = block.rstrip("\n").splitlines()
        old, new = ("\n".join(line[2:] for line in lines if line[:1] == sign) for sign in "-+")
        if not old or any(line[:1] not in ("-", "+") for line in lines) or old == new:
            raise ValueError(f"{path.name}: {breaks!r} is no mutant")
        yield Mutant(keys["file"], tuple(keys["tests"].split()), breaks, old, new)


def all_mutants() -> list[Mutant]:
    """Every mutant of every file."""
    return [mutant for path in sorted(FOLDER.glob("*.txt")) for mutant in read(path)]
