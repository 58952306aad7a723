"""A model of 135M parameters learns a guessing game of several turns, in which each turn has its reward.

Run it with `python examples/guess.py`.
"""

import random
import re

import hrl


class Guess(hrl.Environment):
    """Find a number from 1 to 9; each guess is told whether the number is larger or smaller."""

    def reset(self, row, seed):
        """Think of a number."""
        self.secret = random.Random(seed).randint(1, 9)
        return "I think of a number from 1 to 9. Guess it. Answer with a number only."

    def step(self, action):
        """Pay for the number, and charge a little for every guess before it."""
        guess = int((re.findall(r"\d+", action.text) or [0])[0])
        if guess == self.secret:
            return hrl.StepResult(reward=1.0, done=True, metrics={"won": 1.0})
        hint = "It is larger." if guess < self.secret else "It is smaller."
        return hrl.StepResult(f"{hint} Guess again.", reward=-0.2, metrics={"won": 0.0})


if __name__ == "__main__":
    keys = {"algorithm.adv_estimator": "grpo_turns", "environment.max_turns": 4, "environment.max_turn_tokens": 4}
    rows = [{"prompt": "Play."}] * 64
    data = {"data": rows, "val_data": rows, "max_prompt_length": 64, "max_response_length": 128}
    run = hrl.GRPO(environment=Guess, steps=20, test_freq=5, batch_size=8, config=keys, name="guess", **data).train()
    print([step["val/env/won"] for step in run.metrics if "val/env/won" in step])
