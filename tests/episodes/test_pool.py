"""Environments in processes of their own: what they give comes back, and what goes wrong stays with its episode."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

import hrl
from hrl.config.environment import EnvironmentConfig
from hrl.environments.interface import Action
from hrl.environments.loading import EnvironmentLoadError, EnvironmentSpec
from hrl.episodes.pool import (
    EnvironmentFailedError,
    EnvironmentLostError,
    EnvironmentPool,
    EnvironmentTimeoutError,
    LiveEnvironment,
    environment_of,
    try_environment,
)
from hrl.errors import HrlError
from hrl.processes.watch import is_gone

WORLDS = str(Path(__file__).with_name("worlds.py"))


def settings(**changes: Any) -> EnvironmentConfig:
    return EnvironmentConfig(**{"num_workers": 1, "step_timeout_s": 20.0, "memory_limit_gib": 2.0} | changes)


def pool_of(name: str = "Echo", kwargs: dict[str, Any] | None = None, **changes: Any) -> EnvironmentPool:
    return EnvironmentPool(EnvironmentSpec.of(f"{WORLDS}:{name}", kwargs), settings(**changes))


def with_pool(play: Callable[[EnvironmentPool], Coroutine[Any, Any, None]], pool: EnvironmentPool) -> None:
    async def run() -> None:
        async with asyncio.timeout(120), pool:
            await play(pool)

    asyncio.run(run())


async def plays_right(environment: LiveEnvironment) -> bool:
    """Whether an episode of `Echo` goes as it must."""
    first = await environment.reset()
    results = [await environment.step(Action(text)) for text in ("a", "b")]
    await environment.close()
    contents = [first.messages[0]["content"], results[0].observation.messages[0]["content"]]
    return contents == ["hello x 7", "1: a"] and [(r.reward, r.done) for r in results] == [(0.5, False), (1.0, True)]


@pytest.mark.parametrize("name", ["Echo", "AsyncEcho"])
def test_an_episode_comes_back_as_the_class_has_it(name):
    async def play(pool):
        assert await plays_right(pool.open("e", {"name": "x"}, 7))

    with_pool(play, pool_of(name))


async def outcome_of(pool: EnvironmentPool, text: str, key: object = "e") -> Any:
    """What comes of an action: a result, or an error."""
    environment = pool.open(key, {"name": "x"}, 7)
    await environment.reset()
    try:
        return await environment.step(Action(text))
    except HrlError as error:
        return error
    finally:
        await environment.close()


def outcomes_of(pool: EnvironmentPool, texts: Sequence[str]) -> dict[str, Any]:
    """What comes of actions that episodes of their own take at the same time; and of ten ordinary episodes beside."""
    found: dict[str, Any] = {}

    async def play(pool: EnvironmentPool) -> None:
        beside = [plays_right(pool.open(f"beside {number}", {"name": "x"}, 7)) for number in range(10)]
        *said, right = await asyncio.gather(*(outcome_of(pool, text, text) for text in texts), asyncio.gather(*beside))
        found.update(zip(texts, said, strict=True))
        found["beside"] = right
        found["counts"] = pool.counts

    with_pool(play, pool)
    return found


#: What an environment does in a step → what is said of it.
FAILURES = {
    "raise": r"Echo\.step failed:\nTraceback(?s:.*)worlds\.py(?s:.*)raise ZeroDivisionError(?s:.*)by the user$",
    "exit": r"Echo\.step failed:(?s:.*)sys\.exit\(3\)(?s:.*)SystemExit: 3",
    "nan": "returned nan as the reward, which is not finite",
    "count": r"returned 2 as the metric 'tool_errors/add', which is a count of hrl's own: give it another name",
    "recursive": "returned message 0 nested more than 50 levels deep, or in itself",
    "object": "returned an object in message 0, which is no plain data",
    "number": r"returned 3, where hrl\.StepResult\(observation=…, reward=…, done=…\) is expected",
    "tuple": r"returned a tuple, where hrl\.StepResult",
    "many megabytes of messages": "returned more than 4,194,304 characters",
    "large": r"Echo\.step failed:(?s:.*)MemoryError",
}


@pytest.fixture(scope="module", params=["Echo", "AsyncEcho"])
def failures(request):
    return outcomes_of(pool_of(request.param, max_observation_tokens=1024), [*FAILURES, "megabyte", "print"])


@pytest.mark.parametrize("what", FAILURES)
def test_what_an_environment_does_wrong_is_said_in_one_error_with_its_class_and_method(failures, what):
    error = failures[what]
    assert isinstance(error, EnvironmentFailedError)
    assert re.match("(Async)?Echo.step ", str(error)) and re.search(FAILURES[what], str(error))
    assert "hrl/episodes" not in str(error)


def test_and_holds_up_or_ends_nothing_else(failures):
    assert failures["beside"] == [True] * 10
    counts = failures["counts"]
    assert (counts.failures, counts.lost_processes, counts.timeouts) == (len(FAILURES), 0, 0)


def test_a_long_text_loses_its_middle_before_it_leaves_its_process(failures):
    text = failures["megabyte"].observation.messages[0]["content"]
    assert len(text) < 70_000 and text.startswith("xxx") and text.endswith("xxend")
    assert "[… 934,467 characters left out …]" in text


def test_what_an_environment_prints_disturbs_nothing(failures):
    assert failures["print"].observation.messages[0]["content"] == "1: print"


def test_a_text_of_any_length_and_kind_comes_back_or_is_cut():
    found = outcomes_of(
        pool_of(max_observation_tokens=None, memory_limit_gib=None), ["surrogate", "megabyte", "hundred megabytes"]
    )
    assert found["surrogate"].observation.messages[0]["content"] == "a\ufffdb\U0001f600"
    assert len(found["megabyte"].observation.messages[0]["content"]) == 1_000_003
    assert "returned more than 4,194,304 characters" in str(found["hundred megabytes"])
    assert found["beside"] == [True] * 10


@pytest.mark.parametrize(
    "name, what, told",
    [
        ("Echo", "end", "its process [0-9]+ ended with exit code 3"),
        ("AsyncEcho", "end", "its process [0-9]+ ended with exit code 3"),
        ("AsyncEcho", "exit in a task", "its process [0-9]+ ended with exit code 3"),
        ("Echo", "die", "its process [0-9]+ was killed by SIGKILL"),
        ("Echo", "garble", "something in its process wrote b'garbage"),
        ("Echo", "leak", r"has no memory left \(environment\.memory_limit_gib\): Echo\.step failed:(?s:.*)MemoryError"),
    ],
)
def test_a_step_that_ends_its_process_is_to_blame_and_the_others_in_it_are_not(name, what, told):
    async def play(pool):
        others = [pool.open(number, {"name": "x"}, 7) for number in range(3)]
        for other in others:
            await other.reset()
        error = await outcome_of(pool, what)
        assert isinstance(error, EnvironmentLostError) and error.is_to_blame and re.search(told, str(error))
        for other in others:
            with pytest.raises(EnvironmentLostError) as raised:
                await other.step(Action("a"))
            assert not raised.value.is_to_blame
            await other.close()
        assert await plays_right(pool.open("again", {"name": "x"}, 7)), "in the process that took its place"
        assert (pool.counts.lost_processes, pool.counts.lost_episodes) == (1, 4)

    with_pool(play, pool_of(name, memory_limit_gib=0.6))


@pytest.mark.parametrize(
    "name, what",
    [
        ("Echo", "spin in C"),
        ("Echo", "sleep with Python's lock"),
        ("AsyncEcho", "spin in C"),
        ("AsyncEcho", "spin"),
        ("AsyncEcho", "sleep"),
    ],
)
def test_a_step_that_holds_up_its_process_is_killed_at_the_deadline_and_found_out_among_others(name, what, monkeypatch):
    monkeypatch.setattr("hrl.episodes.pool._SILENCE_S", 0.5)

    async def play(pool):
        idle = pool.open("idle", {"name": "x"}, 7)
        await idle.reset()
        begun = asyncio.get_running_loop().time()
        error = await outcome_of(pool, what)
        assert isinstance(error, EnvironmentLostError) and error.is_to_blame
        assert re.search("was killed: something held it for longer than 0.5 s", str(error))
        assert asyncio.get_running_loop().time() - begun < 20
        with pytest.raises(EnvironmentLostError) as raised:
            await idle.step(Action("a"))
        assert not raised.value.is_to_blame

    with_pool(play, pool_of(name, step_timeout_s=0.5))


@pytest.mark.parametrize("what", ["spin in C", "sleep with Python's lock"])
def test_whoever_has_pythons_lock_is_to_blame_and_not_those_who_wait_for_it(what, monkeypatch):
    """Others' plain methods are in the midst of their own work then."""
    monkeypatch.setattr("hrl.episodes.pool._SILENCE_S", 0.5)

    async def play(pool):
        # One that sleeps without the lock looks like one that sleeps with it, but not like one that computes.
        beside = ["spin for long"] * 3 + ["sleep"] * (what == "spin in C")
        working = [asyncio.ensure_future(outcome_of(pool, text, number)) for number, text in enumerate(beside)]
        await asyncio.sleep(0.3)
        error = await outcome_of(pool, what, "the one")
        others = await asyncio.gather(*working)
        assert isinstance(error, EnvironmentLostError) and error.is_to_blame
        assert [getattr(one, "is_to_blame", "late") for one in others] == [False] * len(beside)

    with_pool(play, pool_of("Echo", step_timeout_s=1.0))


def test_a_plain_step_past_its_deadline_fails_alone_and_its_process_is_replaced_once_it_is_empty():
    async def play(pool):
        (first,) = pool._processes
        others = [pool.open(number, {"name": "x"}, 7) for number in range(2)]
        for other in others:
            await other.reset()
        error = await outcome_of(pool, "sleep")
        assert isinstance(error, EnvironmentTimeoutError)
        assert re.search(
            r"step took longer than 0\.5 s (?s:.*)worlds\.py\", line \d+, in do\n +time\.sleep", str(error)
        )
        assert first.is_retiring and first in pool._processes
        late = pool.open("late", {"name": "x"}, 7)
        assert late._process is not first and await plays_right(late)
        for other in others:
            assert (await other.step(Action("a"))).reward == 0.5
            await other.close()
        while first in pool._processes:
            await asyncio.sleep(0.02)
        counts = pool.counts
        assert (counts.timeouts, counts.retired_processes, counts.lost_processes, counts.failed_closes) == (1, 1, 0, 1)

    with_pool(play, pool_of(step_timeout_s=0.5))


def test_a_plain_program_that_hangs_beyond_its_episode_has_its_process_replaced_once_the_others_there_are_over(
    monkeypatch,
):
    monkeypatch.setattr("hrl.episodes.pool._GRACE_S", 0.0)
    begin = Action(json.dumps({"base_url": "", "api_key": "", "model": "", "poll_s": 0.1}))

    async def play(pool):
        (first,) = pool._processes
        hanging, other = (pool.open(what, {"prompt": [], "do": what}, 7) for what in ("sleep", None))
        await other.reset()
        await hanging.reset()
        for _ in range(10):  # twice as long as a step may take
            assert not (await hanging.step(begin)).done
        assert not first.is_retiring
        await hanging.close()
        while not first.is_retiring:
            await asyncio.sleep(0.02)
        assert pool.open("late", {"prompt": []}, 7)._process is not first
        result = await other.step(begin)
        assert (result.reward, result.done) == (1.0, True)
        await other.close()
        while first in pool._processes:
            await asyncio.sleep(0.02)
        counts = pool.counts
        assert (counts.retired_processes, counts.lost_processes, counts.failed_closes) == (1, 0, 0)

    with_pool(play, pool_of("Program", step_timeout_s=0.5))


def test_an_await_past_its_deadline_is_cancelled_and_its_process_stays():
    async def play(pool):
        error = await outcome_of(pool, "wait")
        assert isinstance(error, EnvironmentTimeoutError)
        assert re.search(r"worlds\.py\", line \d+, in do_async\n +await asyncio\.sleep\(1000\)", str(error))
        assert await plays_right(pool.open("e", {"name": "x"}, 7))
        assert (pool.counts.timeouts, pool.counts.retired_processes, pool.counts.failed_closes) == (1, 0, 0)
        assert isinstance(await outcome_of(pool, "wait and ignore"), EnvironmentTimeoutError)
        assert pool.counts.retired_processes == 1

    with_pool(play, pool_of("AsyncEcho", step_timeout_s=0.4))


def test_a_process_that_somebody_stopped_is_replaced_and_no_episode_is_to_blame(monkeypatch):
    monkeypatch.setattr("hrl.episodes.pool._SILENCE_S", 0.5)

    async def play(pool):
        (process,) = pool._processes
        environment = pool.open("e", {"name": "x"}, 7)
        await environment.reset()
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(EnvironmentLostError, match=r"had been stopped \(SIGSTOP\)") as raised:
            await environment.step(Action("a"))
        assert not raised.value.is_to_blame
        assert await plays_right(pool.open("again", {"name": "x"}, 7))

    with_pool(play, pool_of(step_timeout_s=0.3))


@pytest.mark.parametrize("name", ["Echo", "AsyncEcho"])
def test_a_fork_that_returns_from_a_step_answers_nothing(name):
    async def play(pool):
        for name in ("one", "two"):
            result = await outcome_of(pool, "fork and return", name)
            assert result.observation.messages[0]["content"] == "1: fork and return"
        assert pool.counts.lost_processes == 0

    with_pool(play, pool_of(name))


def test_a_forged_answer_is_a_failure_and_no_result():
    async def play(pool):
        error = await outcome_of(pool, "forge")
        assert isinstance(error, EnvironmentLostError | EnvironmentFailedError)
        assert await plays_right(pool.open("again", {"name": "x"}, 7))

    with_pool(play, pool_of())


def test_what_an_environment_starts_ends_with_its_process():
    before = sleepers()

    async def play(pool):
        assert (await outcome_of(pool, "fork")).reward == 0.5
        assert new_sleepers(before, expected=1) == 1

    with_pool(play, pool_of())
    assert new_sleepers(before, expected=0) == 0


def new_sleepers(before: set[str], *, expected: int) -> int:
    """Return how many there are; a process that was begun or killed just now may take its time to show it."""
    ends_at = time.monotonic() + 10
    while (count := len(sleepers() - before)) != expected and time.monotonic() < ends_at:
        time.sleep(0.02)
    return count


def sleepers() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes() == b"sleep\x001001\x00":
                found.add(path.parent.name)
    return found


@pytest.mark.parametrize("greeting", ["raise", "hang"])
def test_what_a_close_does_wrong_is_counted_and_raises_nothing(greeting, caplog):
    async def play(pool):
        environment = pool.open("e", {"name": "x"}, 7)
        await environment.reset()
        await environment.close()
        await environment.close()
        await pool.settled()
        assert pool.counts.failed_closes == 1

    with_pool(play, pool_of("ClosesBadly", {"greeting": greeting}, step_timeout_s=1.5))
    said = "at the close" if greeting == "raise" else "close took longer than 1.5 s"
    assert said in caplog.text


def test_a_caller_that_gives_a_step_up_may_close_at_once():
    async def play(pool):
        for text in ("wait", "a"):
            environment = pool.open("e", {"name": "x"}, 7)
            await environment.reset()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2 if text == "wait" else 0):
                    await environment.step(Action(text))
            await environment.close()
        assert pool.counts.failed_closes == 0 and await plays_right(pool.open("e", {"name": "x"}, 7))

    with_pool(play, pool_of("AsyncEcho", step_timeout_s=60.0))


def test_episodes_spread_over_the_processes():
    async def play(pool):
        opened = [pool.open(number, {"name": "x"}, 7) for number in range(6)]
        assert sorted(len(process.episodes) for process in pool._processes) == [2, 2, 2]
        await opened[0].close()
        assert pool.open("late", {"name": "x"}, 7)._process is opened[0]._process

    with_pool(play, pool_of(num_workers=3))


def test_a_class_of_any_kind_with_the_three_methods_will_do():
    async def play(pool):
        environment = pool.open("e", {}, 7)
        assert list((await environment.reset()).token_ids) == [1, 2, 3]
        result = await environment.step(Action("x"))
        assert (result.done, result.truncated, result.metrics, result.reward) == (True, True, {"found": 1.0}, None)
        await environment.close()

    with_pool(play, pool_of("Duck"))


def test_a_row_names_another_environment_and_one_that_there_is_not_is_told_with_those_that_there_are():
    async def play(pool):
        environment = pool.open("e", {"env": "single_turn", "prompt": [{"role": "user", "content": "Hi"}]}, 7)
        assert (await environment.reset()).messages == [{"role": "user", "content": "Hi"}]
        assert (await environment.step(Action("x"))).done
        greeted = pool.open("e", {"name": "x", "env_kwargs": {"greeting": "good day"}}, 7)
        assert (await greeted.reset()).messages[0]["content"] == "good day x 7"
        for (env, given), why in REFUSED_CHOICES.items():
            refused = pool.open(3, {"name": "x", "env": env, "env_kwargs": json.loads(given)}, 7)
            with pytest.raises(EnvironmentFailedError, match=why):
                await refused.reset()

    with_pool(play, pool_of())


REFUSED_CHOICES = {
    ("single_tun", "null"): "the row has env 'single_tun'.*Did you mean single_turn",
    ("mcp", '{"server": ["sh", "-c", "id"]}'): r"the row has env 'mcp'.*row_environments\.mcp=",
    ("python", '{"trust": true}'): r"the row has env_kwargs\.trust, and a row may give python",
    (3, "null"): "env 3, where the name",
    (None, "3"): "env_kwargs 3, where a dict",
    (None, '{"greetings": "x"}'): "env_kwargs.greetings is no argument of it. Did you mean greeting",
}


def test_what_rows_choose_is_refused_before_an_episode_is_begun_and_nothing_is_made():
    choices = [("single_turn", None), (None, {"greeting": "x"})]
    choices += [(env, json.loads(given)) for env, given in REFUSED_CHOICES]
    tried = settings(path=f"{WORLDS}:Echo")
    _, refusals = asyncio.run(try_environment(environment_of(tried), tried, choices))
    assert refusals[:2] == [None, None]
    for refusal, why in zip(refusals[2:], REFUSED_CHOICES.values(), strict=True):
        assert re.search(why, refusal)


def test_a_process_that_is_killed_leaves_nothing_in_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    async def play(pool):
        environment = pool.open("e", {}, 7)
        await environment.reset()
        (folder,) = tmp_path.iterdir()
        assert [*folder.iterdir()] != []
        os.kill(environment._process.pid, signal.SIGKILL)
        with pytest.raises(EnvironmentLostError):
            await environment.step(Action("x"))
        async with asyncio.timeout(30):
            while folder.exists():
                await asyncio.sleep(0.05)

    with_pool(play, pool_of("LeavesFiles"))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "source, told",
    [
        ("import nothing_like_this", "No module named 'nothing_like_this'"),
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
        ("import os; os._exit(7)", "ended with exit code 7 while loading"),
        ("class Wor: pass", r"has no class or function 'World'; it has: Wor$"),
        ("class World: pass", " has no method reset and no step and no close"),
        ("World = 3", " has no method reset and no step and no close"),
        (
            "import hrl\nclass World(hrl.SingleTurn):\n    def __init__(self, size): pass",
            r"can't be made: environment.kwargs.size is missing. It takes \(size\)$",
        ),
        ("import os; os.environ['MY_KEY']", r"the variable MY_KEY is set.*environment\.env=\[MY_KEY\]"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_one_error_at_the_start(tmp_path, monkeypatch, source, told):
    monkeypatch.setenv("MY_KEY", "x")
    (tmp_path / "world.py").write_text(f"{source}\n")
    pool = EnvironmentPool(EnvironmentSpec.of(f"{tmp_path}/world.py:World"), settings(num_workers=2))
    with pytest.raises(EnvironmentLoadError, match=rf"world\.py(?s:.*){told}") as refused:
        asyncio.run(pool.start())
    first, *_ = str(refused.value).splitlines()
    assert first.count("world.py") == 1 and str(refused.value).count("can't be ") <= 1, "nothing is said twice"


def test_a_file_that_never_finishes_loading_is_given_up(tmp_path, monkeypatch):
    (tmp_path / "world.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr("hrl.episodes.pool._START_TIMEOUT_S", 0.3)
    pool = EnvironmentPool(EnvironmentSpec.of(f"{tmp_path}/world.py:World"), settings(num_workers=2))
    with pytest.raises(EnvironmentLoadError, match="loading took longer than 0.3 s"):
        asyncio.run(pool.start())


def test_a_process_that_the_system_does_not_give_is_told_at_once(monkeypatch):
    def refuse(*_: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("hrl.episodes.pool.start_child", refuse)
    with pytest.raises(EnvironmentLoadError, match=r"Resource temporarily unavailable(?s:.*)environment\.num_workers"):
        asyncio.run(pool_of().start())


def test_no_secret_and_no_heavy_import_reaches_a_process_and_what_is_named_does(tmp_path, monkeypatch):
    (tmp_path / "world.py").write_text(
        "import os, sys, hrl\n"
        "class World(hrl.SingleTurn):\n"
        "    def __init__(self, key): self.key = key\n"
        "    def reset(self, row):\n"
        "        heavy = {'torch', 'ray', 'transformers', 'vllm', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "        return f'{heavy} {self.key} {\" \".join(os.environ.values())}'\n"
    )
    for name in ("HF_TOKEN", "MY_API_KEY", "NAMED", "OF_ARGUMENT"):
        monkeypatch.setenv(name, f"canary-{name}")
    spec = EnvironmentSpec.of(f"{tmp_path}/world.py:World", {"key": "env:OF_ARGUMENT"})

    async def play(pool):
        observation = await pool.open("e", {}, 7).reset()
        text = observation.messages[0]["content"]
        assert text.startswith("set() canary-OF_ARGUMENT ") and "canary-NAMED" in text
        assert "canary-HF_TOKEN" not in text and "canary-MY_API_KEY" not in text

    with_pool(play, EnvironmentPool(spec, settings(env=["NAMED"])))
    monkeypatch.delenv("OF_ARGUMENT")
    with pytest.raises(EnvironmentLoadError, match="argument key of .*World .* variable OF_ARGUMENT, which is"):
        asyncio.run(EnvironmentPool(spec, settings()).start())
    with pytest.raises(EnvironmentLoadError, match=r"environment\.env names MISSING"):
        asyncio.run(pool_of(env=["MISSING"]).start())


def test_an_environment_given_as_an_object_is_copied_for_each_episode():
    class Counter(hrl.Environment):
        def __init__(self) -> None:
            self.turns = 0

        def step(self, action: Action) -> hrl.StepResult:
            self.turns += 1
            return hrl.StepResult(str(self.turns), done=True)

    async def play(pool):
        for number in range(2):
            environment = pool.open(number, {"prompt": [{"role": "user", "content": "?"}]}, 7)
            await environment.reset()
            assert (await environment.step(Action("x"))).observation.messages[0]["content"] == "1"

    with_pool(play, EnvironmentPool(EnvironmentSpec.of(None, given=Counter()), settings()))
    with_pool(play, EnvironmentPool(EnvironmentSpec.of(None, given=Counter), settings()))


def test_closing_the_pool_ends_processes_and_episodes():
    async def run() -> None:
        pool = pool_of(num_workers=2)
        await pool.start()
        pids = [process.pid for process in pool._processes]
        stuck = asyncio.ensure_future(outcome_of(pool, "sleep"))
        await asyncio.sleep(0.3)
        await pool.close()
        await pool.close()
        assert isinstance(await stuck, EnvironmentLostError)
        assert all(is_gone(pid) for pid in pids)
        with pytest.raises(RuntimeError, match="not running"):
            pool.open("e", {}, 7)

    asyncio.run(run())


def test_an_episode_that_ended_its_process_begins_again_apart_from_all_others():
    async def play(pool):
        assert (await outcome_of(pool, "die", "suspect")).is_to_blame
        other = pool.open("other", {"name": "x"}, 7)
        await other.reset()
        assert (await outcome_of(pool, "die", "suspect")).is_to_blame, "for a second time"
        apart = pool.open("suspect", {"name": "x"}, 7)
        assert apart._process is not other._process
        assert pool.open("new", {"name": "x"}, 7)._process is other._process
        assert (await other.step(Action("a"))).reward == 0.5, "which harmed no other"
        assert await plays_right(apart)
        while apart._process in pool._processes:
            await asyncio.sleep(0.02)
        assert pool.open("suspect", {"name": "x"}, 7)._process is other._process, "it has shown itself harmless"

    with_pool(play, pool_of())


def test_the_clock_of_an_episode_stands_while_its_call_waits_in_line() -> None:
    class Stands:
        def __init__(self) -> None:
            self.told: list[tuple[str, float]] = []

        def stop(self) -> None:
            self.told.append(("stop", time.monotonic()))

        def go_on(self) -> None:
            self.told.append(("go on", time.monotonic()))

    async def play(pool: EnvironmentPool) -> None:
        clock: Any = Stands()
        environment = pool.open(("uid", 0), {"name": "x"}, 7)
        environment.clock = clock
        await environment.reset()
        assert clock.told == []
        await environment.step(Action("wait in line"))
        (first, begun_s), (last, ended_s) = clock.told
        assert (first, last) == ("stop", "go on") and 0.4 < ended_s - begun_s < 60.0
        with pytest.raises(EnvironmentTimeoutError):
            await environment.step(Action("wait in line beyond the deadline"))
        assert [kind for kind, _ in clock.told[2:]] == ["stop", "go on"], "once for each, also where it is given up"
        await environment.close()

    with_pool(play, pool_of("AsyncEcho", step_timeout_s=2.0))


def test_the_traceback_of_a_module_begins_with_the_users_line(tmp_path, monkeypatch):
    (tmp_path / "of_a_package.py").write_text("class World:\n    pass\nraise RuntimeError('no licence')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EnvironmentLoadError) as refused:
        asyncio.run(EnvironmentPool(EnvironmentSpec.of("of_a_package:World"), settings()).start())
    lines = str(refused.value).splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("Traceback"))
    assert lines[place + 1].strip().startswith(f'File "{tmp_path}/of_a_package.py", line 3')
