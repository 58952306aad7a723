"""The rehearsal of a launch line: run it small, kill it, go on with it, and say what came of each part."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from hrl.cluster.checkpoints import CheckpointStore
from hrl.config.arithmetic import count
from hrl.config.compose import compose_kind, to_yaml
from hrl.config.outline import RunConfiguration
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import RunKind
from hrl.processes.lifetime import guarded_environment
from hrl.processes.signals import answer_with
from hrl.rehearse.child import Child, StuckError
from hrl.rehearse.follow import Follower
from hrl.rehearse.layout import not_kept, shapes_of
from hrl.rehearse.parts import Rehearsal, RehearsalError
from hrl.rehearse.prepare import look_at_all_rows, shown_here, small_run
from hrl.rehearse.smaller import LIMIT_S
from hrl.report.run_folder import METRICS, RunFolder

Kill = Literal["driver", "rank"]
STEPS = 2
"""Steps before the kill."""
_GONE_S = 60.0
_AFTER_A_RANK_S = 180.0
_FILE = "rehearsal"
_LONGEST_TEMPORARY = 36
"""Characters of a temporary folder below which Ray's sockets lie: a socket's path has 107 at most."""


@dataclass(frozen=True)
class Options:
    """How a rehearsal is done.

    Attributes:
        processes: The largest pool; None for as many as keep the layout's shape and fit into memory.
        kill: What is killed.
        timeout_s: Seconds that each of the two starts may take.
        keep: A folder to leave everything in; None leaves nothing.
    """

    processes: int | None = None
    kill: Kill = "driver"
    timeout_s: float = LIMIT_S
    keep: Path | None = None


def rehearse(kind: RunKind[RunConfiguration], arguments: Sequence[str], options: Options, found: Rehearsal) -> None:
    """Rehearse a launch line; what came of it is in `found`, also where it raises.

    Args:
        kind: Kind of run.
        arguments: Its arguments.
        options: How.
        found: Takes what is seen.

    Raises:
        ConfigError: The line is not valid.
        RehearsalError: A part failed.
    """
    began = time.monotonic()
    config = compose_kind(kind, arguments)
    found.add("configuration", time.monotonic() - began, f"{kind.name} run, {_layout_in_words(config)}")
    found.absent += _absent(config)
    with _ended_by_signals(), _folder(options.keep) as folder, guarded_environment() as mark:
        small = small_run(kind, config, folder, options.processes, found, options.timeout_s)
        pictures = look_at_all_rows(config, small, found)
        small = shown_here(kind, small, found, pictures=pictures)
        _write(small, folder)
        environ = _environment(folder, mark)
        found.has_run = True
        program = f"hrl.trainer.main_{kind.name}"
        step = _first_start(program, small, folder, environ, options, found)
        changed = small.trainer.model_copy(update={"total_training_steps": step + 1})
        _write(small.model_copy(update={"trainer": changed}), folder)
        _second_start(program, folder, environ, options, found, step)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield Path(tempfile.mkdtemp(prefix="rehearsal-", dir=keep.resolve()))
        return
    with tempfile.TemporaryDirectory(prefix="rehearse-") as name:
        yield Path(name)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have the first signal that asks for an end raise KeyboardInterrupt; others come while everything is ended."""
    asked: list[int] = []

    def once(number: int, _: Any) -> None:
        asked.append(number)
        if len(asked) == 1:
            raise KeyboardInterrupt

    before = answer_with(once)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment(folder: Path, mark: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the runs, which join no cluster and leave their temporary files in the folder."""
    inner = folder / "t"
    inner.mkdir()
    own = {"TMPDIR": str(inner)}
    if len(str(inner)) > _LONGEST_TEMPORARY:
        own["RAY_TMPDIR"] = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own | dict(mark)


def _layout_in_words(config: RunConfiguration) -> str:
    shapes = shapes_of(config)
    return ", ".join(
        count(shape.processes, "process", "processes") + (f" of pool {name}" if len(shapes) > 1 else "")
        for name, shape in shapes.items()
    )


def _write(run: RunConfiguration, folder: Path) -> None:
    """Write the configuration of a run where only this user can read it; it may hold secrets."""
    path = folder / f"{_FILE}.yaml"
    path.touch(mode=0o600)
    path.write_text(to_yaml(run, with_secrets=True), encoding="utf-8")


def _start(program: str, folder: Path, environ: Mapping[str, str], options: Options, name: str) -> Child:
    arguments = ["--config-path", str(folder), "--config-name", _FILE]
    return Child(program, arguments, environ, folder / f"{name}.stderr", options.timeout_s)


def _first_start(
    program: str, run: RunConfiguration, folder: Path, environ: Mapping[str, str], options: Options, found: Rehearsal
) -> int:
    """Run until two steps are saved, and kill; return the step of the newest checkpoint."""
    store = CheckpointStore(RunFolder.checkpoints_in(run.trainer.default_local_dir))
    child, follower = _start(program, folder, environ, options, "first"), Follower(found, "start")
    try:
        for event in child.events():
            if event is not None:
                follower.take(event)
            if store.folder.is_dir() and (saved := store.steps()) and saved[-1] >= STEPS:
                break
        else:
            status = child.wait()
            found.status = status if status > 0 else 1
            raise follower.failed(child, f"the run ended with status {status}")
        files = [path for path in store.path(saved[-1]).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files) / 2**20
        found.add("checkpoint", 0.0, f"of step {saved[-1]}: {len(files)} files, {size:.0f} MiB")
        _kill(child, options.kill, found)
    except StuckError as error:
        raise follower.failed(child, str(error)) from error
    finally:
        child.end()
    return store.steps()[-1]


def _kill(child: Child, kill: Kill, found: Rehearsal) -> None:
    """Kill the driver or a rank, and wait until everything of the run is gone."""
    family = child.family()
    with found.part(f"SIGKILL of {'the driver' if kill == 'driver' else 'a rank'}") as said:
        victim = None
        if kill == "rank":
            ranks = [one for one in family if re.match(r"ray::RankProcess", " ".join(_command(one)))]
            if not ranks:
                raise RehearsalError("no rank was found among the run's processes")
            victim = ranks[-1]
        child.kill(victim)
        limit_s = _GONE_S if victim is None else _AFTER_A_RANK_S
        _, left = psutil.wait_procs(family, timeout=limit_s)
        if left:
            names = ", ".join(f"{' '.join(_command(one))[:40]} (pid {one.pid})" for one in left)
            for one in left:
                one.kill()
            raise RehearsalError(f"after {limit_s:.0f} s there was still {names}")
        said.append(f"all {len(family)} processes are gone")
        if victim is not None:  # the driver has said why it ended
            errors = re.findall(r"^\w+Error: .*", child.last_words(), re.MULTILINE)
            said += errors[-1:] or ["the run said nothing of it"]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


def _second_start(
    program: str, folder: Path, environ: Mapping[str, str], options: Options, found: Rehearsal, step: int
) -> None:
    """Start the same run again, which goes on after its checkpoint, makes one more step and ends."""
    child, follower = _start(program, folder, environ, options, "second"), Follower(found, "start again")
    try:
        for event in child.events():
            if event is not None:
                follower.take(event)
        status = child.wait()
        if status != 0:
            found.status = status if status > 0 else 1
            raise follower.failed(child, f"the run ended with status {status}")
        follower.ended()
    except StuckError as error:
        raise follower.failed(child, str(error)) from error
    finally:
        child.end()
    with found.part("resume") as said:
        if follower.steps != [step + 1]:
            raise RehearsalError(f"it was to resume after step {step}, and made the steps {follower.steps}")
        records = [json.loads(line) for line in (folder / "run" / METRICS).read_text().splitlines()]
        steps = [record["step"] for record in records if "timing_s/step" in record]
        if steps != list(range(1, step + 2)):
            raise RehearsalError(f"its log has the steps {steps}")
        said += [f"resumed after step {step}; the log has each step once", *_scores(folder)]


def _scores(folder: Path) -> Iterator[str]:
    """Yield what a random model's samples were worth, if the run samples."""
    scores = []
    for path in sorted((folder / "run" / "rollouts").glob("step_*.jsonl")):
        scores += [json.loads(line).get("score") for line in path.read_text().splitlines()]
    numbers = [score for score in scores if isinstance(score, int | float)]
    if numbers:
        yield f"{len(numbers)} samples scored {min(numbers):g} to {max(numbers):g}"


_STANDS_FOR = "an engine of the run's own stands for them, which nobody else is asked for"


def _absent(config: RunConfiguration) -> Iterator[tuple[str, str]]:
    """Yield what is not rehearsed, and why."""
    yield "memory of a GPU", "computed before a run by `hrl check` there, and by `hrl plan --gpus N --gpu NAME` here"
    yield "NCCL, CUDA IPC, CUDA graphs, sleeping engines, offload", "need GPUs; `make first-light` tries them on one"
    yield "the model's weights and their learning", "the tiny models are random"
    if isinstance(config, PPOTrainerConfig) and config.teacher_is_served:
        yield "the served teacher", "a tiny model of the run's own stands for it"
    if isinstance(config, PPOTrainerConfig) and config.actor_rollout_ref.rollout.is_of_others:
        what = "servers" if config.actor_rollout_ref.rollout.is_served else "engines"
        yield f"SGLang's {what}" if config.actor_rollout_ref.rollout.name == "sglang" else what, _STANDS_FOR
    yield from not_kept(config)
    if config.trainer.nnodes > 1:
        yield f"{config.trainer.nnodes} machines", "all processes are on this one"
    if config.trainer.default_remote_dir is not None:
        yield "trainer.default_remote_dir", "nothing of yours is written to"
    if any(not name.startswith("console") and name != "file" for name in config.trainer.logger):
        yield "trackers", "nobody else is told of a rehearsal"
