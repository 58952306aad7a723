"""All built-in tasks: what each asks, what it is called in `data.train_files`, and a few of its rows."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from hrl.data.tasks import bundled_rows
from hrl.data.tasks.addition import OPTIONS as ADDITION_OPTIONS
from hrl.data.tasks.reasoning_gym import OPTIONS, about, datasets, parameters_at, parse_address, rows_made_here

_BUNDLED, _REASONING_GYM = "bundled:", "reasoning_gym:"
_QUICK_SEED = 5
"""A seed with which no dataset searches for seconds."""
_MIXES_OTHERS = "composite"
"""A dataset that is no task without the names of others."""


@dataclass(frozen=True)
class Task:
    """A built-in task.

    Attributes:
        name: What it is called here.
        address: What it is called in `data.train_files`.
        about: What it asks, in a sentence; empty where its package does not say.
        trains: The kinds of run that it has rows for.
        options: What may stand behind a question mark in the address, and what it means.
        example: One of them with a value.
        model: A model that can do it, where the one that runs begin with can't.
    """

    name: str
    address: str
    about: str
    trains: tuple[str, ...] = ("grpo", "ppo")
    options: Mapping[str, str] = field(default_factory=dict)
    example: str = "answer=tags"
    model: str | None = None


_OWN = (
    Task(
        "addition",
        f"{_BUNDLED}addition/train",
        "Sums of two one-digit numbers; 16 of the 81 are held out, in bundled:addition/val.",
        options={name: OPTIONS[name] for name in ADDITION_OPTIONS},
    ),
    Task(
        "addition_pairs", f"{_BUNDLED}addition_pairs/train", "A right answer to a sum and a wrong one.", ("dpo", "rm")
    ),
    Task(
        "addition_labelled",
        f"{_BUNDLED}addition_labelled/train",
        "An answer to a sum, labelled right or wrong, for algorithm.loss_type=kto.",
        ("dpo",),
    ),
    Task(
        "shapes",
        f"{_BUNDLED}shapes/train",
        "Shapes of one kind in a picture that is drawn for each row, to count; needs a model that sees.",
        options={
            "size": "number of rows, 512 unless given",
            "seed": "of the pictures, 1 unless given",
            "side": "width and height of a picture in pixels, 112 unless given",
        },
        example="side=64",
        model="Qwen/Qwen2.5-VL-3B-Instruct",
    ),
    Task("addition_answers", f"{_BUNDLED}addition_answers/train", "Sums with their answers.", ("sft",)),
)


def tasks() -> Iterator[Task]:
    """Yield all tasks: hrl's own, then those of reasoning-gym by name.

    Raises:
        DatasetError: The package reasoning-gym is missing; after hrl's own.
    """
    yield from _OWN
    for name in datasets():
        if name != _MIXES_OTHERS:
            yield Task(name, f"{_REASONING_GYM}{name}", about(name), options=OPTIONS)


def parameters_of_task(task: Task, address: str) -> dict[str, Any]:
    """Return what the rows of an address are made with, where its task has parameters."""
    if not task.address.startswith(_REASONING_GYM):
        return {}
    return parameters_at(parse_address(address.removeprefix(_REASONING_GYM)))


def some_rows(address: str, most: int) -> list[dict[str, Any]]:
    """Return the first rows of a task, made in this process, with a seed of their own unless the address has one.

    Raises:
        DatasetError: There is no such task, or its options are wrong.
    """
    if address.startswith(_BUNDLED):
        return list(islice(bundled_rows(address.removeprefix(_BUNDLED)), most))
    name, _, query = address.removeprefix(_REASONING_GYM).partition("?")
    options = [f"size={most}", f"seed={_QUICK_SEED}", *filter(None, [query])]
    with contextlib.redirect_stdout(io.StringIO()):  # some generators print
        return list(islice(rows_made_here(f"{name}?{'&'.join(options)}"), most))
