"""Whole runs that play episodes: tools that do harm, and the end of every process that an episode needs."""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hrl.report.run_folder import read_jsonl, read_metrics
from tests.chaos.environments import WORLDS
from tests.chaos.faults import Fault, Outcome
from tests.chaos.kills import last_line, wait
from tests.chaos.process_faults import RANK, Find, Run, ends, goes_on, named
from tests.chaos.same_run import NOISE, differences, of_checkpoints
from tests.chaos.small import runner
from tests.chaos.victims import Driver, Family, as_command, family_of, in_one_process

ROWS, SAMPLES = 10, 2
FAULTY_ROW = 3
PATIENCE_S = 600.0
#: Of a run that is killed; the checkpoint that it goes on from is that of the fourth.
STEPS, SAVED_EVERY, KILLED_AFTER = 8, 4, 5

COMMON = (
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.cpu_threads_per_worker=1",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    "data.max_prompt_length=52",
    "data.max_response_length=200",
    "environment.tool_parser=hermes",
    "environment.max_turn_tokens=3",
    "environment.max_observation_tokens=40",
    "environment.tool_timeout_s=1",
)


@functools.cache
def place() -> Path:
    """The folder of what runs have in common, for a run's configuration names it; it goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-episodes-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def rows(name: str, *whats: str) -> tuple[str, ...]:
    """Write a file of rows, each with what its tool does; return the overrides that name it."""
    file = place() / f"{name}.jsonl"
    lines = ({"prompt": f"row {place}", "what": what, "answer": what} for place, what in enumerate(whats))
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return (
        f"data.train_files={file}",
        f"data.val_files={file}",
        f"data.train_batch_size={len(whats)}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={len(whats)}",
    )


# ---------------------------------------------------------------------- what tools do


class Played(NamedTuple):
    """A run that has ended.

    Attributes:
        folder: Its run folder.
        status: Its exit status.
        said: What it wrote to the terminal.
        seconds: How long it took.
        left: What is left of it.
    """

    folder: Path
    status: int | None
    said: str
    seconds: float
    left: list[str]


def played(folder: Path, *overrides: str, start: Callable[[Sequence[str]], Driver] = in_one_process) -> Played:
    """Make a run of two steps, everything but Ray if nothing else is said."""
    arguments = runner().arguments(
        folder,
        *COMMON,
        f"environment.path={WORLDS}:Called",
        "environment.step_timeout_s=3",
        "trainer.total_training_steps=2",
        *overrides,
    )
    began = time.monotonic()
    family = family_of(lambda: start(arguments))
    status = wait(family, None, PATIENCE_S)
    return Played(folder, status, family.driver.output(), time.monotonic() - began, family.left())


@functools.cache
def undisturbed() -> Mapping[str, Any]:
    """What each episode of the first step is like where no tool does harm."""
    run = played(place() / "undisturbed", *rows("undisturbed", *[""] * ROWS))
    if run.status != 0:
        raise AssertionError(f"the run whose tools do no harm ended with {run.status}: {run.said[-500:]}")
    return first_step(run.folder)


def first_step(folder: Path) -> dict[str, Any]:
    """Return the episodes of the first step by their names, without what no two runs share."""
    quiet = ("advantage", "ground_truth", "data_source", *NOISE)
    return {
        record["episode_id"]: {key: value for key, value in record.items() if not key.startswith(quiet)}
        for record in read_jsonl(folder / "rollouts" / "step_1.jsonl")
    }


def in_a_row(what: str, folder: Path, *, counts: Mapping[str, float], failed: int = 0, says: str) -> Outcome:
    """Have the tool of one row do harm in both of its episodes; all others are as they are without it, and train.

    Args:
        what: It does.
        folder: For the run.
        counts: Metrics of each step, and the least that they may be.
        failed: Episodes of a step that fail.
        says: What the faulty episodes show: an error, or what the policy was told.
    """
    usual = undisturbed()
    whats = [what if place == FAULTY_ROW else "" for place in range(ROWS)]
    run = played(folder / "run", *rows(what, *whats))
    if (wrong := what_is_wrong(run, counts, failed)) is not None:
        return Outcome(0, run.seconds, wrong)
    found = first_step(run.folder)
    faulty = {
        record["episode_id"]
        for record in read_jsonl(run.folder / "rollouts" / "step_1.jsonl")
        if record["ground_truth"] == what
    }
    others = [name for name in usual if name not in faulty and usual[name] != found.get(name)]
    if others or len(faulty) != SAMPLES:
        return Outcome(0, run.seconds, f"{len(others)} other episodes went otherwise, such as {found.get(others[0])}")
    shown = [json.dumps([found[name].get("error"), found[name]["messages"]]) for name in sorted(faulty)]
    if not all(says in one for one in shown):
        return Outcome(1, run.seconds, f"without {says!r}: {shown[0]}")
    return Outcome(2, run.seconds, f"{counted(run.folder, counts)}; {found[min(faulty)].get('error') or says}")


def in_all_rows(what: str, folder: Path, *, counts: Mapping[str, float]) -> Outcome:
    """Have all tools do what the policy is only told of: the run goes on."""
    run = played(folder / "run", *rows(f"all {what}", *[what] * ROWS))
    wrong = what_is_wrong(run, counts, failed=0)
    return Outcome(0, run.seconds, wrong) if wrong else Outcome(2, run.seconds, counted(run.folder, counts))


def none_is_left(what: str, says: str, folder: Path) -> Outcome:
    """Have all episodes fail: the run ends in its first step with one error, and is not started again."""
    run = played(folder / "run", *rows(f"all {what}", *[what] * ROWS), "trainer.max_restarts=1", start=as_command)
    line = last_line(run.said)
    if run.status != 1 or run.left or read_metrics(run.folder):
        return Outcome(0, run.seconds, f"status {run.status}, left {run.left}: {line}")
    rule = f"of {ROWS * SAMPLES} episodes failed (environment.on_error=skip allows 2)"
    told = [each for each in run.said.splitlines() if rule in each]
    if len(told) != 1 or "Traceback" in run.said.partition(told[0])[0] or "restart 1" in run.said:
        return Outcome(1, run.seconds, f"it is told {len(told)} times: {run.said[-500:]}")
    named = all(part in told[0] for part in (f"environment Called in {WORLDS}", "`hrl env-test`", "sample "))
    return Outcome(2 if named and says in run.said[run.said.index(told[0]) :] else 1, run.seconds, told[0])


def no_answer(folder: Path) -> Outcome:
    """Have the engine refuse all requests: the run ends in its first step with what the engine says."""
    run = played(
        folder / "run", *rows("undisturbed", *[""] * ROWS), start=functools.partial(in_one_process, before=refuse)
    )
    line = last_line(run.said)
    if run.status != 1 or run.left or read_metrics(run.folder):
        return Outcome(0, run.seconds, f"status {run.status}, left {run.left}: {line}")
    return Outcome(2 if line.endswith(f"RolloutError: {REFUSAL}") else 1, run.seconds, line)


REFUSAL = "the engine takes no request"


def refuse() -> None:
    """Let the engine of a run in this process refuse all requests."""
    from hrl.workers.rollout.base import RolloutError
    from hrl.workers.rollout.hf_engine import HfEngine

    async def generate(*_: Any, **__: Any) -> Any:
        raise RolloutError(REFUSAL)

    HfEngine.generate = generate  # type: ignore[method-assign]


def on_two_ranks(folder: Path) -> Outcome:
    """Sample the episodes with the engines of two ranks: they are those of one."""
    usual = undisturbed()
    run = played(folder / "run", *rows("undisturbed", *[""] * ROWS), "trainer.n_gpus_per_node=2", start=as_command)
    if (wrong := what_is_wrong(run, {}, failed=0)) is not None:
        return Outcome(0, run.seconds, wrong)
    found = first_step(run.folder)
    others = [name for name in usual if usual[name] != found.get(name)]
    if others:
        return Outcome(
            0, run.seconds, f"{len(others)} of {len(usual)} episodes are others than on one rank: {others[0]}"
        )
    return Outcome(
        2, run.seconds, f"{len(usual)} episodes of the first step equal: tokens, conversations, rewards, ends"
    )


def what_is_wrong(run: Played, counts: Mapping[str, float], failed: int) -> str | None:
    """Return what is not as it should be with a run that goes on."""
    if run.status != 0:
        return f"exit status {run.status}: {run.said[-500:]}"
    if run.left:
        return f"left: {run.left}"
    records = read_metrics(run.folder)
    if len(records) != 2:
        return f"{len(records)} of 2 steps"
    for record in records:
        norm = record["actor/grad_norm"]
        if not math.isfinite(norm) or norm <= 0:
            return f"step {record['step']} has trained nothing: actor/grad_norm {norm}"
        if record["episode/num_failed"] != failed:
            return f"episode/num_failed is {record['episode/num_failed']}, not {failed}"
        if missing := [
            f"{name} is {record.get(name)}" for name, least in counts.items() if record.get(name, 0) < least
        ]:
            return f"step {record['step']}: {missing}"
    return None


def counted(folder: Path, names: Mapping[str, float]) -> str:
    """Say what the first step has counted."""
    record = read_metrics(folder)[0]
    return ", ".join(f"{name} {record[name]:g}" for name in ("episode/num_failed", *names))


# ---------------------------------------------------------------------- the end of processes


def marking(*overrides: str) -> tuple[str, ...]:
    """A run whose environments show when they are at work. One episode at a time, so that hf samples the same again."""
    mark = place() / "mark"
    return (
        *COMMON,
        *rows("short", *[""] * 4),
        f"environment.path={WORLDS}:Marking",
        f"environment.kwargs.mark={mark}",
        "environment.max_concurrent_episodes=1",
        *overrides,
    )


def is_marked() -> bool:
    """Return whether an environment has been at work since the last time that this was asked."""
    mark = place() / "mark"
    found = mark.exists()
    mark.unlink(missing_ok=True)
    return found


def while_playing(find: Find) -> Find:
    """Find a process once an episode is being played."""

    def found(run: Run) -> int:
        is_marked()
        deadline = time.monotonic() + PATIENCE_S
        while not is_marked():
            if time.monotonic() > deadline:
                raise AssertionError("no further episode was played")
            time.sleep(0.005)
        return find(run)

    return found


def restarting(folder: Path) -> list[str]:
    """The arguments of a run that starts again once."""
    return runner().arguments(
        folder,
        *marking("trainer.max_restarts=1", f"trainer.save_freq={SAVED_EVERY}", f"trainer.total_training_steps={STEPS}"),
    )


@functools.cache
def straight() -> Path:
    """The run that nobody disturbs."""
    folder = place() / "straight"
    family = family_of(lambda: as_command(restarting(folder)))
    if (status := wait(family, None, 2 * PATIENCE_S)) != 0:
        raise AssertionError(f"the run that nobody disturbs ended with {status}: {last_line(family.driver.output())}")
    return folder


def killed(pattern: str, folder: Path, *, restarts: bool) -> Outcome:
    """Kill a process while an episode of the sixth step is played: at its end, the run is the one that nobody disturbs.

    Args:
        pattern: In the command line of the process.
        folder: For the run.
        restarts: Whether the run goes on from its checkpoint, or without an interruption.
    """
    whole, at = straight(), folder / "run"
    family = family_of(lambda: as_command(restarting(at)))
    saved = at / "checkpoints" / f"step_{SAVED_EVERY}"
    if wait(family, PATIENCE_S, until=lambda: has_come_to(at, KILLED_AFTER) and saved.is_dir()) is not None:
        return Outcome(0, 0.0, f"it ended before: {last_line(family.driver.output())}")
    is_marked()
    if wait(family, PATIENCE_S, until=is_marked) is not None:
        return Outcome(0, 0.0, f"it ended before: {last_line(family.driver.output())}")
    began = time.monotonic()
    os.kill(one_of(family, pattern), signal.SIGKILL)
    status = wait(family, None, PATIENCE_S)
    seconds, said, left = time.monotonic() - began, family.driver.output(), family.left()
    if status != 0 or left:
        return Outcome(0, seconds, f"status {status}, left {left}: {said[-500:]}")
    told = next((line for line in said.splitlines() if line.startswith("a machine failed: ")), "")
    if restarts:
        found = [what for what in differences(whole, at) if not ("run/restarts" in what and "(1 differ)" in what)]
        return Outcome(0 if found else 2 if told else 1, seconds, "; ".join(found[:2]) or told)
    records = read_metrics(at)
    lost, failed = (
        sum(record[f"episode/{name}"] for record in records) for name in ("pool/lost_processes", "num_failed")
    )
    found = of_checkpoints(whole, at)
    if told or found or (lost, failed) != (1, 0):
        return Outcome(0, seconds, f"{told}; {lost} processes lost, {failed} episodes failed; {found[:2]}")
    return Outcome(2, seconds, "weights, moments, generators and state equal; episode/pool/lost_processes counts it")


def has_come_to(folder: Path, step: int) -> bool:
    """Return whether a run has logged a step."""
    file = folder / "metrics.jsonl"
    return file.exists() and file.read_bytes().count(b"\n") >= step


def one_of(family: Family, pattern: str) -> int:
    """Return the first process of a run whose command line has a pattern."""
    family.look()
    run = Run(psutil.Process(family.driver.pid), Path(), Path())  # type: ignore[arg-type]
    return run.find(pattern)[0]


SERVICE = r"^ray::EpisodeProcess"
ENVIRONMENT = r"^(?!.*guard\.py).*hrl\.episodes\.environment_process"
RANK_PROCESS = r"^ray::RankProcess"
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def _tool(kind: str, what: str, says: str, failed: int = 0, **counts: float) -> Fault:
    named = {name.replace("__", "/"): least for name, least in counts.items()}
    return Fault(
        f"a run whose tool {kind}", what, functools.partial(in_a_row, what, counts=named, failed=failed, says=says)
    )


def _ends(kind: str, find: Find, sign: signal.Signals, *words: str) -> Fault:
    return Fault(kind, "", lambda folder: ends(while_playing(find), sign, words, folder, marking()))


def _restarts(variant: str, pattern: str, *, restarts: bool = True) -> Fault:
    kind = "a process is killed while episodes are played, to start again"
    return Fault(kind, variant, functools.partial(killed, pattern, restarts=restarts))


def _stopped(run: Run) -> None:
    os.kill(while_playing(named(ENVIRONMENT))(run), STOP)


_TOLD: Mapping[str, float] = {"env__tool_errors__plainly": 1.0}
_ENDS: Mapping[str, float] = {"episode__pool__lost_processes": 2.0 * SAMPLES}
FAULTS: list[Fault] = [
    _tool("hangs", "sleep", "Error: plainly took longer than 1 s", **_TOLD),
    _tool("hangs", "spin in C", "was killed: something held it for longer than 3 s", SAMPLES, **_ENDS),
    _tool("raises", "raise", "Error: plainly failed: ZeroDivisionError: by the tool", **_TOLD),
    _tool("answers with a megabyte", "megabyte", "xxx", episode__cut_observations__mean=0.01),
    _tool("kills its process", "die", "was killed by SIGKILL", SAMPLES, **_ENDS),
    _tool("stops its process", "stop", "had been stopped (SIGSTOP)", SAMPLES, **_ENDS),
    _tool("raises", "step: raise", "ZeroDivisionError: by the tool", SAMPLES, episode__pool__failures=SAMPLES),
    _tool(
        "hangs",
        "reset: sleep",
        "reset took longer than 3 s (environment.step_timeout_s)",
        SAMPLES,
        episode__pool__timeouts=SAMPLES,
    ),
    Fault(
        "a run whose tools all hang",
        "",
        functools.partial(in_all_rows, "sleep", counts={"env/tool_errors/plainly": 1.0}),
    ),
    Fault(
        "a run whose episodes all fail",
        "the environment raises",
        functools.partial(none_is_left, "step: raise", "ZeroDivisionError: by the tool"),
    ),
    Fault(
        "a run whose episodes all fail",
        "the environment kills its process",
        functools.partial(none_is_left, "die", "was killed by SIGKILL"),
    ),
    Fault(
        "a run whose episodes all fail",
        "the environment hangs",
        functools.partial(none_is_left, "reset: sleep", "reset took longer than 3 s (environment.step_timeout_s)"),
    ),
    Fault("a run whose episodes all fail", "the engine refuses all requests", no_answer),
    Fault("a run that plays episodes", "on two ranks they are those of one", on_two_ranks),
    _ends("the episode service is killed", named(SERVICE), KILL, "the episode service (process PID"),
    _ends("the episode service is stopped", named(SERVICE), STOP, "the episode service (process PID", "SIGSTOP"),
    _ends("a rank is killed while it samples episodes", RANK, KILL, "rank 0", "(pid PID)", "serve_requests"),
    Fault(
        "an environment's process is stopped",
        "",
        lambda folder: goes_on(_stopped, "episode/pool/lost_processes", folder, marking()),
    ),
    _restarts("the episode service", SERVICE),
    _restarts("a rank", RANK_PROCESS),
    _restarts("an environment's process, which needs no start", ENVIRONMENT, restarts=False),
]
