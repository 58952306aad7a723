"""Environments and tools in a file, for tests of how they are loaded."""

import hrl
from hrl.environments.registry import register

loaded = []
loaded.append(1)


class World(hrl.SingleTurn):
    def __init__(self, size: int = 3) -> None:
        self.size = size


class Unfinished(hrl.Environment):
    pass


class NoRow(hrl.SingleTurn):
    def reset(self):
        return "?"


class OfGymnasium(hrl.SingleTurn):
    def reset(self, *, seed=None, options=None):
        return "?", {}


class TwoOfStep(hrl.SingleTurn):
    def step(self, action, state):
        return state


class Tools(hrl.ToolEnvironment):
    @hrl.tool
    def own(self) -> str:
        return "own"


def small() -> World:
    return World(1)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def bad(*numbers: int) -> int:
    return sum(numbers)


number = 3
register("big_world", World, "a large one")
