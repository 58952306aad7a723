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
    trainer = hrl.GRPO(
        environment=Guess,
        data=[{"prompt": "Play."}] * 64,
        val_data=[{"prompt": "Play."}] * 64,
        steps=20,
        test_freq=5,
        batch_size=8,
        max_prompt_length=64,
        max_response_length=128,
        config={
            "algorithm.adv_estimator": "grpo_turns",
            "environment": {"max_turns": 4, "max_turn_tokens": 4},
        },
        name="guess",
    )
    run = trainer.train()
    first, *_, last = [step["val/env/won"] for step in run.metrics if "val/env/won" in step]
    print(f"games won: {first:.2f} before, {last:.2f} after. {run.report}")
