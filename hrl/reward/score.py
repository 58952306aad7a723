"""The built-in reward functions, chosen by a row's `data_source`.

If verl has a function for a data source, the one here rewards the same answers in the same format with the same
numbers, and is stricter in one respect: the final answer must be explicit and single (`scorers.final_answer`).
They run in the reward pool's processes, so importing this module must stay cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hrl.data.tasks.reasoning_gym import DATA_SOURCE_PREFIX as REASONING_GYM
from hrl.nearest import nearest
from hrl.reward.scorers import (
    answer_format,
    math_equal,
    math_graded,
    math_text,
    multiple_choice,
    numbers,
    programs,
    question_answering,
    reasoning_gym,
)
from hrl.reward.scorers.base import Reward, Scorer

_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
PROGRAMS = ("codecontests", "apps", "codeforces", "taco", "livecodebench", "code")
"""Data sources whose answers are programs."""
_SEARCH = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")

SCORERS: dict[str, Scorer] = {
    "numeric": numbers.NUMERIC,
    "bundled/addition": answer_format.in_format(numbers.NUMERIC),
    "bundled/shapes": numbers.NUMERIC,
    "gsm8k": numbers.GSM8K,
    "openai/gsm8k": numbers.GSM8K,
    "gsm8k_flexible": numbers.GSM8K_FLEXIBLE,
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), math_text.MATH),
    **dict.fromkeys(("math", "math_dapo", "math_dapo_reasoning"), math_text.DAPO),
    "math_verify": math_equal.MATH_VERIFY,
    "multiple_choice": multiple_choice.MULTIPLE_CHOICE,
    **{f"numina_{name}": math_graded.NUMINA for name in _NUMINA},
    "hiyouga/geometry3k": math_graded.GEOMETRY,
    **{f"searchR1_{name}": question_answering.EXACT_MATCH for name in _SEARCH},
    **dict.fromkeys(PROGRAMS, programs.PROGRAMS),
}
"""Exact data source → scorer. The short names are for use in your own rows."""

PREFIXES: dict[str, Scorer] = {"aime": math_text.DAPO, REASONING_GYM: reasoning_gym.REASONING_GYM}
"""Prefix of a data source → scorer."""

_OWN = "Give a function of your own with reward.custom_reward_function.path"


def why_no_scorer(data_source: str) -> str | None:
    """Return why no built-in function scores a data source, and what to do; None if one does."""
    if data_source in SCORERS or data_source.startswith(tuple(PREFIXES)):
        return None
    near = nearest(data_source, SCORERS)
    known = [*sorted(SCORERS), *(f"{prefix}…" for prefix in sorted(PREFIXES))]
    return (
        f"no built-in reward function for data_source {data_source!r}"
        + (f" (did you mean {near[0]!r}?)" if near else "")
        + f"; there are: {', '.join(known)}. {_OWN}, or name the rule of a built-in one as the data "
        "source of the row or of its file ({path: rows.csv, data_source: numeric})"
    )


def find_scorer(data_source: str) -> Scorer:
    """Return the built-in function for a data source.

    Raises:
        ValueError: There is none; names those that exist and the way to bring your own.
    """
    if (reason := why_no_scorer(data_source)) is not None:
        raise ValueError(reason)
    if data_source in SCORERS:
        return SCORERS[data_source]
    return next(scorer for prefix, scorer in PREFIXES.items() if data_source.startswith(prefix))


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> Reward:
    """Score a response by the built-in function of its data source; in a run `library.answer.Answer` does.

    Args:
        data_source: Data source of the prompt's row; it chooses the function.
        solution_str: The response's text.
        ground_truth: Ground truth of the row.
        extra_info: Extra info of the row.

    Raises:
        ValueError: There is no such function, or it can't read the ground truth. Exceptions that a response causes are
            passed on.
    """
    scorer = find_scorer(data_source)
    return scorer.score(solution_str, scorer.read_truth(data_source, ground_truth, extra_info or {}))
