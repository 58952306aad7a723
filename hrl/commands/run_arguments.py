"""The first word of a run's arguments: which algorithm is meant."""

from __future__ import annotations

from collections.abc import Sequence

from hrl.errors import ConfigError, Problem
from hrl.nearest import did_you_mean

ALGORITHMS = {"ppo": "ppo", "grpo": "ppo", "dpo": "dpo", "kto": "dpo", "sft": "sft", "rm": "rm"}
"""Word after `hrl train` and `hrl check` → kind of run."""
_PROGRAMS = {f"hrl.trainer.main_{kind}": kind for kind in ALGORITHMS.values()} | {"verl.trainer.main_ppo": "ppo"}
"""Module of a launch line → kind of run; verl's has the same keys."""


def named_algorithm(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the kind of run of a run's arguments, and the words with which it can be named: the one that was, or all.

    Raises:
        ConfigError: The first word is another one.
    """
    kind, _ = kind_and_arguments(words)
    return kind, [word for word in words[:1] if word in ALGORITHMS] or [*ALGORITHMS]


def kind_and_arguments(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the kind of run and its arguments, also of a whole launch line.

    `grpo` and `ppo` stand for the recipe of this name and `kto` for the loss, as `hrl.GRPO`, `hrl.PPO` and `hrl.KTO` do
    in Python; another `recipe=…` or `algorithm.loss_type=…` takes its place. Without a word, the kind is `ppo` and
    every value is the default's.

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
    from hrl.config.run_kind import KTO  # not above: completion reads the words alone, and is quick

    stands_for = {"ppo": {"recipe": "ppo"}, "grpo": {"recipe": "grpo"}, "kto": KTO}
    given = {argument.lstrip("+").partition("=")[0] for argument in arguments}
    chosen = [f"{key}={value}" for key, value in stands_for.get(word, {}).items() if key not in given]
    return ALGORITHMS[word], [*chosen, *arguments]
