"""`hrl check`: what a run would do, without starting it."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from hrl.commands.run_arguments import kind_and_arguments, named_algorithm


def add_arguments(parser: ArgumentParser) -> None:
    """Add how much is checked and shown."""
    parser.add_argument("--full", action="store_true", help="every value, with its default, instead of a summary")
    parser.add_argument("--config-only", action="store_true", help="open no file that the configuration names")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text", dest="as_json")


def run(options: Namespace) -> int:
    """Check, and return 0, or 2 if something is wrong."""
    if options.help:
        return show_help(options.overrides)
    from hrl.config.run_kind import KINDS
    from hrl.preflight.check import check

    kind, arguments = kind_and_arguments(options.overrides)
    return check(KINDS[kind], arguments, full=options.full, config_only=options.config_only, as_json=options.as_json)


def show_help(words: Sequence[str]) -> int:
    """Write the help of the checks of an algorithm, or of all of them together, to standard output."""
    from hrl.config.help import check_help

    sys.stdout.write(f"{check_help(*named_algorithm(words))}\n")
    return 0
