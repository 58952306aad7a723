"""`hrl demo`: the quickstart."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Take the arguments of a run alone."""


def run(options: Namespace) -> int:
    """Run what `python -m hrl.trainer.main_ppo` runs, with the same arguments."""
    from hrl.trainer.main_ppo import main as train

    return train([*options.overrides, *(["--help"] if options.help else [])])
