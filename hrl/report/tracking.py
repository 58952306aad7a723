"""Send metrics and samples to the configured trackers.

Every tracker works in its own thread, so that one that raises or hangs doesn't delay the run. Its failures are counted,
and the first one is logged.
"""

from __future__ import annotations

import asyncio
import html
import importlib.util
import json
import logging
import os
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hrl.config.trainer import WITHOUT_TRACKER
from hrl.files import write_whole
from hrl.masking import masked_text
from hrl.nearest import nearest
from hrl.report.run_folder import read_object
from hrl.report.samples import Sample, answer_text

logger = logging.getLogger(__name__)

_FINISH_TIMEOUT_S = 30.0
_MAX_WAITING_CALLS = 1000


KNOWN_AS = "trackers.json"
"""The file of a run folder that says what trackers know the run by; a run that continues goes on under the same id."""
_ID_LENGTH = 21  # SwanLab's


@dataclass(frozen=True)
class RunInfo:
    """The information about a run that trackers need.

    Attributes:
        project, name: In the tracker.
        config: The resolved configuration.
        folder: The run folder.
        id: What the tracker knows the run by; the same for all runs that continue one. Steps that are made again are
            told again, and a tracker that takes no step twice keeps the first.
        continues: Whether the tracker has seen the run before.
    """

    project: str
    name: str
    config: dict[str, Any]
    folder: Path
    id: str = ""
    continues: bool = False


@dataclass(frozen=True)
class Tracker:
    """A service that receives metrics. All calls run in the tracker's own thread.

    Attributes:
        log: Takes the metrics of one step, and the step.
        log_generations: Takes validation samples, with `prompt`, `response` and `score`, and the step.
        finish: Sends the remaining data.
    """

    log: Callable[[dict[str, float], int], object]
    log_generations: Callable[[Sequence[Sample], int], object]
    finish: Callable[[], object]


_COLUMNS = {"data_source": "source", "question": "prompt", "ground_truth": "truth", "response": "response"}
"""Field of a sample → column of a table, before those of its score and the parts of its reward."""
_TABLE = "val/generations"


def sample_table(samples: Sequence[Sample]) -> tuple[list[str], list[list[Any]]]:
    """Return samples as the columns and rows of a table: prompt, truth, response, score, parts of the reward.

    Texts are masked, since an environment may say what it was given, and not escaped: that is for the tracker that
    renders them.
    """
    parts = list(dict.fromkeys(name for sample in samples for name in sample.get("reward_parts", {})))
    rows = []
    for sample in samples:
        texts = {"question": sample["prompt"], **sample, "response": answer_text(sample)}
        own = sample.get("reward_parts", {})
        words = [None if (text := texts.get(name)) is None else masked_text(str(text)) for name in _COLUMNS]
        rows.append([*words, sample.get("score"), *(_plain(own.get(name)) for name in parts)])
    return [*_COLUMNS.values(), "score", *parts], rows


def _plain(part: Any) -> float | str | None:
    return float(part) if isinstance(part, int | float) else None if part is None else str(part)


def _tensorboard(run: RunInfo) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.folder / "tensorboard"))

    def log(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    def log_generations(samples: Sequence[Sample], step: int) -> None:
        columns, rows = sample_table(samples)
        for number, row in enumerate(rows):
            # Indented by four, the text is a code block: TensorBoard would render it as markdown otherwise.
            facts = "\n".join(
                f"{column}: {fact}" for column, fact in zip(columns, row, strict=True) if fact is not None
            )
            writer.add_text(f"val/generation_{number}", "    " + facts.replace("\n", "\n    "), step)

    return Tracker(log, log_generations, writer.close)


def _wandb(run: RunInfo) -> Tracker:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its own errors, to its makers
    import wandb

    # It would keep the command line, with whatever secret that has, and the address of a git remote, with its login.
    settings = wandb.Settings(x_disable_meta=True, disable_git=True, disable_code=True)
    opened = wandb.init(
        project=run.project,
        name=run.name,
        config=run.config,
        dir=str(run.folder),
        settings=settings,
        id=run.id,
        resume="allow",
    )

    def log_generations(samples: Sequence[Sample], step: int) -> None:
        columns, rows = sample_table(samples)
        opened.log({_TABLE: wandb.Table(columns=columns, data=rows, allow_mixed_types=True)}, step=step)

    return Tracker(lambda metrics, step: opened.log(metrics, step=step), log_generations, opened.finish)


def _mlflow(run: RunInfo) -> Tracker:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read as it is imported
    import mlflow

    if not mlflow.is_tracking_uri_set():
        # Without a database, which mlflow-skinny has no driver for, MLflow keeps runs in files only if told so.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri((run.folder / "mlruns").as_uri())
    mlflow.set_experiment(run.project)
    known = read_object(run.folder / KNOWN_AS)
    started = mlflow.start_run(run_id=known.get("mlflow"), run_name=None if "mlflow" in known else run.name)
    write_whole(run.folder / KNOWN_AS, json.dumps(known | {"mlflow": started.info.run_id}))  # MLflow makes its own
    mlflow.log_dict(run.config, "config.json")

    def log(metrics: dict[str, float], step: int) -> None:
        # MLflow allows no "@" in a name.
        mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def log_generations(samples: Sequence[Sample], step: int) -> None:
        columns, rows = sample_table(samples)
        table = {column: [row[place] for row in rows] for place, column in enumerate(columns)}
        mlflow.log_table(table, f"generations/step_{step}.json")

    return Tracker(log, log_generations, mlflow.end_run)


def _swanlab(run: RunInfo) -> Tracker:
    import swanlab

    opened = swanlab.init(
        project=run.project,
        name=run.name,
        config=run.config,
        log_dir=str(run.folder / "swanlab"),
        id=run.id,
        resume="allow",
        reinit=True,
        # It would keep the command line and the git remote, as wandb would.
        settings=swanlab.Settings(probe=swanlab.Settings.Probe(runtime=False, git=False)),
    )

    def log_generations(samples: Sequence[Sample], step: int) -> None:
        columns, rows = sample_table(samples)
        table = swanlab.echarts.Table()
        table.add(columns, [[html.escape(str(fact)) for fact in row] for row in rows])  # its cells are HTML
        opened.log({_TABLE: table}, step=step)

    return Tracker(lambda metrics, step: opened.log(metrics, step=step), log_generations, opened.finish)


def _trackio(run: RunInfo) -> Tracker:
    import trackio
    from huggingface_hub import constants

    # With a Space, its client would tell the hub that it was used. The hub's own variable has been read long ago.
    constants.HF_HUB_DISABLE_TELEMETRY = True
    resume = "allow" if run.continues else "never"  # it knows runs by their names
    opened = trackio.init(project=run.project, name=run.name, config=run.config, embed=False, resume=resume)

    def log_generations(samples: Sequence[Sample], step: int) -> None:
        columns, rows = sample_table(samples)
        opened.log({_TABLE: trackio.Table(columns=columns, data=rows)}, step=step)

    return Tracker(lambda metrics, step: opened.log(metrics, step=step), log_generations, opened.finish)


TRACKERS: dict[str, Callable[[RunInfo], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "swanlab": _swanlab,
    "trackio": _trackio,
}


class _TrackerThread:
    """A tracker in a daemon thread: calls are queued, failures counted, and a hang delays nothing else."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name = name
        self.failures = 0
        self._waiting: set[Future[None]] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"tracker-{name}", daemon=True).start()
        self._tracker: Tracker | None = None
        self._submit(self._start(make))

    def call(self, method: str, *arguments: Any) -> None:
        """Queue a call of the tracker's method; drop it and count a failure if too many are waiting."""
        if len(self._waiting) >= _MAX_WAITING_CALLS:
            self._count(f"{_MAX_WAITING_CALLS} calls are waiting already")
        else:
            self._submit(self._call(method, *arguments))

    def finish(self, timeout_s: float) -> None:
        """Let the tracker send its remaining data, for at most `timeout_s`."""
        self.call("finish")
        _, unfinished = wait(set(self._waiting), timeout=timeout_s)
        if unfinished:
            self._count(f"{len(unfinished)} calls did not end within {timeout_s:g} s")
        self._loop.call_soon_threadsafe(self._loop.stop)

    # Coroutines, although nothing is awaited: asyncio passes what a tracker raises to the call's future, so nothing
    # needs to be caught here.

    async def _start(self, make: Callable[[], Tracker]) -> None:
        self._tracker = make()

    async def _call(self, method: str, *arguments: Any) -> None:
        if self._tracker is None:
            raise RuntimeError("it did not start")
        getattr(self._tracker, method)(*arguments)

    def _submit(self, coroutine: Coroutine[Any, Any, None]) -> None:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._waiting.add(future)
        future.add_done_callback(self._done)

    def _done(self, future: Future[None]) -> None:
        self._waiting.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            self._count(f"{type(error).__name__}: {error}")

    def _count(self, problem: str) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.warning("tracker %s failed, the run goes on without it: %s", self.name, problem)


class Tracking:
    """Sends the metrics of every step to the named trackers.

    Args:
        project_name: Project in the trackers.
        experiment_name: Name of the run in the trackers.
        default_backend: Tracker names, one or several; names in `WITHOUT_TRACKER` are ignored.
        config: The resolved configuration, for the trackers.
        run_dir: The run folder.

    Raises:
        ValueError: A tracker is unknown, or its package is not installed; names the package.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Mapping[str, Any] | None = None,
        *,
        run_dir: str | Path,
    ) -> None:
        wanted = installed_trackers([default_backend] if isinstance(default_backend, str) else default_backend)
        file = Path(run_dir) / KNOWN_AS
        known = read_object(file)
        if wanted and not known:
            write_whole(file, json.dumps({"id": uuid.uuid4().hex[:_ID_LENGTH]}))
        name = read_object(file).get("id", "")
        run = RunInfo(project_name, experiment_name, dict(config or {}), Path(run_dir), name, bool(known))
        self._threads = [_TrackerThread(name, lambda make=TRACKERS[name]: make(run)) for name in wanted]  # type: ignore[misc]

    @property
    def failures(self) -> int:
        """Number of calls that failed so far."""
        return sum(thread.failures for thread in self._threads)

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step, or further ones of the last step."""
        for thread in self._threads:
            thread.call("log", dict(data), step)

    def log_generations(self, samples: Sequence[Sample], step: int) -> None:
        """Send validation samples to the trackers; the run folder has them in `rollouts/`."""
        for thread in self._threads:
            thread.call("log_generations", tuple(samples), step)

    def finish(self, timeout_s: float = _FINISH_TIMEOUT_S) -> None:
        """End every tracker, waiting for each at most `timeout_s`."""
        for thread in self._threads:
            thread.finish(timeout_s)


def installed_trackers(names: Sequence[str]) -> list[str]:
    """Return the trackers among `names`, once each; the console and the metrics file need none.

    Raises:
        ValueError: A tracker is unknown, or its package is not installed; names the extra to install.
    """
    wanted = [name for name in dict.fromkeys(names) if name not in WITHOUT_TRACKER]
    for name in wanted:
        if name not in TRACKERS:
            known = [*WITHOUT_TRACKER, *TRACKERS]
            near = nearest(name, known)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(known)}"
            raise ValueError(f"trainer.logger: there is no tracker {name!r}; {hint}")
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"trainer.logger: {name} is not installed: in hrl's checkout, uv pip install -e '.[{name}]'"
            )
    return wanted
