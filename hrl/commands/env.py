"""`hrl env`: what this machine is, for a bug report."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the form of the answer."""
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text", dest="as_json")


def run(options: Namespace) -> int:
    """Write the facts to standard output."""
    from hrl.report.environment import show_environment

    show_environment(as_json=options.as_json)
    return 0
