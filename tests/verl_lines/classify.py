"""What hrl makes of verl's launch scripts: `python -m tests.verl_lines.classify FOLDER [--each] [--set NAME=VALUE]`.

FOLDER is a checkout of verl, or one that has its recipes in a folder `recipe`. bash reads every script below it (see
`expand`), and each launch line goes through what `hrl check --config-only` judges by. A line is

accepted        it composes,
alternative     it is refused, and every hint names hrl's way to the same,
feature absent  it is refused, and a hint says that hrl can't do it,
unreadable      nobody could read it: an empty value where a number belongs, a word that is no `key=value`,
senseless       anything else: a refusal without a reason that the configuration's tables state.

The reasons are those of the problems themselves, `hrl.errors.Reason`; nothing is guessed from a text.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hrl.config.compose import config_problems
from hrl.config.run_kind import PPO, SFT
from hrl.errors import Problem, Reason
from hrl.migrate.migrate import processes_started
from tests.verl_lines.expand import commands_of

KINDS = {
    "verl.trainer.main_ppo": PPO,
    "recipe.dapo.main_dapo": PPO,
    "verl.trainer.sft_trainer": SFT,
    "verl.trainer.sft_trainer_ray": SFT,
    "verl.trainer.fsdp_sft_trainer": SFT,
}
"""verl's programs that hrl has → the kind of run. Lines of other programs (asynchronous trainers, recipes with a
trainer of their own, evaluation) are counted and not judged."""

ACCEPTED, SENSELESS = "accepted", "senseless"
COLUMNS = (ACCEPTED, str(Reason.ALTERNATIVE), str(Reason.ABSENT), str(Reason.UNREADABLE), SENSELESS)
_OTHER_ENGINES = ("megatron", "veomni", "torchtitan", "automodel", "mindspeed")
_VARIABLES = {"INFER_BACKEND": "vllm", "LORA_ADAPTER_PATH": "/home/user/adapter", "NUM_GPUS": "8", "WORLD_SIZE": "1"}
_ATTEMPTS: tuple[tuple[dict[str, str], tuple[str, ...]], ...] = (
    ({}, ()),
    (_VARIABLES, ()),
    (_VARIABLES, ("8", "/home/user/run")),
)
"""Variables and arguments for scripts that start nothing without: how many processes, where to write."""


class Line(NamedTuple):
    """A launch line.

    Attributes:
        script: path below the folder.
        program: the module that is run.
        arguments: what follows it, and before it how many processes a launcher such as `torchrun` starts.
    """

    script: str
    program: str
    arguments: tuple[str, ...]

    @property
    def is_fsdp(self) -> bool:
        """Whether it trains with FSDP, as far as it says; where its files lie says nothing."""
        said = " ".join((self.script, *(text for text in self.arguments if ".path=" not in text))).lower()
        return not any(engine in said for engine in _OTHER_ENGINES)


def lines_of(folder: Path, variables: dict[str, str]) -> Iterator[Line]:
    """The launch lines of all scripts below a folder, each once."""
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for script in sorted(folder.rglob("*.sh")):
        if "-m " not in script.read_text(errors="replace"):
            continue
        for more, given in _ATTEMPTS:
            calls = [call for call in commands_of(script, folder, more | variables, given) if "-m" in call[:-1]]
            if calls:
                break
        for call in calls:
            at = call.index("-m")
            arguments = (*processes_started(call), *call[at + 2 :])
            line = Line(str(script.relative_to(folder)), call[at + 1], arguments)
            if line[1:] not in seen:
                seen.add(line[1:])
                yield line


def column(problems: Sequence[Problem]) -> str:
    """Where a line with these problems belongs: the worst of them decides."""
    if not problems:
        return ACCEPTED
    found = {SENSELESS if problem.reason is None or not problem.hint else str(problem.reason) for problem in problems}
    return next(name for name in reversed(COLUMNS) if name in found)


def judge(line: Line) -> tuple[Problem, ...]:
    """What `hrl check --config-only` has against a line; `--config-path` is relative to the working folder."""
    return config_problems(KINDS[line.program], line.arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line for each launch line, and the totals; return 1 if any of them is senseless."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the scripts")
    parser.add_argument("--each", action="store_true", help="print the problems of every line too")
    parser.add_argument("--json", action="store_true", help="print the lines themselves and stop")
    options = parser.parse_args(argv)
    folder = options.folder.resolve()
    lines = list(lines_of(folder, dict(pair.split("=", 1) for pair in options.set)))
    if options.json:
        sys.stdout.write(json.dumps(lines, indent=1) + "\n")
        return 0
    os.chdir(folder)
    totals = {"FSDP": Counter[str](), "other engines": Counter[str]()}
    for line in lines:
        if line.program not in KINDS:
            continue
        problems = judge(line)
        found = column(problems)
        totals["FSDP" if line.is_fsdp else "other engines"][found] += 1
        sys.stdout.write(f"{found:<15} {line.script}\n")
        for problem in problems if options.each else ():
            sys.stdout.write(f"{'':<15}   [{problem.reason or SENSELESS}] {problem}\n")
    others = Counter(line.program for line in lines if line.program not in KINDS)
    for name, total in totals.items():
        counts = ", ".join(f"{total[column]} {column}" for column in COLUMNS)
        sys.stdout.write(f"{name}: {total.total()} lines: {counts}\n")
    sys.stdout.write(f"lines of {len(others)} other programs, not judged: {others.total()}\n")
    return int(any(total[SENSELESS] for total in totals.values()))


if __name__ == "__main__":
    sys.exit(main())
