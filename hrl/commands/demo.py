"""`hrl demo`: the quickstart."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Take the arguments of a run alone."""


def run(options: Namespace) -> int:
    """Run what `python -m hrl.trainer.main_ppo` runs, with the same arguments."""
    if options.help:
        from hrl.config.help import run_help

        sys.stdout.write(f"{run_help('hrl demo')}\n")
        return 0
    from hrl.trainer.main_ppo import main as train

    return train(options.overrides)
