"""One-digit addition: the smallest task on which a 135M model visibly learns.

All 81 sums of 1..9 and 1..9. Eight pairs of different numbers are held out for validation in both orders, 16 sums in
total, because a model trained on 5 + 7 effectively knows 7 + 5.

`addition` has prompts with their ground truth, `addition_pairs` right answers paired with wrong ones,
`addition_labelled` the same answers one by one, `addition_answers` only the right ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from hrl.data.tasks.answer_format import PLAIN, AnswerFormat, format_info
from hrl.errors import DatasetError

DATA_SOURCE = "bundled/addition"
OPTIONS = ("answer", "format_credit", "shots")
"""What an address of `addition` takes behind its question mark."""
SPLITS = ("train", "val", "all")
_HELD_OUT_PAIRS = 8
_HELD_OUT_SEED = 20_240
_SHOWN_SEED = 1
_SMALLEST, _LARGEST = 2, 18
# Offsets in the circle of all sums: every number is wrong about as often as it is right, so the answer alone reveals
# nothing.
_ERRORS = (3, 6, 9, 12)


def held_out() -> frozenset[tuple[int, int]]:
    """Return the 16 sums (a, b) that are never trained on."""
    pairs = list(combinations(range(1, 10), 2))
    chosen = random.Random(_HELD_OUT_SEED).sample(pairs, _HELD_OUT_PAIRS)
    return frozenset(order for a, b in chosen for order in ((a, b), (b, a)))


def rows(split: str, form: AnswerFormat = PLAIN, credit: float = 0.0, shots: int = 0) -> Iterator[dict[str, Any]]:
    """Return the prompts of a split: `train` (65), `val` (16) or `all` (81).

    Args:
        split: The split.
        form: How answers are to be written.
        credit: Score of a wrong answer in that format.
        shots: Number of solved examples before each sum, which are other sums of the training.

    Raises:
        DatasetError: No such split.
    """
    return (
        {
            "data_source": DATA_SOURCE,
            "prompt": [*_examples((a, b), form, shots), *_prompt(a, b, form)],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index} | format_info(form, credit),
        }
        for index, (a, b) in enumerate(_sums(split))
    )


def pairs(split: str) -> Iterator[dict[str, Any]]:
    """Return every sum of a split four times, its answer paired with that of another sum.

    Raises:
        DatasetError: No such split.
    """
    return (
        {
            "data_source": f"{DATA_SOURCE}_pairs",
            "prompt": _prompt(a, b),
            "chosen": _answer(a + b),
            "rejected": _answer(_SMALLEST + (a + b - _SMALLEST + error) % (_LARGEST - _SMALLEST + 1)),
        }
        for a, b in _sums(split)
        for error in _ERRORS
    )


def labelled(split: str) -> Iterator[dict[str, Any]]:
    """Return every sum of a split with its answer, labelled true, and with that of another sum, labelled false.

    Raises:
        DatasetError: No such split.
    """
    for pair in pairs(split):
        for side in ("chosen", "rejected"):
            source = f"{DATA_SOURCE}_labelled"
            yield {
                "data_source": source,
                "prompt": pair["prompt"],
                "completion": pair[side],
                "label": side == "chosen",
            }


def answers(split: str) -> Iterator[dict[str, Any]]:
    """Return every sum of a split as a chat with its answer.

    Raises:
        DatasetError: No such split.
    """
    return (
        {"data_source": f"{DATA_SOURCE}_answers", "messages": [*_prompt(a, b), *_answer(a + b)]}
        for a, b in _sums(split)
    )


def _sums(split: str) -> list[tuple[int, int]]:
    if split not in SPLITS:
        raise DatasetError(f"unknown split {split!r} of bundled:addition; there are: {', '.join(SPLITS)}")
    kept_back = held_out()
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    return [s for s in sums if split == "all" or (s in kept_back) == (split == "val")]


def _examples(asked: tuple[int, int], form: AnswerFormat, shots: int) -> list[dict[str, str]]:
    others = [(a, b) for a, b in _sums("train") if (a, b) != asked and (b, a) != asked]
    shown = random.Random(_SHOWN_SEED).sample(others, shots)
    return [turn for a, b in shown for turn in (*_prompt(a, b, form), *_answer(form.write(a + b)))]


def _prompt(a: int, b: int, form: AnswerFormat = PLAIN) -> list[dict[str, str]]:
    instruction = "Answer with the final number only." if form is PLAIN else form.instruction
    return [{"role": "user", "content": f"What is {a} + {b}? {instruction}"}]


def _answer(number: object) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": str(number)}]
