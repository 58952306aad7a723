"""From a file or a text to a launch line of hrl, whichever library it is for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from hrl.migrate.line import Migrated, MigrationError, Remark, key_of
from hrl.migrate.openrlhf import migrate_openrlhf
from hrl.migrate.shell import Command, commands_of
from hrl.migrate.trl import migrate_trl_file, migrate_trl_line
from hrl.migrate.verl import migrate_verl

_PYTHON = re.compile(r"^\s*(from|import)\s+\w|^\s*\w+\s*=\s*\w+\(", re.MULTILINE)
_DOCTEST = re.compile(r"^\s*(?:>>>|\.\.\.)(?: (.*)|)$", re.MULTILINE)
_SCRIPT_OF_TRL = re.compile(r"(?:.*/)?(?:trl|examples)/scripts/(\w+)\.py")
_LAUNCHERS = {
    "nproc[_-]per[_-]node|num_gpus": "trainer.n_gpus_per_node",
    "nnodes|num_nodes": "trainer.nnodes",
}
"""Options of `torchrun` and `deepspeed` → key."""
_NAMES_OF_SCRIPTS = {"reward_modeling": "reward"}
"""Scripts of TRL that have another name than the command of `trl`."""
_TRL = re.compile(r"\b(GRPO|RLOO|DPO|SFT|Reward)(Config|Trainer)\b")


def migrate(text: str, name: str, processes: int = 1) -> list[Migrated]:
    """Return a launch line of hrl for every one in a text.

    Args:
        text: A shell script, a command line, or a Python file that uses TRL. Nothing in it is run.
        name: Where it comes from, for messages.
        processes: Processes of a run of TRL, which a Python file does not say.

    Raises:
        MigrationError: It has no launch line that hrl has a counterpart of.
    """
    if re.search(r"^\s*>>> ", text, re.MULTILINE):  # copied from a documentation
        text = "\n".join(match[1] or "" for match in _DOCTEST.finditer(text))
    if name.endswith(".py") or (_TRL.search(text) and _PYTHON.search(text)):
        return [migrate_trl_file(text, name, processes)]
    found, others = [], []
    for command in commands_of(text):
        program, arguments = _program(command.words)
        if program is None:
            continue
        try:
            migrated = _one(program, arguments, command.words, processes)
        except MigrationError as error:
            others.append(str(error))
            continue
        migrated.lost += _left_in_the_script(text, command)
        found.append(replace(migrated, program=f"{name}: {migrated.program}" if name != "-" else migrated.program))
    if not found:
        why = (
            f": {others[0]}"
            if others
            else ", such as `python3 -m verl.trainer.main_ppo …`, and no Python that uses TRL"
        )
        where = "standard input" if name == "-" else name
        raise MigrationError(f"{where} has no launch line of verl, OpenRLHF or TRL{why}")
    return found


def _left_in_the_script(text: str, command: Command) -> list[Remark]:
    """Return what a script gives a line beside its words. Values stay out of it: they may be secrets."""
    why = "stands for what the script is called with; write that into the script and migrate it again"
    remarks = [Remark(argument, why) for argument in command.arguments]
    for name in dict.fromkeys(command.environment):
        why = "is set for the command alone and not in this line; set it before `hrl train` if the run needs it"
        remarks.append(Remark(f"{name}=…", why))
    for name in command.reads:
        why = "is set in the script, and a command in this line reads it; set it before `hrl train`, or write its value"
        remarks.append(Remark(f"${name}", why))
    for name in command.exported:
        if not re.search(rf"\$\{{?{name}\b", text):  # else the value is in the line
            why = "is set in the script and not in this line; export it before the run if it needs it"
            remarks.append(Remark(f"export {name}", why))
    return remarks


def _program(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the program that a command runs and its arguments; None if it is of no library that is known."""
    for place, word in enumerate(words):
        module = word.removesuffix(".py").replace("/", ".").lstrip(".")
        if re.fullmatch(r"(verl|recipe|openrlhf)\.[\w.]+", module) and place > 0:
            return module, list(words[place + 1 :])
        if (script := _SCRIPT_OF_TRL.fullmatch(word)) and place > 0:
            return f"trl {_NAMES_OF_SCRIPTS.get(script[1], script[1])}", list(words[place + 1 :])
        if word == "trl" and place + 1 < len(words) and words[place + 1].isalpha():
            return f"trl {words[place + 1]}", list(words[place + 2 :])
    return None, []


def _one(program: str, arguments: list[str], words: Sequence[str], processes: int) -> Migrated:
    if program.startswith("trl "):
        told = [int(value) for flag, value in pairwise(words) if flag == "--num_processes" and value.isdigit()]
        arguments = [word for place, word in enumerate(arguments) if not _is_of_accelerate(arguments, place)]
        return migrate_trl_line(program.removeprefix("trl "), arguments, told[0] if told else processes)
    if not program.startswith("openrlhf."):
        said = {key_of(argument) for argument in arguments}
        return migrate_verl(
            program, [*arguments, *(word for word in processes_started(words) if key_of(word) not in said)]
        )
    migrated = migrate_openrlhf(program, arguments)
    known = {key_of(argument) for argument in migrated.arguments}
    started = [word for word in processes_started(words) if key_of(word) not in known]
    if started:
        migrated.arguments += started
        migrated.drop_what_does_not_compose()
    elif words[0] == "deepspeed" and migrated.kind != "ppo":
        why = "starts a process on every GPU of the machine; trainer.n_gpus_per_node says how many here, and is 1"
        migrated.differs.append(Remark("deepspeed", why))
    return migrated


def processes_started(words: Sequence[str]) -> Iterator[str]:
    """Yield how many processes `torchrun` or `deepspeed` starts, as `key=value`."""
    for flags, key in _LAUNCHERS.items():
        if found := re.search(rf" --(?:{flags})[ =](\d+) ", " ".join(words)):
            yield from [f"{key}={found[1]}"] if found[1] != "1" else []


def _is_of_accelerate(arguments: Sequence[str], place: int) -> bool:
    launcher = ("--num_processes", "--accelerate_config")
    return arguments[place] in launcher or (place > 0 and arguments[place - 1] in launcher)
