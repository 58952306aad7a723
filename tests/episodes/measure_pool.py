"""What environment processes cost: `python -m tests.episodes.measure_pool [episodes] [turns] [processes]`.

Episodes of environments that do next to nothing run at the same time; what is left is the way of a turn from the caller
into the process and back. Memory is that of the processes while all episodes are open, above that with none.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time

import psutil

import hrl
from hrl.config.environment import EnvironmentConfig
from hrl.environments.interface import Action, ToolCall
from hrl.environments.loading import EnvironmentSpec
from hrl.episodes.pool import EnvironmentPool

ROW = {"prompt": [{"role": "user", "content": "What is 12 * 34? " * 10}], "data_source": "x"}
ACTION = Action(
    "I call the tool. " * 10, tuple(range(60)), "", None, (ToolCall("multiply", {"a": 12, "b": 34}, "call-1"),)
)


class Plain(hrl.Environment):
    def __init__(self) -> None:
        self.turns = 0

    def step(self, action: Action) -> hrl.StepResult:
        self.turns += 1
        return hrl.StepResult("A hint. " * 10, reward=0.5)


class Async(Plain):
    async def reset(self, row):
        return row["prompt"]

    async def step(self, action):
        return super().step(action)

    async def close(self):
        pass


class Waiting(Async):
    async def step(self, action):
        await asyncio.sleep(0.5)
        return await super().step(action)


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def multiply_async(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


multiply_async.__name__ = "multiply"


async def measure(title: str, given: object, episodes: int, turns: int, processes: int) -> None:
    settings = EnvironmentConfig(num_workers=processes, step_timeout_s=60.0)
    async with EnvironmentPool(EnvironmentSpec.of(None, given=given), settings) as pool:
        children = [psutil.Process(process.pid) for process in pool._processes]
        warm = pool.open("warm", ROW, 0)
        await warm.reset()
        await warm.close()
        before = sum(child.memory_info().rss for child in children)
        opened = [pool.open(number, ROW, number) for number in range(episodes)]
        begun = time.perf_counter()
        await asyncio.gather(*(one.reset() for one in opened))
        reset_s = time.perf_counter() - begun
        own_before, children_before = _cpu_s(), sum(_cpu_of(child) for child in children)
        begun = time.perf_counter()

        async def play(one):
            for _ in range(turns):
                await one.step(ACTION)

        await asyncio.gather(*map(play, opened))
        turn_s = (time.perf_counter() - begun) / (episodes * turns)
        own_s = (_cpu_s() - own_before) / (episodes * turns)
        children_s = (sum(_cpu_of(child) for child in children) - children_before) / (episodes * turns)
        after = sum(child.memory_info().rss for child in children)
        threads = sum(child.num_threads() for child in children)
        begun = time.perf_counter()
        await asyncio.gather(*(one.close() for one in opened))
        close_s = time.perf_counter() - begun
        assert pool.counts.failures == pool.counts.timeouts == pool.counts.lost_processes == 0
    sys.stdout.write(
        f"{title:22} {turn_s * 1e6:7.0f} µs a turn ({own_s * 1e6:.0f} of the caller, {children_s * 1e6:.0f} of the "
        f"processes), reset {reset_s / episodes * 1e6:.0f} µs, close {close_s / episodes * 1e6:.0f} µs; "
        f"{(after - before) / episodes / 1024:.1f} KiB an episode, {before / processes / 2**20:.0f} MiB a process, "
        f"{threads} threads\n"
    )


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _cpu_of(child: psutil.Process) -> float:
    times = child.cpu_times()
    return times.user + times.system


def main() -> None:
    episodes, turns, processes = (int(text) for text in (*sys.argv[1:], *("1000", "10", "2")[len(sys.argv) - 1 :]))
    for title, given in (
        ("async", Async),
        ("plain", Plain),
        ("async, waits 0.5 s", Waiting),
        ("async tool", [multiply_async]),
        ("plain tool", [multiply]),
    ):
        asyncio.run(measure(title, given, episodes, turns, processes))


if __name__ == "__main__":
    main()
