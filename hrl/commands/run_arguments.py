"""The first word of a run's arguments: which algorithm is meant."""

from __future__ import annotations

from collections.abc import Sequence

ALGORITHMS = {"ppo": "ppo", "grpo": "ppo", "dpo": "dpo", "sft": "sft", "rm": "rm"}
"""Word after `hrl train` and `hrl check` → kind of run."""
_RECIPES = ("ppo", "grpo")


def kind_and_arguments(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the kind of run and its arguments.

    `grpo` and `ppo` stand for the recipe of this name, as `hrl.GRPO` and `hrl.PPO` do in Python; another `recipe=…`
    takes its place. Without a word, the kind is `ppo` and every value is the default's.

    Args:
        words: A word of `ALGORITHMS` or none, then the arguments of the run.
    """
    if not words or words[0] not in ALGORITHMS:
        return "ppo", list(words)
    word, *arguments = words
    if word in _RECIPES and not any(argument.lstrip("+").startswith("recipe=") for argument in arguments):
        arguments = [f"recipe={word}", *arguments]
    return ALGORITHMS[word], arguments
