"""Tasks that come with hrl: the rows of `bundled:<task>/<split>`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hrl.data.tasks import addition, games, shapes
from hrl.data.tasks.answer_format import options_in, take_format, take_shots
from hrl.errors import DatasetError
from hrl.nearest import did_you_mean

_TASKS = {
    "addition": addition.rows,
    "addition_pairs": addition.pairs,
    "addition_answers": addition.answers,
    "addition_labelled": addition.labelled,
    "games": games.rows,
    "shapes": shapes.rows,
}


def bundled_rows(name: str) -> Iterator[dict[str, Any]]:
    """Return the rows of `<task>/<split>`; most take options, as in `addition/train?answer=tags`.

    Raises:
        DatasetError: No such task, split or option.
    """
    path, _, query = name.partition("?")
    task, _, split = path.partition("/")
    if task not in _TASKS:
        hint = did_you_mean(task, _TASKS, f"There is: {', '.join(sorted(_TASKS))}.")
        raise DatasetError(f"unknown bundled task {task!r} in 'bundled:{name}'. {hint}")
    if not query:
        return _TASKS[task](split)
    if task in ("games", "shapes"):
        return {"games": games.rows, "shapes": shapes.rows}[task](split, query)
    if task != "addition":
        raise DatasetError(f"bundled:{task} takes no options, and 'bundled:{name}' has {query!r}")
    options = options_in(query, f"bundled:{name}")
    form, credit = take_format(options, f"bundled:{name}")
    shots = take_shots(options, form, f"bundled:{name}")
    if options:
        hint = did_you_mean(next(iter(options)), addition.OPTIONS, f"There are {', '.join(addition.OPTIONS)}.")
        raise DatasetError(f"bundled:{task} has no option {next(iter(options))!r}. {hint}")
    return addition.rows(split, form, credit, shots)
