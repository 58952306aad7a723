"""The launch line of a run: what is read of it, and the line that another layout is started with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hrl.config.compose import TRAIN_FILES, compose_kind
from hrl.config.override import as_override
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import PPO
from hrl.errors import ConfigError, RefusedError
from hrl.plan.layout import Changes

_MODULE = "hrl.trainer.main_ppo"
_NO_ROWS = "rows.jsonl"


class PlanError(RefusedError, ValueError):
    """There is nothing to plan: another kind of run, a number of devices that no machines have, or no layout fits."""


@dataclass(frozen=True)
class LaunchLine:
    """A launch line of a PPO run.

    Attributes:
        program: The words that start the program, such as `hrl train grpo`.
        arguments: `key=value` and `--config-…`, as they were typed.
        implied: What the program's words stand for, `recipe=grpo`.
    """

    program: tuple[str, ...]
    arguments: tuple[str, ...]
    implied: tuple[str, ...] = ()

    @classmethod
    def of(cls, words: Sequence[str]) -> LaunchLine:
        """Read the words of `python -m hrl.trainer.main_ppo key=value …`, `hrl train grpo key=value …` or the rest.

        Raises:
            PlanError: The line is of another kind of run.
        """
        rest = list(words)
        if _MODULE in rest:
            start = rest.index(_MODULE) + 1
            return cls(tuple(rest[:start]), tuple(rest[start:]))
        if rest[:2] == ["hrl", "train"]:
            rest = rest[2:]
        if rest and re.match(r"python|torchrun|accelerate", Path(rest[0]).name):
            raise PlanError(
                f"{shlex.join(rest[:3])} … can't be planned: only python -m {_MODULE} … and hrl train … can"
            )
        word = rest.pop(0) if rest and re.fullmatch(r"[a-z]+", rest[0]) else "ppo"
        if word not in ("grpo", "ppo"):
            raise PlanError(f"{word} can't be planned: only runs that sample can, hrl plan grpo … or hrl plan ppo …")
        is_named = len(words) > 0 and word in words
        recipe = is_named and not any(argument.startswith("recipe=") for argument in rest)
        return cls(("hrl", "train", *([word] if is_named else [])), tuple(rest), (f"recipe={word}",) * recipe)

    def config(self) -> PPOTrainerConfig:
        """Return the validated configuration. A plan opens no rows, so it needs none to be named.

        Raises:
            ConfigError: It is none.
        """
        words = [*self.implied, *self.arguments]
        try:
            return compose_kind(PPO, words)
        except ConfigError as error:
            if TRAIN_FILES not in {problem.key for problem in error.problems} or self.value_of(TRAIN_FILES) is not None:
                raise
        return compose_kind(PPO, [*words, f"{TRAIN_FILES}={_NO_ROWS}"])

    @property
    def names_rows(self) -> bool:
        """Whether the run would find its rows: the line or its YAML file names them, or they are the bundled ones."""
        return self.config().data.train_files != [_NO_ROWS]

    def value_of(self, key: str) -> str | None:
        """Return the text that the line gives to a key, the last if there are several; None if it has none."""
        texts = [text for name, _, text in (argument.partition("=") for argument in self.arguments) if name == key]
        return texts[-1] if texts else None

    def with_values(self, changes: Changes) -> LaunchLine:
        """Return the line with other values, each in the place where its key stood or else at the end."""
        texts = {key: f"{key}={as_override(value)}" for key, value in changes}
        kept = [argument for argument in self.arguments if argument.lstrip("+").partition("=")[0] not in texts]
        return replace(self, arguments=(*kept, *texts.values()))

    def __str__(self) -> str:
        return shlex.join([*self.program, *self.arguments])
