"""A model of 135M parameters learns to read the signs of a maze: `python examples/maze.py`.

In each of three rooms a sign says which door is locked. Who does not read comes out once in eight times.
"""

import random

import hrl

DOORS = ("left", "right")
SIGN = "The {} door is locked. Which door do you take? Answer left or right."


class Maze(hrl.Environment):
    """Three rooms with two doors each; the locked one ends the game, and the other leads on."""

    def reset(self, row, seed):
        """Draw which doors are locked."""
        draw = random.Random(seed)
        self.locked = [draw.choice(DOORS) for _ in range(3)]
        return f"You are in a maze. {SIGN.format(self.locked[0])}"

    def step(self, action):
        """Pay for each open door, and more for the way out."""
        taken = [door for door in DOORS if door in action.text.lower()]
        if taken != [door for door in DOORS if door != self.locked[action.turn]]:
            return hrl.StepResult(reward=0.0, done=True, metrics={"out": 0.0})
        if action.turn == 2:
            return hrl.StepResult(reward=1.0, done=True, metrics={"out": 1.0})
        return hrl.StepResult(f"It opens. {SIGN.format(self.locked[action.turn + 1])}", reward=0.3)


if __name__ == "__main__":
    keys = {"algorithm.adv_estimator": "grpo_turns", "environment.max_turns": 3, "environment.max_turn_tokens": 6}
    rows = [{"prompt": "Play."}] * 64
    data = {"data": rows, "val_data": rows, "max_prompt_length": 72, "max_response_length": 160}
    run = hrl.GRPO(environment=Maze, steps=20, test_freq=5, batch_size=8, config=keys, name="maze", **data).train()
    print([step["val/env/out"] for step in run.metrics if "val/env/out" in step])
