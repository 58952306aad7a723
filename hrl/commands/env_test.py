"""`hrl env-test`: try an environment before a run.

Name it as `environment.path` does: `my_env.py:Class`, `package.module:Class`, or a name of the list. Three episodes are
played in it as a run plays them, by a script that needs no model, or by a real engine (`--engine vllm`). The
conversations are shown with what would be trained, and what the policy did is done again, to see whether the same seed
gives the same. Keys of a run, such as `data.train_files=rows.jsonl` or `environment.max_turns=4`, mean what they mean
there.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

from hrl.commands.argument_types import at_least_one
from hrl.processes.imports import quick_imports

if TYPE_CHECKING:
    from rich.console import Console

    from hrl.preflight.environment_trial import Tried

_ROWS = "bundled:addition/train"
_ENGINES = ("scripted", "hf", "vllm")


def add_arguments(parser: ArgumentParser) -> None:
    """Add what is tried, and who plays."""
    parser.add_argument("environment", nargs="?", help="my_env.py:Class, package.module:Class, or a name of --list")
    parser.add_argument("--model", help="folder, hub id or bundled:…; the quickstart's by default")
    parser.add_argument("--engine", choices=_ENGINES, default="scripted", help="who plays; by default a script")
    parser.add_argument(
        "--say",
        action="append",
        metavar="TEXT",
        help="what the script says in a turn; once for each, the last is repeated",
    )
    parser.add_argument("--episodes", type=at_least_one, default=3, help="how many; 3 by default")
    parser.add_argument("--tokens", action="store_true", help="show the tokens of all episodes, not of the first")
    parser.add_argument("--list", action="store_true", help="list the environments that have names", dest="lists")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text", dest="as_json")


def run(options: Namespace) -> int:
    """Try the environment, and return 0, or 1 if it does not keep to what a run relies on."""
    if options.help:
        parser = ArgumentParser(prog="hrl env-test", description=__doc__, add_help=False)
        add_arguments(parser)
        sys.stdout.write(parser.format_help())
        return 0
    from rich.console import Console

    console = Console(highlight=False)
    if options.lists:
        _list(console, as_json=options.as_json)
        return 0
    from hrl.config.compose import compose_cli, require_no_blanks
    from hrl.config.override import as_override
    from hrl.preflight.environment_load import load_environment
    from hrl.report.console import RunConsole

    words = [word for word in [options.environment, *options.overrides] if word is not None]
    require_no_blanks(words)
    # Rows of hrl's own suit any model that is only tried; a file of settings may have others.
    has_rows = any(word.startswith("--config") or "data.train_files" in word for word in words)
    given = {
        "actor_rollout_ref.model.path": options.model,
        "data.train_files": None if options.model is None or has_rows else _ROWS,
    }
    if options.environment is not None and "=" not in options.environment:
        words, given = words[1:], {"environment.path": options.environment, **given}
    overrides = [f"{key}={as_override(value)}" for key, value in given.items() if value is not None]
    config = compose_cli([*overrides, *words])
    shown = RunConsole(Console(stderr=True, highlight=False))
    with shown.stage("loading the environment"):
        spec = load_environment(config.environment)
    with quick_imports():
        from hrl.preflight.environment_trial import try_environment_of  # imports torch

    tried = try_environment_of(
        config,
        spec,
        engine=options.engine,
        words=options.say or (),
        episodes=options.episodes,
        stage=shown.stage,
    )
    if options.as_json:
        _write(tried)
    else:
        _show(console, tried, every=options.tokens)
    return 0 if tried.trial.fits else 1


def _show(console: Console, tried: Tried, *, every: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from hrl.masking import masked_text
    from hrl.report.chat import samples_shown, tokens_shown
    from hrl.report.episode_records import record_of
    from hrl.report.samples import printable

    for label, fact in tried.facts.items():
        console.print(Text.assemble((f"{label:<12}", "cyan"), printable(fact)))
    records = [
        # Errors stand in full among the checks.
        (f"episode {number}", record_of(replace(episode, error=None), tried.tokenizer))
        for number, episode in enumerate(tried.trial.episodes, start=1)
        if episode.rows
    ]
    if records:
        console.print(samples_shown(records, ""))
        console.print()
        console.print(tokens_shown(records if every else records[:1], "as tokens"))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    signs = {True: ("✓", "green"), False: ("✗", "bold red"), None: ("·", "bright_black")}
    for check in tried.trial.checks:
        table.add_row(Text(*signs[check.is_right]), Text(check.name), printable(masked_text(check.says), limit=6000))
    console.print()
    console.print(table)
    wrong = [check.name for check in tried.trial.checks if check.is_right is False]
    verdict = f"does not fit: {', '.join(wrong)}" if wrong else "fits: a run can be trained in it"
    name = tried.facts["environment"].partition(",")[0]
    console.print(Text(f"\n{name} {verdict}", style="bold red" if wrong else "bold green"))


def _write(tried: Tried) -> None:
    from hrl.report.episode_records import record_of
    from hrl.report.run_folder import json_line

    found = {
        "fits": tried.trial.fits,
        "checks": [vars(check) for check in tried.trial.checks],
        "episodes": [record_of(episode, tried.tokenizer) for episode in tried.trial.episodes],
    }
    sys.stdout.write(json_line(found, ascii_only=True))


def _list(console: Console, *, as_json: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from hrl.environments.registry import ENVIRONMENTS

    if as_json:
        listed = [
            {"name": name, "description": one.description, "extra": one.extra} for name, one in ENVIRONMENTS.items()
        ]
        sys.stdout.write(json.dumps(listed) + "\n")
        return
    table = Table(title="Environments that have names", title_justify="left")
    for heading in ("name", "what", "needs"):
        table.add_column(heading, overflow="fold")
    for name, one in ENVIRONMENTS.items():
        table.add_row(Text(name), Text(one.description), Text("" if one.extra is None else f"hrl[{one.extra}]"))
    console.print(table)
    console.print("Yours is named by its file: hrl env-test my_env.py:Class")
