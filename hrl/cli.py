"""The console script `hrl`: check a run, show its samples, describe the machine, or run the quickstart.

Nothing heavy is imported here. `hrl check` reads data and tokenizer as a run does, which takes seconds; with
`--config-only` it answers in about one second, without torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: The arguments after the program's name; the command line's if None.

    Returns:
        The exit status: 0, or 2 for a configuration that can't be run or samples that are not there.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        # A run answers `--help` itself; its arguments are those of `python -m hrl.trainer.main_ppo`.
        from hrl.trainer.main_ppo import main as train

        return train(arguments[1:])
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if options.command == "check":
        from hrl.config.run_kind import KINDS, PPO
        from hrl.preflight.check import check

        kind = KINDS[rest.pop(0)] if rest[:1] and rest[0] in KINDS else PPO
        asked = {name: getattr(options, name) for name in ("full", "config_only", "as_json", "explain")}
        return check(kind, rest, **asked)
    if rest:
        parser.error(f"hrl {options.command} takes no argument {rest[0]!r}")
    if options.command == "rollouts":
        return rollouts(options)
    from hrl.report.environment import show_environment

    show_environment(as_json=options.as_json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hrl",
        description="Reinforcement learning for language models.",
        epilog="A run is started by `python -m hrl.trainer.main_ppo key=value ...`.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="check | rollouts | env | demo")
    checking = commands.add_parser(
        "check",
        add_help=False,
        help="look at a configuration and everything it names, and say in words what a run would do; starts nothing. "
        "`check dpo`, `check sft` and `check rm` are for the other trainers",
    )
    checking.add_argument("--full", action="store_true", help="every value, with its default, instead of a summary")
    checking.add_argument("--config-only", action="store_true", help="open no file that the configuration names")
    checking.add_argument("--json", action="store_true", help="one JSON object instead of text", dest="as_json")
    checking.add_argument("--help", "-h", action="store_true", dest="explain")
    samples = commands.add_parser("rollouts", help="show samples of a run, with their rewards")
    samples.add_argument("folder", type=Path, help="the run folder")
    samples.add_argument("--step", type=int, help="the step; the last one by default")
    samples.add_argument("--sort", choices=("score", "length", "advantage"), help="the largest first")
    samples.add_argument("--limit", type=_at_least_one, default=10, help="how many to show; 10 by default")
    samples.add_argument("--val", action="store_true", help="samples of the validation after the step")
    machine = commands.add_parser("env", help="versions, cores, memory and GPUs, for a bug report")
    machine.add_argument("--json", action="store_true", help="one JSON object instead of text", dest="as_json")
    commands.add_parser("demo", help="run the quickstart: GRPO teaches a small model to add")
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def rollouts(options: argparse.Namespace) -> int:
    """List samples from a run folder, whether the run has ended or not; return the exit status."""
    from rich.console import Console

    from hrl.report.samples import NoSamplesError, show_rollouts

    try:
        show_rollouts(
            options.folder,
            Console(highlight=False),
            step=options.step,
            sort=options.sort,
            limit=options.limit,
            validation=options.val,
        )
    except NoSamplesError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
