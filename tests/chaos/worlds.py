"""Environments whose tools do harm; processes of the faults load this file."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import hrl


class World(hrl.ToolEnvironment):
    def reset(self, row, seed):
        self.total = seed
        return row["prompt"]

    @hrl.tool
    def add(self, number: int) -> int:
        self.total += number
        return self.total

    @hrl.tool
    async def look(self) -> int:
        await asyncio.sleep(0.01)
        return self.total

    @hrl.tool
    def plainly(self, what: str) -> str:
        return do(what)

    @hrl.tool
    async def asynchronously(self, what: str) -> str:
        if what == "sleep":
            await asyncio.sleep(1000)
        return do(what)


class Called(World):
    """Three turns, in each of which the policy is taken to have called a tool; in a row that says so, another one.

    It says what `World` does, so that the episodes of other rows are what they are without it.
    """

    def reset(self, row, seed):
        self.total, self.what = seed % 10, row["what"]
        if self.what == "reset: sleep":
            time.sleep(1000)
        return [{"role": "user", "content": f"begin {seed % 1000}"}]

    async def step(self, action):
        call = hrl.ToolCall("add", {"number": action.turn}, "a")
        if action.turn == 1 and self.what.startswith("step: "):
            do(self.what.removeprefix("step: "))
        elif action.turn == 1 and self.what:
            call = hrl.ToolCall("plainly", {"what": self.what}, "a")
        result = await super().step(replace(action, tool_calls=(call,)))
        return replace(result, reward=len(set(action.text)) / 10, done=action.turn == 2)


class Marking(Called):
    """Takes a while, and leaves a mark in each turn, by which others know that episodes are being played."""

    def __init__(self, mark):
        self.mark = Path(mark)

    async def step(self, action):
        self.mark.touch()
        await asyncio.sleep(0.02)
        return await super().step(action)


class Varied(Called):
    """Begins with its row's prompt, so that episodes are of many lengths."""

    def reset(self, row, seed):
        super().reset(row, seed)
        return row["prompt"]


class Meeting(Varied):
    """All calls of `reset` meet: a process has as many threads as calls ever did, which chance would decide."""

    def reset(self, row, seed):
        time.sleep(0.3)
        return super().reset(row, seed)


kept = []


def do(what):
    if what == "sleep":
        time.sleep(1000)
    elif what == "meet":
        time.sleep(0.3)
    elif what == "spin":
        while True:
            pass
    elif what == "spin in C":
        sum(range(10**13))
    elif what == "sleep with Python's lock":
        ctypes.PyDLL(None).sleep(1000)
    elif what == "raise":
        raise ZeroDivisionError("by the tool")
    elif what == "exit":
        sys.exit(3)
    elif what == "end":
        os._exit(3)
    elif what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "crash":
        ctypes.string_at(0)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.1)
    elif what == "megabyte":
        return "x" * 1_000_000
    elif what == "hundred megabytes":
        return "x" * 100_000_000
    elif what == "recursive":
        found = []
        found.append(found)
        return found
    elif what == "surrogate":
        return "\ud800" * 10
    elif what == "leak":
        while True:
            kept.append(bytearray(16 << 20))
    elif what == "fork":
        for _ in range(20):
            if os.fork() == 0:
                time.sleep(1000)
        subprocess.Popen(["setsid", "sleep", "1000.5"])
        return "forked"
    elif what == "fork and return":
        os.fork()
        return "returned"
    elif what == "print":
        for _ in range(100):
            sys.stdout.write("x" * 10_000 + "\n")
            os.write(1, b'{"id": 1, "result": {}}\n')
    elif what == "write to the connection":
        for number in range(3, 100):
            try:
                if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                    os.write(number, b'{"id": 3, "result": {"done": true}}\n')
            except OSError:
                pass
    elif what == "close all files":
        os.closerange(3, 1000)
    elif what == "stop the loop":
        asyncio.get_running_loop().stop()
    elif what == "cancel all tasks":
        for task in asyncio.all_tasks():
            task.cancel()
    elif what == "kill all":
        os.kill(-1, signal.SIGKILL)
    elif what == "kill the parent":
        os.kill(os.getppid(), signal.SIGKILL)
    return "done"
