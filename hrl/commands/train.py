"""`hrl train`: what `python -m hrl.trainer.main_ppo`, `main_dpo`, `main_sft` and `main_rm` do."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from hrl.commands.run_arguments import ALGORITHMS, kind_and_arguments


def add_arguments(parser: ArgumentParser) -> None:
    """Take the arguments of a run alone."""


def run(options: Namespace) -> int:
    """Train, and return the exit status of `hrl.trainer.command.run_command`."""
    if options.help:
        return show_help(options.overrides)
    from hrl.trainer.entry import train

    kind, arguments = kind_and_arguments(options.overrides)
    return train(kind, arguments)


def show_help(words: Sequence[str]) -> int:
    """Write the help of an algorithm, or of all of them together, to standard output."""
    from hrl.config.help import run_help
    from hrl.config.run_kind import KINDS

    kind, _ = kind_and_arguments(words)
    named = [word for word in words[:1] if word in ALGORITHMS]
    text = run_help(" ".join(["hrl train", *named]), KINDS[kind], "" if named else f"[{'|'.join(ALGORITHMS)}] ")
    sys.stdout.write(f"{text}\n")
    return 0
