"""The findings of a preflight: problems, each with its key and what to do, notes and facts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from hrl.config.arithmetic import Fact
from hrl.errors import ConfigError, HrlError, Problem

#: Label of the fact that a run's rows are padded, where they are.
PADDED_ROWS = "padded rows"


class PreflightError(ConfigError):
    """The configuration is valid, but files that it names are missing or don't fit. `str()` lists all problems."""

    where = "with what the configuration names"


@dataclass
class Findings:
    """The findings of a preflight so far.

    Attributes:
        problems: Problems that keep the run from starting.
        notes: Things that are allowed but probably not meant, a sentence each.
        unchecked: Things that could not be checked here, a sentence each.
        facts: Facts for the summary of `hrl check`.
        memory: What every phase takes, a table for each memory; empty if the model was not looked at.
        changes: What is different from the run that is continued, `key: old → new`; `changed` is their heading.
    """

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    changed: str = ""

    def problem(self, key: str, what: str, hint: str = "") -> None:
        """Add a problem; the arguments are those of `Problem`."""
        self.problems.append(Problem(key, what, hint))

    @contextmanager
    def about(self, key: str) -> Iterator[None]:
        """Convert a self-explanatory error in the block to a problem of `key`, so that other checks continue."""
        try:
            yield
        except (HrlError, TemplateError) as error:
            self.problem(key, f"can't be used: {sentence(str(error))}")
        except OSError as error:
            self.problem(key, f"can't be read: {sentence(str(error))}")

    def raise_problems(self) -> None:
        """End the preflight.

        Raises:
            PreflightError: There are problems; lists them all.
        """
        if self.problems:
            raise PreflightError(dict.fromkeys(self.problems))  # training and validation rows may share a file


def sentence(text: str) -> str:
    """Return the text with a full stop at its end."""
    return text if text.endswith((".", "?", "!")) else f"{text}."
