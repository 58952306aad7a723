"""A launch line on its way to hrl: what is read, what it becomes, and what is lost on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hrl.config.compose import config_problems
from hrl.config.override import as_override
from hrl.config.run_kind import KINDS
from hrl.errors import Problem, RefusedError

_ROWS = "data.train_files"
_PLACEHOLDER = "YOUR_ROWS.jsonl"


class MigrationError(RefusedError, ValueError):
    """There is no launch line in what was given, or it is of a program that hrl has no counterpart of."""


class Remark(NamedTuple):
    """What became of something in the line.

    Attributes:
        written: As it was written, such as `--zero_stage 3`.
        why: Why, and what to do instead.
    """

    written: str
    why: str


@dataclass
class Migrated:
    """A launch line of hrl.

    Attributes:
        program: What it was.
        kind: Kind of run.
        arguments: `key=value`, in hydra's grammar.
        lost: What has no counterpart.
        differs: What was taken, and means something else in some respect.
        needless: What hrl does anyway.
    """

    program: str
    kind: str
    arguments: list[str] = field(default_factory=list)
    lost: list[Remark] = field(default_factory=list)
    differs: list[Remark] = field(default_factory=list)
    needless: list[Remark] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """The words of the command line."""
        return ["hrl", "train", *([] if self.kind == "ppo" else [self.kind]), *self.arguments]

    def set(self, values: Mapping[str, Any]) -> None:
        """Add values of keys."""
        self.arguments += [f"{key}={as_override(value)}" for key, value in values.items()]

    def drop_what_does_not_compose(self) -> None:
        """Remove arguments that hrl refuses, each with its reason, until the rest is a valid command line."""
        while problems := config_problems(KINDS[self.kind], self.arguments):
            refused = {problem.key: problem for problem in problems}
            kept: list[str] = []
            for argument in self.arguments:
                key = key_of(argument)
                above = (key.rsplit(".", depth)[0] for depth in range(key.count(".") + 1))
                problem = next((refused[name] for name in above if name in refused), refused.get(argument))
                if problem is None:
                    kept.append(argument)
                else:
                    self.lost.append(Remark(argument, _reason(problem)))
            if len(kept) == len(self.arguments) and _ROWS in refused and _ROWS not in map(key_of, kept):
                self.lost.append(Remark(_ROWS, f"was not in the line: put yours in place of {_PLACEHOLDER}"))
                kept.append(f"{_ROWS}={_PLACEHOLDER}")
            elif len(kept) == len(self.arguments):
                known = {remark.written for remark in self.lost}
                self.lost += [Remark(p.key, f"{p.what} {p.hint}".strip()) for p in problems if p.key not in known]
                return
            self.arguments = kept

    @property
    def composes(self) -> bool:
        """Whether hrl takes the command line."""
        return not config_problems(KINDS[self.kind], self.arguments)

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        remarks = {
            name: [remark._asdict() for remark in getattr(self, name)] for name in ("lost", "differs", "needless")
        }
        return {"from": self.program, "command": self.words, "composes": self.composes, **remarks}


_ONLY_REFUSES = re.compile(r"can't be .* here[:.]|has no counterpart in hrl:", re.DOTALL)


def _reason(problem: Problem) -> str:
    """Return why an argument was removed. That it can't be said here is said by where this is shown."""
    if problem.hint and _ONLY_REFUSES.fullmatch(problem.what):
        return problem.hint[:1].lower() + problem.hint[1:]
    return f"{problem.what} {problem.hint}".strip()


def key_of(argument: str) -> str:
    """Return the key of `key=value`."""
    return argument.lstrip("+~").partition("=")[0]


def script(migrated: Migrated) -> str:
    """Return a shell script: the command line, and the rest as comments."""
    first = " ".join(quoted(word) for word in migrated.words[: len(migrated.words) - len(migrated.arguments)])
    lines = [f"# from {migrated.program}", " \\\n    ".join([first, *map(quoted, migrated.arguments)])]
    for title, remarks in (
        ("Without a counterpart", migrated.lost),
        ("Taken, and written or meant differently", migrated.differs),
        ("Not needed", migrated.needless),
    ):
        if remarks:
            lines += ["", f"# {title}:", *_listed(remarks)]
    if not migrated.composes:
        lines += ["", "# This line is not complete yet: see above."]
    return "\n".join(lines) + "\n"


def _listed(remarks: Sequence[Remark]) -> Iterator[str]:
    """Yield one comment per reason, with everything that it is the reason for."""
    by_reason: dict[str, list[str]] = {}
    for remark in remarks:
        by_reason.setdefault(remark.why, []).append(" ".join(remark.written.split()))
    yield from (f"#   {', '.join(dict.fromkeys(written))}: {why}" for why, written in by_reason.items())


_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@%+\-]+")
_VARIABLE = re.compile(r"\$[({]?[A-Za-z_]")


def quoted(word: str) -> str:
    """Return a word for a POSIX shell; variables that the script left to its environment are still read there."""
    if _PLAIN.fullmatch(word):
        return word
    if _VARIABLE.search(word) or ("'" in word and not set('$`\\"!') & set(word)):
        return '"' + re.sub(r'([\\"`])', r"\\\1", word) + '"'
    return "'" + word.replace("'", "'\"'\"'") + "'"
