"""Functions that are given as objects: their processes import this file, which is why it imports so little."""

from __future__ import annotations

import time
from typing import Any


def named(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> dict[str, Any]:
    return {"score": float(len(solution_str)), "module": __name__}


class Judge:
    """Called as an async function is."""

    def __init__(self, bonus: float) -> None:
        self.bonus = bonus

    async def __call__(self, solution_str: str, **_: Any) -> float:
        if solution_str == "sleep":
            time.sleep(1000)
        if solution_str == "raise":
            raise ZeroDivisionError("by the user")
        return len(solution_str) + self.bonus


def correct(response: str, answer: str) -> float:
    return float(response == answer)
