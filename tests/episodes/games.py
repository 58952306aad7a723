"""Environments of the tests of whole episodes."""

from __future__ import annotations

import asyncio
import os
import random

import hrl


class Game(hrl.Environment):
    """Three turns; what it says depends on its seed and on what the policy did."""

    def __init__(self, turns=3, words=0):
        self.turns, self.words = turns, words

    def reset(self, row, seed):
        self.random = random.Random(seed)
        self.row = row
        return [{"role": "user", "content": f"begin {self.random.randrange(100)}"}]

    def step(self, action):
        said = f"{self.random.randrange(100)} {sum(action.token_ids) % 7}" + " word" * self.words
        if action.turn + 1 == self.turns:
            return hrl.StepResult(reward=float(len(action.token_ids)), done=True)
        return hrl.StepResult(said, reward=0.5, metrics={"said": float(len(said))})


class Questions(hrl.Environment):
    """The row's own prompt, and once more."""

    def step(self, action):
        return hrl.StepResult("Again.", done=action.turn == 1)


class Draws(Game):
    """Says what it is given to draw from."""

    def reset(self, row, seed, sample_seed):
        super().reset(row, seed)
        return f"{seed} {sample_seed}"


class Faulty(Game):
    """Does in its second turn what its row says."""

    def step(self, action):
        what = self.row["what"] if action.turn == 1 else ""
        if what == "raise":
            raise KeyError("no such drawer")
        if what == "die":
            os._exit(3)
        if what == "die once" and not os.path.exists(self.row["mark"]):
            open(self.row["mark"], "x").close()
            os._exit(3)
        if what == "stop":
            return hrl.StepResult(done=True, truncated=True)
        return super().step(action)


class Clinging(Game):
    """Takes longer to be closed than a test may take."""

    async def close(self):
        await asyncio.sleep(100.0)


class Slow(Game):
    """Waits in its second turn for longer than an episode may take."""

    async def step(self, action):
        if action.turn == 1:
            await asyncio.sleep(60.0)
        return super().step(action)


class Metered(Game):
    """Pays by token in its second turn: 1 for the first token, 0.5 for the others."""

    def step(self, action):
        result = super().step(action)
        if action.turn != 1:
            return result
        rewards = [1.0] + [0.5] * (len(action.token_ids) - 1)
        return hrl.StepResult(result.observation, reward=rewards[: self.row.get("most")])
