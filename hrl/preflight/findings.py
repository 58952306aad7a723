"""What a look at a run's files finds: problems, each with its key and the way out, and what is worth knowing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from jinja2 import TemplateError

from hrl.config.arithmetic import Fact
from hrl.errors import ConfigError, HrlError, Problem


class PreflightError(ConfigError):
    """The configuration is valid, but what it names is missing or does not fit together. `str()` lists all problems."""

    where = "with what the configuration names"


@dataclass
class Findings:
    """What a preflight has found so far.

    Attributes:
        problems: What keeps the run from starting.
        notes: What is allowed but probably not meant; a sentence each.
        unchecked: What could not be looked at here, a sentence each.
        facts: What was found, for the summary of `hrl check`.
        memory: What every phase takes at its worst, a line each; empty where the model was not looked at.
    """

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    memory: list[Fact] = field(default_factory=list)

    def problem(self, key: str, what: str, hint: str = "") -> None:
        """Note a problem, as `Problem` has it."""
        self.problems.append(Problem(key, what, hint))

    @contextmanager
    def about(self, key: str) -> Iterator[None]:
        """Turn an error that explains itself into a problem of `key`, so that other looks go on."""
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
    """Return the text with its full stop."""
    return text if text.endswith((".", "?", "!")) else f"{text}."
