"""Environments for tests of the pool, of which the processes load this file."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hrl
from hrl import Observation, StepResult
from hrl.processes.waiting import in_line


class Echo(hrl.Environment):
    """Says what it was told, twice, and does what a row or an action asks for."""

    def __init__(self, greeting="hello"):
        self.greeting = greeting
        self.turns = 0

    def reset(self, row, seed):
        do(row.get("do"))
        return f"{self.greeting} {row.get('name')} {seed}"

    def step(self, action):
        value = do(action.text)
        self.turns += 1
        if value is not None:
            return value
        return StepResult(f"{self.turns}: {action.text}", reward=self.turns / 2, done=self.turns == 2)

    def close(self):
        do(getattr(self, "at_close", None))


class AsyncEcho(Echo):
    """The same, on the event loop."""

    async def reset(self, row, seed):
        await do_async(row.get("do"))
        return f"{self.greeting} {row.get('name')} {seed}"

    async def step(self, action):
        value = await do_async(action.text)
        if value is None:
            await asyncio.sleep(0)
            return super().step(action)
        return value

    async def close(self):
        pass


class ClosesBadly(Echo):
    def close(self):
        if self.greeting == "hang":
            time.sleep(1000)
        raise ZeroDivisionError("at the close")


class Program(hrl.AgentEnvironment):
    """Asks the policy nothing."""

    def run(self, row, client):
        do(row.get("do"))
        return 1.0


kept = []


def do(what):
    if what == "sleep":
        time.sleep(1000)
    if what == "spin":
        while True:
            pass
    if what == "spin for long":
        until = time.monotonic() + 600
        while time.monotonic() < until:
            pass
    if what == "spin in C":
        sum(range(10**13))
    if what == "sleep with Python's lock":
        ctypes.PyDLL(None).sleep(1000)
    if what == "raise":
        raise ZeroDivisionError("by the user")
    if what == "exit":
        sys.exit(3)
    if what == "end":
        os._exit(3)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.01)
    if what == "megabyte":
        return StepResult("x" * 1_000_000 + "end")
    if what == "hundred megabytes":
        return StepResult("x" * 100_000_000 + "end")
    if what == "many megabytes of messages":
        return StepResult([{"role": "user", "content": "x" * 60_000}] * 2000)
    if what == "surrogate":
        return StepResult("a\ud800b\U0001f600")
    if what == "nan":
        return StepResult("go on", reward=float("nan"))
    if what == "count":
        return StepResult("go on", metrics={"found": 1, "tool_errors/add": 2})
    if what == "recursive":
        message = {"role": "user", "content": "x"}
        message["self"] = message
        return StepResult([message])
    if what == "object":
        return StepResult([{"role": "user", "content": "x", "image": object()}])
    if what == "number":
        return 3
    if what == "tuple":
        return "text", 1.0, True, {}
    if what == "print":
        sys.stdout.write("x" * 100_000)
        os.write(1, b"y" * 100_000)
    if what == "garble":
        for number in range(3, 1024):
            try:
                if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                    os.write(number, b"garbage\n")
            except OSError:
                pass
    if what == "forge":
        for number in range(3, 1024):
            try:
                if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                    os.write(number, b'{"id": 1, "result": {"done": 7}}\n' * 5)
            except OSError:
                pass
    if what == "leak":
        while True:
            kept.append(bytearray(16 << 20))
    if what == "large":
        bytearray(100 << 30)
    if what == "fork and return" and os.fork() == 0:
        return StepResult("from the fork")
    if what == "fork":
        if os.fork() == 0:
            time.sleep(1000)
        subprocess.Popen(["setsid", "sleep", "1001"])  # 1000 is slept by the functions of tests/reward
    return None


async def do_async(what):
    if what == "wait in line":
        with in_line():
            await asyncio.sleep(0.5)
    if what == "wait in line beyond the deadline":
        with in_line():
            await asyncio.sleep(0.1)
        await asyncio.sleep(1000)
    if what == "wait":
        await asyncio.sleep(1000)
    if what == "wait and ignore":
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)
    if what == "cancel":
        raise asyncio.CancelledError
    if what == "exit in a task":

        async def leave():
            sys.exit(3)

        await asyncio.gather(leave(), asyncio.sleep(1000))
    return do(what)


class NoStep:
    def reset(self, row):
        return "x"

    def close(self):
        pass


class Duck:
    """Inherits from nothing, and does not ask for a seed."""

    def reset(self, row):
        return Observation(token_ids=[1, 2, 3], tools=None)

    def step(self, action):
        return StepResult(done=True, truncated=True, metrics={"found": 1})

    def close(self):
        pass


class LeavesFiles(Duck):
    def reset(self, row):
        (Path(tempfile.mkdtemp()) / "left").write_text("behind")
        return super().reset(row)
