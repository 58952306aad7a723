"""`hrl train`: what `python -m hrl.trainer.main_ppo`, `main_dpo`, `main_sft` and `main_rm` do."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from hrl.commands.run_arguments import kind_and_arguments, named_algorithm


def add_arguments(parser: ArgumentParser) -> None:
    """Take the arguments of a run alone."""


def run(options: Namespace) -> int:
    """Train, and return the exit status of `hrl.trainer.command.run_command`."""
    if options.help:
        return show_help(options.overrides)
    from hrl.processes.signals import ending_at_once
    from hrl.trainer.entry import train

    with ending_at_once():
        kind, arguments = kind_and_arguments(options.overrides)
    return train(kind, arguments)


def show_help(words: Sequence[str]) -> int:
    """Write the help of an algorithm, or of all of them together, to standard output."""
    from hrl.config.help import train_help

    sys.stdout.write(f"{train_help(*named_algorithm(words))}\n")
    return 0
