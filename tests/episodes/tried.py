"""Environments for tests of a trial: one that keeps to everything, and one for each thing that can be wrong."""

import asyncio
import itertools
import json
import random
import time
import urllib.request

import hrl
from hrl.environments.agent import AgentEnvironment

_shared = random.Random(7)
_numbers = itertools.count()


class Good(hrl.Environment):
    """The policy guesses a number."""

    def reset(self, row, seed):
        self.secret = random.Random(seed).randint(10, 99)
        return f"Guess. {row.get('hint', '')}"

    def step(self, action):
        is_last = action.turn == 1
        return hrl.StepResult(f"It was {self.secret}.", reward=0.5, done=is_last, metrics={"turn": action.turn})


class Unseeded(Good):
    def reset(self, row, seed):
        self.secret = 0
        return f"Guess between 1 and {next(_numbers)}."


class Shared(Good):
    """The same alone, as each episode seeds the generator, and not while others draw from it."""

    async def reset(self, row, seed):
        self.secret = 0
        _shared.seed(seed)
        await asyncio.sleep(0.05)
        return f"Guess from {_shared.random()}."


class ChangesItsRewards(Good):
    def step(self, action):
        return hrl.StepResult("Go on.", reward=float(next(_numbers)), done=action.turn == 1)


class Breaks(Good):
    def step(self, action):
        return {"reward": 1.0}


class Unpaid(Good):
    def step(self, action):
        return hrl.StepResult(done=True)


class ClosesBadly(Good):
    def close(self):
        raise ZeroDivisionError("at the end")


class Hangs(Good):
    def step(self, action):
        time.sleep(1000)


class HangsOnce(Good):
    """And does not close well where it does not hang."""

    def step(self, action):
        if self.secret % 2:
            time.sleep(1000)
        return super().step(action)

    def close(self):
        raise ZeroDivisionError("at the end")


class Unmade(Good):
    def __init__(self):
        raise RuntimeError("no licence")


class NeverDone(Good):
    def step(self, action):
        return hrl.StepResult("Go on.", reward=0.25)


class Talks(Good):
    def step(self, action):
        return hrl.StepResult("word " * 300, reward=0.0, done=action.turn == 1)


class Tools(hrl.ToolEnvironment):
    def reset(self, row):
        return "Use your tool."

    @hrl.tool
    def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Another.
        """
        return a + b

    def answered(self, action):
        return 1.0


class Described(Tools):
    def reset(self, row):
        return "To add, write a call of add with a and b."


class NoTools(hrl.ToolEnvironment):
    def answered(self, action):
        return 1.0


class Reads(Good):
    def reset(self, row):
        return row["hnt"]


class Agent(AgentEnvironment):
    """Asks twice, with nothing but the standard library."""

    def run(self, row, client):
        messages = list(row["prompt"])
        for more in ("more", None):
            body = json.dumps({"model": client.model, "messages": messages}).encode()
            headers = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
            asked = urllib.request.Request(f"{client.base_url}/chat/completions", body, headers)
            with urllib.request.urlopen(asked, timeout=600) as answer:
                said = json.load(answer)["choices"][0]["message"]
            messages += [said, {"role": "user", "content": more}]
        return 0.25


class ClosesIdleOnly(AgentEnvironment):
    """Closes well at the end of its program, and not while that waits for the policy."""

    async def run(self, row, client):
        self.is_done = False
        await asyncio.to_thread(Agent.run, self, row, client)
        self.is_done = True
        return 0.25

    async def close(self):
        await super().close()
        if not self.is_done:
            raise RuntimeError("at work")
