"""`hrl tasks`: the built-in tasks and reward functions, each with an example and its score."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hrl.errors import RefusedError

if TYPE_CHECKING:
    from rich.console import Console

    from hrl.data.tasks.catalogue import Task

_ROWS_SHOWN = 3
_NO_ANSWER = "I do not know."
_NAME_WIDTH, _ABOUT_WIDTH, _ANSWER_WIDTH = 26, 40, 24
_NO_WORDS = "-"
_SEVERAL = "(several)"
_TITLES = {
    "bundled": "Tasks of hrl",
    "reasoning_gym": "Tasks of reasoning-gym: data.train_files=reasoning_gym:NAME",
}


class UnknownTaskError(RefusedError, ValueError):
    """There is no task or reward function of this name."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what is shown, and how."""
    parser.add_argument("name", nargs="?", help="one of them, also with options: 'chain_sum?answer=tags'")
    parser.add_argument("--json", action="store_true", help="JSON instead of text", dest="as_json")
    parser.add_argument("--model", help="whose chat template renders the prompt; by default the bundled model's")


def run(options: Namespace) -> int:
    """Show all tasks and reward functions, a line each, or one of them in full."""
    from rich.console import Console

    from hrl.data.tasks.catalogue import tasks
    from hrl.reward.library.catalogue import CATALOGUE

    console = Console(highlight=False)
    if options.name is None:
        if options.as_json:
            functions = [_function_in_full(name) for name in CATALOGUE]
            _write_json({"tasks": [_in_full(task, task.address, 1) for task in tasks()], "reward_functions": functions})
        else:
            _list(console, tasks())
        return 0
    if options.name in CATALOGUE:
        function = _function_in_full(options.name)
        if options.as_json:
            _write_json(function)
        else:
            _show_function(console, function)
        return 0
    task, address = _find(options.name)
    facts = _in_full(task, address, _ROWS_SHOWN)
    if task.model is None or options.model is not None:  # else no model is at hand that could read it
        facts["prompt"] = _rendered(address, options.model)
    if options.as_json:
        _write_json(facts)
    else:
        _show(console, task, facts)
    return 0


def _find(asked: str) -> tuple[Task, str]:
    """Return a task and its address, with the options that it was asked for with.

    Raises:
        UnknownTaskError: There is no such task.
    """
    from hrl.data.tasks.catalogue import tasks
    from hrl.nearest import did_you_mean
    from hrl.reward.library.catalogue import CATALOGUE

    name, mark, query = asked.partition("?")
    known: dict[str, Task] = {}
    for task in tasks():
        bare, slash, _ = task.address.partition("/")
        known |= dict.fromkeys((task.name, bare), task)
        if name in known or (slash and name.partition("/")[0] == bare):
            address = name if "/" in name else task.address
            return task, f"{address}{mark}{query}"
    hint = did_you_mean(name, [*known, *CATALOGUE], "`hrl tasks` lists them.")
    raise UnknownTaskError(f"there is no task or reward function {name!r}. {hint}")


# ---------------------------------------------------------------------- what there is to say


def _in_full(task: Task, address: str, most: int) -> dict[str, Any]:
    """Return everything about a task as plain data, with so many rows."""
    from hrl.data.tasks.catalogue import parameters_of_task, some_rows

    rows = some_rows(address, most)
    parameters = parameters_of_task(task, address)
    return {
        "name": task.name,
        "address": address,
        "about": task.about,
        "trains": list(task.trains),
        "command": shlex.join(["hrl", "train", task.trains[0], f"data.train_files={address}", *_model_of(task)]),
        "options": dict(task.options),
        "parameters": {name: value for name, value in parameters.items() if name not in task.options},
        "rows": [_shown_row(row) for row in rows],
        "responses": _scored(rows[0]),
    }


def _model_of(task: Task) -> list[str]:
    return [] if task.model is None else [f"actor_rollout_ref.model.path={task.model}"]


def _shown_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the texts of a row: what is asked, and the answer or answers that it has."""
    if "messages" in row:
        *_, asked, answer = (message["content"] for message in row["messages"])
        return {"prompt": asked, "answer": answer}
    shown = {"prompt": row["prompt"][-1]["content"]}
    if "chosen" in row:
        return shown | {name: row[name][-1]["content"] for name in ("chosen", "rejected")}
    if "completion" in row:
        return shown | {"answer": row["completion"][-1]["content"], "label": "good" if row["label"] else "bad"}
    return shown | {"answer": row.get("answer", row["reward_model"]["ground_truth"])}


def _scored(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the right response and one that answers nothing, each with its score; none for rows without a reward."""
    if "reward_model" not in row:
        return []
    from hrl.data.tasks.answer_format import PLAIN, format_of_row
    from hrl.reward.score import compute_score

    form, _ = format_of_row(row["extra_info"], PLAIN)
    answer = _shown_row(row)["answer"]
    responses = [_NO_ANSWER] if answer is None else [form.write(answer), _NO_ANSWER]
    truth = (row["reward_model"]["ground_truth"], row["extra_info"])
    return [{"response": text, "score": compute_score(row["data_source"], text, *truth)} for text in responses]


def _rendered(address: str, model: str | None) -> str:
    """Return the first prompt as a model reads it."""
    from hrl.config.model import BackboneConfig
    from hrl.data.chat import render_prompt
    from hrl.data.dataset import IMAGES, VIDEOS
    from hrl.data.pictures import take_pictures
    from hrl.data.tasks.catalogue import some_rows
    from hrl.models.source import resolve_model
    from hrl.models.tokenizer import load_tokenizer

    row = some_rows(address, 1)[0]
    tokenizer = load_tokenizer(resolve_model(model or BackboneConfig.model_fields["path"].default))
    messages = row["prompt"] if "prompt" in row else row["messages"][:-1]
    placed = take_pictures(row, messages, IMAGES, VIDEOS)
    return render_prompt(tokenizer, messages if isinstance(placed, str) else placed[0], {})


def _function_in_full(name: str) -> dict[str, Any]:
    """Return everything about a reward function as plain data."""
    from hrl.reward.library.catalogue import CATALOGUE

    entry = CATALOGUE[name]
    example = entry.example
    return {
        "name": name,
        "rewards": entry.rewards,
        "scores": entry.scores,
        "needs": entry.needs,
        "arguments": {one.name: one.meaning for one in entry.arguments},
        "example": {
            "arguments": dict(example.arguments),
            "row": dict(example.row),
            "response": example.response,
            "score": example.score,
        },
    }


# ---------------------------------------------------------------------- as text and as JSON


def _list(console: Console, listed: Iterator[Task]) -> None:
    """Show a line per task as soon as it is there: what it is called, what it asks, and an answer."""
    from rich.text import Text

    from hrl.data.tasks.catalogue import some_rows
    from hrl.report.console import PLAIN_WIDTH
    from hrl.report.samples import on_one_line
    from hrl.reward.library.catalogue import CATALOGUE

    width = console.width if console.is_terminal else PLAIN_WIDTH
    about = _ABOUT_WIDTH if width >= PLAIN_WIDTH else 0
    for title, group in groupby(listed, key=lambda task: task.address.partition(":")[0]):
        console.print(f"\n{_TITLES[title]}", style="bold")
        for task in group:
            row = _shown_row(some_rows(task.address, 1)[0])
            example = _example(row["prompt"], row.get("answer", row.get("chosen")), width - _NAME_WIDTH - about - 4)
            words = on_one_line(task.about or _NO_WORDS, about - 2) if about else ""
            console.print(
                Text.assemble(
                    (f"  {task.name:<{_NAME_WIDTH}}", "cyan"), f"{words:<{about}}", (example, "bright_black")
                ),
                soft_wrap=True,
            )
    console.print("\nReward functions: reward.functions=[NAME,...]", style="bold")
    for entry in CATALOGUE.values():
        response = on_one_line(entry.example.response, _ANSWER_WIDTH) or _NO_WORDS
        words = f"{on_one_line(entry.rewards, about - 2):<{about}}" if about else ""
        example = f"{response} → {_number_or_none(entry.example.score)}"
        console.print(
            Text.assemble((f"  {entry.name:<{_NAME_WIDTH}}", "cyan"), words, (example, "bright_black")), soft_wrap=True
        )
    console.print("\nhrl tasks NAME shows one with its options, rows, prompt, and what scores.")


def _show(console: Console, task: Task, facts: Mapping[str, Any]) -> None:
    from rich.text import Text

    from hrl.report.samples import on_one_line

    console.print(Text(facts["address"], "bold"))
    console.print(Text(task.about or _NO_WORDS))
    console.print(Text(f"\n{facts['command']}"), soft_wrap=True)
    if task.options:
        _block(console, f"Options, as in '{task.address}?{task.example}'", facts["options"].items())
    _block(console, "Parameters, which are options too, with their values here", facts["parameters"].items())
    rows = [[on_one_line(str(cell), console.width) for cell in row.values()] for row in facts["rows"]]
    _block(console, "Rows", rows)
    _block(console, "Prompt, as the model reads it", [[facts["prompt"]]] if "prompt" in facts else [])
    scored = [[one["response"], _score_in_words(one["score"])] for one in facts["responses"]]
    _block(console, "What a response scores", scored)


def _show_function(console: Console, facts: Mapping[str, Any]) -> None:
    from rich.text import Text

    example = facts["example"]
    entry = {"name": facts["name"], **example["arguments"]}
    console.print(Text(facts["name"], "bold"))
    console.print(Text(f"{facts['rewards']} Scores {facts['scores']}."))
    if facts["needs"]:
        console.print(Text(f"Needs a package: pip install {facts['needs']}"))
    console.print(Text(f"\nIn YAML: reward: {{functions: {json.dumps([entry])}}}"), soft_wrap=True)
    _block(console, "Arguments", facts["arguments"].items())
    _block(console, "Example", [*example["row"].items(), ("response", example["response"])])
    _block(console, "Score", [[_number_or_none(example["score"])]])


def _block(console: Console, title: str, lines: Iterable[Sequence[object]]) -> None:
    """Show a title and lines of cells below it; nothing without lines."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for cells in lines:
        table.add_row(*(Text(cell if isinstance(cell, str) else json.dumps(cell)) for cell in cells))
    if table.row_count:
        console.print(f"\n{title}", style="bold")
        console.print(Padding(table, (0, 0, 0, 2)))


def _number_or_none(score: float | None) -> str:
    return "no score" if score is None else f"{score:.3g}"


def _example(question: object, answer: object, width: int) -> str:
    """Return a question and its answer on a line; a long question is cut more than the answer."""
    from hrl.report.samples import on_one_line

    right = _SEVERAL if answer is None else on_one_line(str(answer), _ANSWER_WIDTH)
    return f"{on_one_line(str(question), width - len(right) - 3)} → {right}"


def _score_in_words(score: object) -> str:
    """Return a score, with its parts in brackets."""
    if not isinstance(score, Mapping):
        return f"{score:g}"
    parts = ", ".join(f"{name} {value}" for name, value in score.items() if name != "score")
    return f"{score['score']:g}  ({parts})"


def _write_json(data: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
