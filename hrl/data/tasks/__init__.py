"""Tasks that come with hrl: the rows of `bundled:<task>/<split>`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hrl.data.tasks import addition
from hrl.errors import DatasetError

_TASKS = {
    "addition": addition.rows,
    "addition_pairs": addition.pairs,
    "addition_answers": addition.answers,
}


def bundled_rows(name: str) -> Iterator[dict[str, Any]]:
    """Return the rows of `<task>/<split>`.

    Raises:
        DatasetError: No such task or split.
    """
    task, _, split = name.partition("/")
    if task not in _TASKS:
        raise DatasetError(f"unknown bundled task {task!r} in 'bundled:{name}'; there is: {', '.join(sorted(_TASKS))}")
    return _TASKS[task](split)
