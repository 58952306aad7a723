"""The first word of a run's arguments: which algorithm is meant."""

from __future__ import annotations

from collections.abc import Sequence

from hrl.errors import ConfigError, Problem
from hrl.nearest import did_you_mean

ALGORITHMS = {"ppo": "ppo", "grpo": "ppo", "dpo": "dpo", "sft": "sft", "rm": "rm"}
"""Word after `hrl train` and `hrl check` → kind of run."""
_RECIPES = ("ppo", "grpo")
_PROGRAMS = {f"hrl.trainer.main_{kind}": kind for kind in ALGORITHMS.values()} | {"verl.trainer.main_ppo": "ppo"}
"""Module of a launch line → kind of run; verl's has the same keys."""


def kind_and_arguments(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the kind of run and its arguments, also of a whole launch line.

    `grpo` and `ppo` stand for the recipe of this name, as `hrl.GRPO` and `hrl.PPO` do in Python; another `recipe=…`
    takes its place. Without a word, the kind is `ppo` and every value is the default's.

    Args:
        words: A word of `ALGORITHMS` or none, then the arguments of the run; or these after `hrl train`, or after
            `python -m hrl.trainer.main_ppo` and its like.

    Raises:
        ConfigError: The first word is another one.
    """
    for place, word in enumerate(words):
        if word in _PROGRAMS:
            return _PROGRAMS[word], list(words[place + 1 :])
    if list(words[:2]) == ["hrl", "train"]:
        words = words[2:]
    if not words or words[0] not in ALGORITHMS:
        # a word, and neither `key=value`, also with blanks around the sign, nor an option
        if words and words[0].replace("_", "").isalpha() and not "".join(words[1:2]).startswith("="):
            hint = did_you_mean(words[0], ALGORITHMS, f"There are {', '.join(ALGORITHMS)}.")
            raise ConfigError([Problem(words[0], "is no algorithm.", hint)])
        return "ppo", list(words)
    word, *arguments = words
    if word in _RECIPES and not any(argument.lstrip("+").startswith("recipe=") for argument in arguments):
        arguments = [f"recipe={word}", *arguments]
    return ALGORITHMS[word], arguments
