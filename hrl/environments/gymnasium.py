"""Environments of gymnasium that can be told in text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from hrl.environments.global_random import game_seed
from hrl.environments.interface import Action, Environment, StepResult
from hrl.errors import RefusedError

_TEXT_MODE = "ansi"
_COLOURED = re.compile(r"\x1b\[4\dm(.*?)\x1b\[0m")
"""What is marked by the colour behind it: where the player is."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


class GymnasiumError(RefusedError, ValueError):
    """An environment of gymnasium can't be told in text; names it and the way out."""


class GymnasiumEnvironment(Environment):
    """An environment of gymnasium: the policy is shown its picture as text, and names an action.

    Observations are texts, or the environment draws itself as text (`render_mode="ansi"`); actions are texts or one of
    a few, which get names. Rewards are those of its steps. Samples of one row play the same game (`bundled:games`).

    Args:
        id: Its name, such as `FrozenLake-v1`; `module:name` imports the module that registers it.
        actions: Names of the actions, in the order of their numbers; the numbers themselves by default.
        prompt: What the policy is told before the first observation.
        options: Arguments of the environment, such as `is_slippery=false`.

    Raises:
        GymnasiumError: There is no such environment, or it can't be told in text.
    """

    def __init__(self, id: str, actions: Sequence[str] | None = None, prompt: str = "", **options: Any) -> None:
        try:
            made = self._make(id, options)
        except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
            raise GymnasiumError(f"gymnasium can't make {id!r} with these environment.kwargs: {error}") from error
        self._id, self._made, self._prompt = id, made, prompt
        self._draws = made.render_mode == _TEXT_MODE
        if not self._draws and not isinstance(made.observation_space, gymnasium.spaces.Text):
            raise GymnasiumError(
                f"{id} shows {type(made.observation_space).__name__} and draws no text, so that no language model can "
                "see it: choose one whose observations are texts, or write an environment around it"
            )
        self._names = self._names_of(made.action_space, actions)

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Begin the game."""
        observation, _ = self._made.reset(seed=game_seed(row, seed) % 2**31)
        asked = f"Answer with one of: {', '.join(self._names)}." if self._names else ""
        return "\n\n".join(part for part in (self._prompt, self._shown(observation), asked) if part)

    def step(self, action: Action) -> StepResult:
        """Make the move that the policy named."""
        written = action.answer
        chosen: Any = written.strip()
        if self._names:
            chosen = chosen_of(written, self._names)
            if chosen is None:
                return StepResult(f"Answer with one of: {', '.join(self._names)}.", reward=0.0)
        observation, reward, terminated, truncated, _ = self._made.step(chosen)
        done = bool(terminated or truncated)
        return StepResult(
            None if done else self._shown(observation),
            reward=float(reward),
            done=done,
            truncated=bool(truncated and not terminated),
        )

    def close(self) -> None:
        """Close it."""
        self._made.close()

    @staticmethod
    def _make(id: str, options: Mapping[str, Any]) -> Any:
        if "render_mode" in options:
            return gymnasium.make(id, **options)
        made = gymnasium.make(id, **options)
        if _TEXT_MODE not in made.metadata.get("render_modes", ()):
            return made
        made.close()
        return gymnasium.make(id, render_mode=_TEXT_MODE, **options)

    def _names_of(self, space: Any, actions: Sequence[str] | None) -> list[str]:
        if isinstance(space, gymnasium.spaces.Text):
            return []
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise GymnasiumError(f"the actions of {self._id} are {space}, where texts or one of a few are expected")
        names = [str(number) for number in range(int(space.n))] if actions is None else list(actions)
        if len(names) != space.n or len({name.lower() for name in names}) != space.n:
            raise GymnasiumError(
                f"environment.kwargs.actions has {', '.join(names)}, and {self._id} has {space.n} actions: give each a "
                "name of its own"
            )
        return names

    def _shown(self, observation: Any) -> str:
        if not self._draws:
            return str(observation)
        return _ESCAPES.sub("", _COLOURED.sub(r"[\1]", str(self._made.render()))).strip("\n")


def chosen_of(written: str, names: Sequence[str]) -> int | None:
    """Return the number of the action that a text names, in its last brackets or else last in it; None for none."""
    lowered = [name.lower() for name in names]
    brackets = _BRACKETS.findall(written)
    if brackets and brackets[-1].strip().lower() in lowered:
        return lowered.index(brackets[-1].strip().lower())
    pattern = "|".join(sorted(map(re.escape, lowered), key=len, reverse=True))
    found = re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", written.lower())
    return lowered.index(found[-1]) if found else None
