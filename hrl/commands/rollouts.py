"""`hrl rollouts`: the samples of a run, whether it has ended or not."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from hrl.commands.argument_types import at_least_one, whole_number


def add_arguments(parser: ArgumentParser) -> None:
    """Add which samples, and in which order."""
    parser.add_argument("folder", type=Path, help="the run folder")
    parser.add_argument("--step", type=whole_number, help="the step; the last one by default")
    parser.add_argument("--sort", choices=("score", "length", "advantage"), help="the largest first")
    parser.add_argument(
        "--end",
        action="append",
        metavar="WHY",
        help="only those that ended so: done, truncated, max_turns, max_prompt, max_tokens, deadline or failed; stop "
        "or length",
    )
    parser.add_argument("--limit", type=at_least_one, default=10, help="how many to show; 10 by default")
    parser.add_argument("--val", action="store_true", help="samples of the validation after the step")
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="their tokens, with those that are trained on told apart",
    )


def run(options: Namespace) -> int:
    """Show the samples, and return 0."""
    from rich.console import Console

    from hrl.report.rollouts import show_rollouts

    show_rollouts(
        options.folder,
        Console(highlight=False),
        step=options.step,
        sort=options.sort,
        ends=options.end or (),
        limit=options.limit,
        validation=options.val,
        tokens=options.tokens,
    )
    return 0
