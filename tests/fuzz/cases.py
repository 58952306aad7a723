"""How hostile input is tried: a target takes a case, and ends well, with an `HrlError`, or with a finding.

A finding is any other exception: a traceback that a user would be shown instead of a sentence.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from hrl.errors import HrlError

CASES_VARIABLE = "HRL_FUZZ_CASES"
"""Environment variable with the number of cases of each target; the suite tries few without it."""
QUICK_CASES = 60


class PoorMessageError(AssertionError):
    """The error explains itself, but not enough: it lacks what the user needs to find the place."""


class NoCaseError(Exception):
    """What was drawn can't be written in the format; it does not count."""


@dataclass(frozen=True)
class Target:
    """Something that reads what users bring.

    Attributes:
        name: What is read, and how it is made hostile.
        cases: Makes cases; the representation of one is enough to try it again.
        attempt: Reads a case. It may return, or raise an `HrlError`.
        weight: Its share of the cases; those that take long have less.
    """

    name: str
    cases: SearchStrategy[Any]
    attempt: Callable[[Any], None]
    weight: float = 1.0


@dataclass
class Tried:
    """What came of the cases of a target.

    Attributes:
        cases: How many were tried.
        refused: How many ended with an `HrlError`.
        findings: Where an exception came from → the first case that raised it, and the traceback.
    """

    cases: int = 0
    refused: int = 0
    findings: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        told = "".join(f"\n{where}\ncase: {case[:2000]}\n{text}" for where, (case, text) in self.findings.items())
        return f"{self.cases} cases, {self.refused} refused, {len(self.findings)} findings{told}"


def quick_cases() -> int:
    """Return how many cases of each target the suite tries."""
    return int(os.environ.get(CASES_VARIABLE, QUICK_CASES))


def explore(target: Target, cases: int, random_seed: int = 0) -> Tried:
    """Try many cases of a target.

    Args:
        target: What reads them.
        cases: How many.
        random_seed: The same seed gives the same cases.
    """
    tried = Tried()

    @seed(random_seed)
    @settings(
        max_examples=max(round(cases * target.weight), 1),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(target.cases)
    def one(case: Any) -> None:
        with noted(tried, case):
            target.attempt(case)

    one()
    return tried


@contextmanager
def noted(tried: Tried, case: Any) -> Iterator[None]:
    """Keep account of what ends the block: an `HrlError` is a refusal, any other exception a finding."""
    try:
        yield
    except NoCaseError:
        return
    except HrlError:
        tried.refused += 1
    # Whatever a user would see as a traceback is what is looked for, `SystemExit` and `RecursionError` among it.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "/hrl/" in frame.filename and "/tests/" not in frame.filename]
        last = ours[-1] if ours else frames[-1]
        where = f"{type(error).__name__} from {last.filename.rpartition('/hrl/')[2]}:{last.lineno}"
        tried.findings.setdefault(where, (repr(case), "".join(traceback.format_exception(error)[-14:])))
    tried.cases += 1
