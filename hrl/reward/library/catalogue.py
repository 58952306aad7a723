"""The library: every reward function that `reward.functions` can name, with an example; `hrl reward` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hrl.nearest import did_you_mean
from hrl.reward.library.answer import Answer, wrong_answer
from hrl.reward.library.base import ArgumentError, CatalogueEntry, Example, Function
from hrl.reward.library.code import Code
from hrl.reward.library.json_schema import JsonSchema
from hrl.reward.library.judge import Judge
from hrl.reward.library.language import Language
from hrl.reward.library.length import Length
from hrl.reward.library.pattern import Pattern
from hrl.reward.library.remote import Remote
from hrl.reward.library.repetition import Repetition
from hrl.reward.library.tags import Tags
from hrl.reward.scorers import math_equal, math_text, multiple_choice, numbers, question_answering, reasoning_gym
from hrl.reward.scorers.base import Scorer
from hrl.reward.scorers.programs import NO_PROGRAM

_SUM = {"prompt": "What is 7 + 5?", "answer": "12"}


def _compares(name: str, rewards: str, scorer: Scorer | None, example: Example, **others: Any) -> CatalogueEntry:
    def make() -> Function:
        return Answer(scorer)

    wrong = 0.0 if scorer is None else wrong_answer(scorer)
    return CatalogueEntry(name, rewards, make, example, needs_answer=True, wrong=wrong, **others)


_ENTRIES = (
    _compares(
        "data_source",
        "What the built-in function of the row's data source rewards.",
        None,
        Example("The answer is 12.", 1.0, {**_SUM, "data_source": "numeric"}),
        scores="as that function",
    ),
    _compares(
        "numeric",
        "One number, stated as the answer, boxed, or concluded from a calculation.",
        numbers.NUMERIC,
        Example("7 + 5 = 12", 1.0, _SUM),
    ),
    _compares(
        "gsm8k",
        "The number behind `####`, as in GSM8K.",
        numbers.GSM8K,
        Example("7 and 5 make 12.\n#### 12", 1.0, _SUM),
    ),
    _compares(
        "gsm8k_flexible",
        "The last number of the last 300 characters, whatever it stands for.",
        numbers.GSM8K_FLEXIBLE,
        Example("I count 12", 1.0, _SUM),
    ),
    _compares(
        "math_verify",
        "A mathematical expression, boxed or stated as the answer, that equals the truth by value.",
        math_equal.MATH_VERIFY,
        Example(r"So it is \boxed{\frac{6}{8}}.", 1.0, {"prompt": "What is 1/2 + 1/4?", "answer": "0.75"}),
        needs="math-verify",
    ),
    _compares(
        "math_dapo",
        "The line `Answer: …`, else a box, in Minerva's normal form, as DAPO pays it.",
        math_text.DAPO,
        Example("Answer: $12$", 1.0, _SUM),
        scores="1 or -1",
    ),
    _compares(
        "multiple_choice",
        "The letter of the right choice, and no other letter.",
        multiple_choice.MULTIPLE_CHOICE,
        Example("The answer is (B) Paris.", 1.0, {"prompt": "Capital of France? A) Rome B) Paris", "answer": "B"}),
    ),
    _compares(
        "exact_match",
        "The text in `<answer>…</answer>`, equal to one of the answers but for case, articles and punctuation.",
        question_answering.EXACT_MATCH,
        Example("<answer>The Eiffel Tower</answer>", 1.0, {"prompt": "What is it?", "answer": ["Eiffel tower"]}),
        scores="1, 0.25 with more than ten tags, or 0",
    ),
    _compares(
        "reasoning_gym",
        "What the row's task of reasoning-gym pays for the text in `<answer>…</answer>`.",
        reasoning_gym.REASONING_GYM,
        Example(
            "<answer>12</answer>",
            1.0,
            {
                "prompt": "7 + 5 =",
                "data_source": "reasoning_gym/chain_sum",
                "reward_model": {"ground_truth": {"question": "7 + 5 =", "answer": "12", "metadata": {}}},
                "extra_info": {"parameters": {"seed": 0, "size": 1}},
            },
        ),
        scores="0 to 1",
        needs="reasoning-gym",
    ),
    CatalogueEntry(
        "code",
        "A program, fenced, that passes the row's tests in a sandbox.",
        Code,
        Example(
            "```python\nprint(sum(map(int, input().split())))\n```",
            1.0,
            {"prompt": "Read two numbers and print their sum.", "answer": '{"inputs": ["7 5"], "outputs": ["12"]}'},
        ),
        scores="0 or 1; 0 to 1 with `partial`",
        needs_answer=True,
        wrong=NO_PROGRAM,
    ),
    CatalogueEntry(
        "regex",
        "A text in which a regular expression matches, in one place.",
        Pattern,
        Example("Yes, it is.", 1.0, {"prompt": "Is 7 prime?"}, {"pattern": r"^(yes|no)\b", "ignore_case": True}),
    ),
    CatalogueEntry(
        "tags",
        "A response of tags in order, by default `<think>…</think><answer>…</answer>`.",
        Tags,
        Example("<think>7 and 5</think> <answer>12</answer>", 1.0, _SUM),
        scores="0 or 1; 0 to 1 with `partial`",
    ),
    CatalogueEntry(
        "length",
        "A number of words or characters between two bounds.",
        Length,
        Example("It is twelve, as I know.", 0.5, _SUM, {"most": 5}),
        scores="0 to 1; -1 to 0 with `penalty`",
    ),
    CatalogueEntry(
        "repetition",
        "Takes away for sequences of words that come again.",
        Repetition,
        Example("so it is so it is so it is", -4 / 7, _SUM),
        scores="-1 to 0",
    ),
    CatalogueEntry(
        "language",
        "The share of the text that is in one language.",
        Language,
        Example("Die Antwort auf diese Frage ist zwölf.", 1.0, _SUM, {"language": "de"}),
        scores="0 to 1",
        needs="py3langid",
    ),
    CatalogueEntry(
        "json_schema",
        "One JSON value that a JSON Schema accepts.",
        JsonSchema,
        Example(
            '{"name": "Ada"}',
            1.0,
            {"prompt": "Who wrote the first program? Answer in JSON."},
            {"schema": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}},
        ),
    ),
    CatalogueEntry(
        "judge",
        "What another language model says about the response, asked over an OpenAI-compatible endpoint.",
        Judge,
        Example(
            "",
            0.0,
            {"prompt": "Why is the sky blue?"},
            {"model": "Qwen/Qwen3-32B", "base_url": "http://localhost:8000/v1"},
        ),
        scores="0 to 1",
        needs="aiohttp",
    ),
    CatalogueEntry(
        "remote",
        "What a reward server says: OpenRLHF's, or a reward model behind vLLM or SGLang.",
        Remote,
        Example("", None, {"prompt": "Why is the sky blue?"}, {"url": "http://localhost:5000/get_reward"}),
        scores="as the server",
        needs="aiohttp",
    ),
)
CATALOGUE: dict[str, CatalogueEntry] = {entry.name: entry for entry in _ENTRIES}
"""Name → function."""


def make(name: str, arguments: Mapping[str, Any]) -> Function:
    """Make a function of the library.

    Raises:
        ArgumentError: It does not take an argument, lacks one, or can't do with its value.
        ImportError: A package is missing.
    """
    entry = CATALOGUE[name]
    known = {one.name: one for one in entry.arguments}
    for argument in arguments:
        if argument not in known:
            hint = did_you_mean(argument, known, f"It takes {', '.join(known) or 'no arguments'}.")
            raise ArgumentError(f"does not take {argument}. {hint}")
    lacking = [one for one in known.values() if one.is_required and one.name not in arguments]
    if lacking:
        listed = "; ".join(f"{one.name} ({one.meaning.rstrip('.')})" for one in lacking)
        raise ArgumentError(f"needs an argument more: {listed}")
    try:
        return entry.make(**arguments)
    except TypeError as error:  # an argument of another type than the function works with
        raise ArgumentError(f"can't be made with {', '.join(arguments)}: {error}") from error
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}. It needs a package: pip install {entry.needs}") from error
