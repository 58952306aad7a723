"""The built-in reward functions, chosen by a row's `data_source`.

Each has the signature of a user's function, `compute_score(data_source, solution_str, ground_truth, extra_info=None)`,
and gives 1.0 or 0.0. They run in the reward pool's processes: importing this module must stay cheap.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from hrl.data.tasks.reasoning_gym import DATA_SOURCE_PREFIX as REASONING_GYM

Scorer = Callable[..., Any]

_NUMBER = re.compile(r"(?<![0-9A-Za-z.])-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?![0-9])")
_FINAL_ANSWER = re.compile(r"####\s*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?)")
_LONGEST_NUMBER = 64


def score_numeric(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 if the *last* number in the response is the right one.

    Only the last one counts, so that naming many numbers doesn't pay; `7 + 5 = 12` and `The answer is 12.` are both
    right. A minus sign belongs to a number that nothing stands directly in front of; `1,234` is one number.

    Raises:
        ValueError: the ground truth is no number.
    """
    right = _as_number(str(ground_truth))
    if right is None:
        raise ValueError(f"ground truth {ground_truth!r} of data source {data_source!r} is not a number")
    numbers = _NUMBER.findall(solution_str)
    return float(bool(numbers) and _as_number(numbers[-1]) == right)


def score_gsm8k(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 if the last `#### <number>` of the response is the ground truth, which may be a number or a full solution."""
    gold = _FINAL_ANSWER.findall(str(ground_truth)) or [str(ground_truth)]
    right = _as_number(gold[-1])
    if right is None:
        raise ValueError(f"ground truth {ground_truth!r} of data source {data_source!r} is not a number")
    answers = _FINAL_ANSWER.findall(solution_str)
    return float(bool(answers) and _as_number(answers[-1]) == right)


def score_math(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 if the response's final answer is mathematically equal to the ground truth, by math-verify.

    The parsers' own alarms are off: the pool's deadline ends what takes too long, and counts it.

    Raises:
        ValueError: the ground truth can't be parsed.
    """
    from math_verify import parse, verify

    text = str(ground_truth)
    gold = parse(text if "\\boxed" in text or "$" in text else f"${text}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"ground truth {ground_truth!r} of data source {data_source!r} is no mathematical expression")
    answer = parse(solution_str, parsing_timeout=None)
    return float(bool(answer) and verify(gold, answer, timeout_seconds=None))


def _score_reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    from hrl.reward.reasoning_gym import compute_score as score

    return score(data_source, solution_str, ground_truth, extra_info)


SCORERS: dict[str, Scorer] = {
    "bundled/addition": score_numeric,
    "openai/gsm8k": score_gsm8k,
    "gsm8k": score_gsm8k,
    "lighteval/MATH": score_math,
    "DigitalLearningGmbH/MATH-lighteval": score_math,
    "HuggingFaceH4/MATH-500": score_math,
    "numeric": score_numeric,
    "math": score_math,
}
"""By exact data source. The short names are for rows of your own that want one of these rules."""


def find_scorer(data_source: str) -> Scorer:
    """The built-in function for a data source.

    Raises:
        ValueError: there is none; names those that exist and the way to bring your own.
    """
    if data_source.startswith(REASONING_GYM):
        return _score_reasoning_gym
    if data_source not in SCORERS:
        raise ValueError(
            f"no built-in reward function for data_source {data_source!r}; there are: {', '.join(sorted(SCORERS))}, "
            f"{REASONING_GYM}<dataset>. Give your own with reward.custom_reward_function.path"
        )
    return SCORERS[data_source]


def warm_up(data_source: str) -> None:
    """Imports what the data source's scorer needs, so that the first sample's deadline doesn't pay for it."""
    scorer = find_scorer(data_source)
    if scorer is score_math:
        score_math(data_source, "$1$", "1")
    elif scorer is _score_reasoning_gym:
        import reasoning_gym  # noqa: F401


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """Scores a response by the built-in function of its data source."""
    return find_scorer(data_source)(data_source, solution_str, ground_truth, extra_info, **kwargs)


def _as_number(text: str) -> Decimal | None:
    plain = text.strip().replace(",", "")
    if len(plain) > _LONGEST_NUMBER or not re.fullmatch(r"-?[0-9]+(?:\.[0-9]+)?", plain):
        return None
    return Decimal(plain)
