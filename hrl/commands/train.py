"""`hrl train`: what `python -m hrl.trainer.main_ppo`, `main_dpo`, `main_sft` and `main_rm` do."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from hrl.commands.run_arguments import kind_and_arguments


def add_arguments(parser: ArgumentParser) -> None:
    """Take the arguments of a run alone."""


def run(options: Namespace) -> int:
    """Train, and return the exit status of `hrl.trainer.command.run_command`."""
    from hrl.trainer.command import run_command

    kind, arguments = kind_and_arguments(options.overrides)
    return run_command(kind, [*arguments, *(["--help"] if options.help else [])])
