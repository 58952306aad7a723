"""`hrl reward`: try a reward without a model.

Give a function of the library by its name, a file of your own as `my_reward.py` or `my_reward.py:function`, an entry of
`reward.functions` such as '{name: regex, pattern: "^yes"}', or several of them. Keys of a run, such as
`data.prompt_key=question`, mean what they mean there.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hrl.commands.argument_types import at_least_one

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hrl.config.ppo import PPOTrainerConfig
    from hrl.data.dataset import PromptRow
    from hrl.reward.library.base import Example
    from hrl.reward.trial import Attempt, Trial

_KEY = re.compile(r"[+~]{0,2}[\w.]+(/[\w.]+)?(@[\w.]+)?=")
_MOST_SHOWN = 20
_WIDEST_RESPONSE = 40
_NARROWEST_RESPONSE = 12
_WIDEST_PART = 24
_WIDTH_OF_REST = 41
_MOST_PRINTED = 4000
"""How many bytes of what a reward prints are shown."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what is tried, on what."""
    parser.add_argument("functions", nargs="*", metavar="function", help="what to try; see above")
    parser.add_argument("--data", help="rows: whatever data.train_files takes; without it one example row")
    parser.add_argument(
        "--responses",
        type=Path,
        help="a .jsonl or .json file with responses: texts in the order of the rows, or objects with `response` and "
        "perhaps `row`; also a file of a run's rollouts folder, which needs no --data. Without it only the probes",
    )
    parser.add_argument("--limit", type=at_least_one, default=1000, help="try only the first rows; 1000 by default")
    parser.add_argument("--show", type=at_least_one, default=_MOST_SHOWN, help=f"lines of the table; {_MOST_SHOWN}")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table", dest="as_json")


def run(options: Namespace) -> int:
    """Score the responses and the probes, or list the library; return 0, or 1 if a call failed."""
    if options.help:
        parser = ArgumentParser(prog="hrl reward", description=__doc__, add_help=False)
        add_arguments(parser)
        sys.stdout.write(parser.format_help())
        return 0
    if not (options.functions or options.overrides or options.data or options.responses):
        _list_library(as_json=options.as_json)
        return 0
    from hrl.reward.spec import RewardSpec
    from hrl.reward.trial import probes, run_trial

    config = _config(options)
    rows, attempts = _rows_and_responses(options, config)
    columns = tuple(dict.fromkeys(name for row in rows for name in row.columns))
    sources = tuple(dict.fromkeys(row.data_source for row in rows))
    spec = RewardSpec.of_config(config.reward, sources, None, columns)
    with tempfile.TemporaryFile() as output:
        try:
            trial = run_trial(spec, config.reward, rows, [*attempts, *probes(rows)], output)
            if options.as_json:
                sys.stdout.write(json.dumps(trial.to_json(), ensure_ascii=True) + "\n")
            else:
                _show(trial, options)
        finally:  # also what a function prints that can't be loaded
            _show_printed(output)
    return 1 if trial.failed else 0


def _config(options: Namespace) -> PPOTrainerConfig:
    import yaml

    from hrl.config.compose import compose_cli, require_no_blanks
    from hrl.config.limits import usable
    from hrl.config.override import as_override
    from hrl.config.reward import spelt_out
    from hrl.errors import ConfigError, Problem
    from hrl.reward.trial import TrialError

    words = [*options.functions, *options.overrides]
    require_no_blanks(words)
    overrides = [word for word in words if _KEY.match(word)]
    given = [word for word in words if not _KEY.match(word)]
    try:
        entries = [yaml.safe_load(word) if word.startswith("{") else word for word in given]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise TrialError(f"an entry of reward.functions can't be read: {' '.join(str(error).split())}") from error
    problems: list[Problem] = []
    usable({"an entry of reward.functions": entries}, problems)
    if problems:
        raise ConfigError(problems)
    if entries:
        overrides.append(f"reward.functions={as_override([spelt_out(entry) for entry in entries])}")
    return compose_cli(overrides)


def _rows_and_responses(options: Namespace, config: PPOTrainerConfig) -> tuple[list[PromptRow], list[Attempt]]:
    """Return the rows, and the responses to them.

    Raises:
        TrialError: They don't fit, or can't be read.
    """
    from hrl.reward.trial import Attempt, TrialError, records_in, response_in, responses_for

    records = [] if options.responses is None else list(records_in(options.responses))
    if options.data is not None:
        # Responses are shared out among all rows: only then does the limit leave each with its own.
        rows = _read(options.data, config, None if records else options.limit)
        attempts = responses_for(records, len(rows), options.limit) if records else []
        return rows[: options.limit], [attempt for attempt in attempts if attempt.row < options.limit]
    if records:  # each with its own row, as in a run's rollouts
        raw = []
        for place, record in records[: options.limit]:
            if not isinstance(record, dict) or not (prompt := record.get("question", record.get("prompt"))):
                raise TrialError(f"{place} has no prompt; name the rows with --data")
            truth = record.get("ground_truth", record.get("answer"))
            raw.append({**record, config.data.prompt_key: prompt, "answer": truth})
        attempts = [
            Attempt("response", index, response_in(place, record))
            for index, (place, record) in enumerate(records[: options.limit])
        ]
        return _read(raw, config, options.limit), attempts
    example = _example(config)
    rows = _read([{**example.row, config.data.prompt_key: example.row["prompt"]}], config, 1)
    return rows, [Attempt("response", 0, example.response)] if example.response else []


def _example(config: PPOTrainerConfig) -> Example:
    from hrl.reward.library.catalogue import CATALOGUE

    named = [entry.name for entry in config.reward.entries if entry.name is not None]
    return CATALOGUE[named[0] if named else "data_source"].example


def _read(source: Any, config: PPOTrainerConfig, limit: int | None) -> list[PromptRow]:
    from itertools import islice

    from hrl.data.dataset import check_prompt
    from hrl.data.sources import BadRow, read_rows, sources_of
    from hrl.preflight.data_look import require_prompt_columns
    from hrl.reward.trial import TrialError

    data = config.data
    sources = sources_of(source)
    require_prompt_columns(data, sources)
    check = partial(check_prompt, prompt_key=data.prompt_key, answer_key=data.answer_key)
    rows: list[PromptRow] = []
    for row in islice(read_rows([one.with_keys_of(data) for one in sources], check), limit):
        if isinstance(row, BadRow):
            raise TrialError(f"{row.origin}: {row.reason}")
        rows.append(row)
    if not rows:
        raise TrialError(f"{source} has no rows")
    return rows


# ---------------------------------------------------------------------- what is shown


def _list_library(*, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hrl.reward.library.catalogue import CATALOGUE

    if as_json:
        listed = [
            {
                "name": entry.name,
                "rewards": entry.rewards,
                "scores": entry.scores,
                "arguments": {
                    one.name: {"meaning": one.meaning} | ({} if one.is_required else {"default": one.default})
                    for one in entry.arguments
                },
                "example": vars(entry.example),
            }
            for entry in CATALOGUE.values()
        ]
        sys.stdout.write(json.dumps(listed) + "\n")
        return
    table = Table(title="Reward functions of hrl", title_justify="left")
    for name in ("name", "pays for", "arguments"):
        table.add_column(name, overflow="fold")
    for entry in CATALOGUE.values():
        arguments = ", ".join(one.name if one.is_required else f"[{one.name}]" for one in entry.arguments)
        table.add_row(entry.name, Text(entry.rewards), Text(arguments))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "hrl reward NAME shows one at work; hrl reward NAME --data ROWS --responses FILE tries it.", markup=False
    )


def _show(trial: Trial, options: Namespace) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(trial.title, style="italic", markup=False, soft_wrap=True)  # a table's own is no wider than the table
    console.print(_table(trial, options.show, console.width))
    _show_summary(console, trial)
    for call in trial.failed[:3]:
        attempt = call.attempt
        console.print(
            f"\n{call.outcome.status} in row {attempt.row}, {attempt.kind} {attempt.response[:80]!r}:", markup=False
        )
        console.print(call.outcome.error or "", markup=False)
    for warning in trial.warnings():
        console.print(f"warning: {warning}", style="yellow", markup=False)
    if options.data is None and options.responses is None:
        console.print("No rows and no responses were given: this is an example of the library.", style="dim")


def _show_printed(output: IO[bytes]) -> None:
    """Write what the functions printed to standard error, below all else: its beginning, if it is long."""
    from hrl.report.samples import readable

    output.seek(0)
    printed = output.read(_MOST_PRINTED + 1)
    text = readable(printed[:_MOST_PRINTED].decode(errors="replace")).rstrip()
    if text:
        cut = "\n…" if len(printed) > _MOST_PRINTED else ""
        sys.stderr.write(f"\nprinted by the reward:\n{text}{cut}\n")


def _table(trial: Trial, most: int, width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    from hrl.report.samples import on_one_line

    probes = [call for call in trial.calls if call.attempt.kind != "response"]
    shown = [*trial.of_responses[:most], *probes]
    parts = list(dict.fromkeys(name for call in shown for name in call.outcome.parts))
    table = Table()
    others = sum(min(max(len(name), len("0.000")), _WIDEST_PART) + len(" │ ") for name in parts)
    widest = min(max(width - others - _WIDTH_OF_REST, _NARROWEST_RESPONSE), _WIDEST_RESPONSE)
    table.add_column("row", justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("response", no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    for name in parts:
        table.add_column(name, justify="right", max_width=_WIDEST_PART, overflow="ellipsis", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    for call in shown:
        outcome, attempt = call.outcome, call.attempt
        score = outcome.status if call.has_failed else "None" if outcome.score is None else f"{outcome.score:.3f}"
        table.add_row(
            str(attempt.row),
            attempt.kind,
            Text(on_one_line(attempt.response, widest)) if attempt.response else Text("(empty)", style="dim"),
            Text(score, style="red" if call.has_failed else ""),
            *(_cell(outcome.parts.get(name)) for name in parts),
            f"{1000 * outcome.duration_s:.1f}",
        )
    left = len(trial.of_responses) - most
    if left > 0:
        table.caption = f"and {left} more responses; --show {len(trial.of_responses)} shows all"
    return table


def _cell(value: Any) -> Any:
    from rich.text import Text

    from hrl.report.samples import printable

    if value is None:
        return Text("-", style="dim")
    return printable(value, limit=60) if isinstance(value, str) else Text(f"{value:.3f}")


def _show_summary(console: Console, trial: Trial) -> None:
    from hrl.config.arithmetic import count

    found = trial.summary()
    said = [count(found["samples"], "response" if trial.of_responses else "probe")]
    if "mean" in found:
        said.append(f"score {found['mean']:.3f} ± {found['std']:.3f}, from {found['min']:.3f} to {found['max']:.3f}")
    said += [f"{found[name]} {name}" for name in ("none", "failed", "unscorable") if found[name]]
    said.append(f"{1000 * found['call_s_mean']:.1f} ms a call, at most {1000 * found['call_s_max']:.1f}")
    console.print("; ".join(said), markup=False)
    if found["parts"]:
        console.print(
            "parts: " + ", ".join(f"{name} {mean:.3f}" for name, mean in found["parts"].items()), markup=False
        )
