"""`hrl check`: what a run would do, without starting it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from hrl.commands.run_arguments import kind_and_arguments


def add_arguments(parser: ArgumentParser) -> None:
    """Add how much is checked and shown."""
    parser.add_argument("--full", action="store_true", help="every value, with its default, instead of a summary")
    parser.add_argument("--config-only", action="store_true", help="open no file that the configuration names")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text", dest="as_json")


def run(options: Namespace) -> int:
    """Check, and return 0, or 2 if something is wrong."""
    from hrl.config.run_kind import KINDS
    from hrl.preflight.check import check

    kind, arguments = kind_and_arguments(options.overrides)
    return check(
        KINDS[kind],
        arguments,
        full=options.full,
        config_only=options.config_only,
        as_json=options.as_json,
        explain=options.help,
    )
