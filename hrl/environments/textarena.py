"""Games of the package textarena for one player."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import textarena

from hrl.environments.global_random import OwnRandom, game_seed
from hrl.environments.interface import Action, Environment, StepResult
from hrl.errors import RefusedError
from hrl.nearest import did_you_mean

_RAW = "-raw"


class GameError(RefusedError, ValueError):
    """A game can't be played; names it and the way out."""


class TextArenaEnvironment(Environment):
    """A game of textarena: the policy is shown what the game says, and what it writes is its move.

    The reward is the game's, of the last turn. Samples of one row play the same game (`bundled:games`).

    Args:
        game: Its name, such as `GuessTheNumber-v0`.
        options: Arguments of the game, such as `max_number=50`.

    Raises:
        GameError: There is no such game, or it is one for several players.
    """

    def __init__(self, game: str, **options: Any) -> None:
        name = game.removesuffix(_RAW)
        if name not in textarena.envs.registration.ENV_REGISTRY:
            known = textarena.envs.registration.ENV_REGISTRY
            names = [one.removesuffix(_RAW) for one in known if one.endswith(_RAW)]
            hint = did_you_mean(name, names, "textarena.pprint_registry() lists them.")
            raise GameError(f"textarena has no game {game!r}. {hint}")
        self._name = name
        # Without the wrappers that repeat the whole game in every turn: the episode has it.
        raw = name + _RAW if name + _RAW in textarena.envs.registration.ENV_REGISTRY else name
        try:
            self._game = textarena.make(raw, **options)
        except TypeError as error:
            raise GameError(f"the game {name} does not take these environment.kwargs: {error}") from error

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Begin the game."""
        self._random = OwnRandom(game_seed(row, seed))
        with self._random.used():
            try:
                # The game seeds the process's generators anew, with what it is given.
                self._game.reset(num_players=1, seed=game_seed(row, seed) % 2**32)
            except AssertionError as error:
                raise GameError(f"the game {self._name} can't be played by one player: {error}") from error
            return self._said()

    def step(self, action: Action) -> StepResult:
        """Make the move that the policy wrote."""
        move = action.answer
        with self._random.used():
            done, _ = self._game.step(action=move if "[" in move and "]" in move else f"[{move.strip()}]")
            if not done:
                return StepResult(self._said())
            rewards, info = self._game.close()
        of_player = info.get(0, {})
        metrics = {"turns_of_game": float(of_player.get("turn_count", 0))}
        metrics["invalid_move"] = float(bool(of_player.get("invalid_move")))
        return StepResult(reward=float((rewards or {}).get(0, 0.0)), done=True, metrics=metrics)

    def _said(self) -> str:
        """Return what the game has said since the last move; the policy's own words are in its turn."""
        _, observations = self._game.get_observation()
        if isinstance(observations, str):
            return observations
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text.strip() for _, text, kind in observations if kind is not own).strip() or "Go on."
