"""A whole run in the test's own process: real workers, engine, rewards and transport, and no Ray between them.

Starting processes is most of what a short run costs. Here calls go through the same dispatch, batches are packed and
unpacked as on their way to another process, and the one rank is an object.
"""

from __future__ import annotations

import asyncio
import functools
import pickle
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hrl.config import compose_cli
from hrl.episodes.service import EpisodeService
from hrl.models.tokenizer import load_tokenizer
from hrl.preflight.given import Given
from hrl.processes.signals import ENDING, StopRequest
from hrl.report.console import Display
from hrl.report.reporter import RunReporter
from hrl.reward.actor import RewardLoop
from hrl.single_controller.dispatch import BatchRows, RankCall
from hrl.single_controller.packing import pack_batch, pack_result, unpack_batch
from hrl.single_controller.worker import RankEnv, RayClassWithInitArgs
from hrl.single_controller.worker_group import WorkerGroup
from hrl.trainer.kinds import KINDS
from hrl.trainer.loop import TrainingLoop
from hrl.trainer.run import run
from hrl.workers.rollout.host import LoopThread
from tests.models.tiny import world_of_one


def two_steps(folder: Path) -> dict[str, Any]:
    """The section `trainer` of a short run that leaves nothing but its log."""
    return {
        "device": "cpu",
        "total_training_steps": 2,
        "val_before_train": False,
        "default_local_dir": str(folder),
        "save_freq": -1,
    }


def spread() -> Any:
    """A reward that differs between samples, sent by value: its processes would import this file, and torch with it."""

    def reward(response: str) -> float:
        return len(set(response)) / 10

    return reward


@dataclass
class Done:
    results: list[Any]

    def get(self, timeout_s: float | None = None) -> list[Any]:
        return self.results

    def done(self) -> bool:
        return True


class InProcessGroup(WorkerGroup):
    """One rank, an object per role; made and called as a `RayWorkerGroup` is."""

    node_ips = ("127.0.0.1",)

    def __init__(self, *, ray_cls_with_init: RayClassWithInitArgs, call_timeout_s: float, **_: Any) -> None:
        super().__init__(1, ray_cls_with_init, call_timeout_s)
        self._objects = {role: construct() for role, construct in ray_cls_with_init.roles().items()}

    @classmethod
    def start_together(cls, groups: Sequence[InProcessGroup]) -> None:
        """They were there when they were made."""

    def _submit(self, role: str, method: str, calls: Sequence[RankCall]) -> Done:
        call = calls[0].mapped(self._sent)
        return Done([pack_result(call.on(self._objects[role], method))])

    def _sent(self, arg: Any) -> Any:
        return unpack_batch(pack_batch(arg.batch, arg.columns), arg.rows) if isinstance(arg, BatchRows) else arg

    def shutdown(self) -> None:
        for worker in self._objects.values():
            worker.close()


def in_this_process(trainer_cls: type[TrainingLoop]) -> type[TrainingLoop]:
    """The same trainer, whose workers live in this process."""

    class InProcessTrainer(trainer_cls):
        def __init__(self, config: Any, tokenizer: Any, mapping: Any, manager: Any, **kwargs: Any) -> None:
            pools = SimpleNamespace(
                mapping=manager.mapping,
                resource_pool_dict=dict.fromkeys(manager.resource_pool_spec),
                create_resource_pool=lambda: None,
                release=lambda: None,
            )
            super().__init__(config, tokenizer, mapping, pools, InProcessGroup, **kwargs)

    return InProcessTrainer


class InProcessRewards(RewardLoop):
    """Stands for the Ray actor that is a reward loop."""

    @property
    def handle(self) -> Any:
        return SimpleNamespace(submit=SimpleNamespace(remote=self.submit))

    def begin_start(self) -> None:
        """A pool of this process starts at once, in `start`."""


@dataclass(frozen=True)
class InProcessInbox:
    """Where the one rank's requests come from: a loop of this process."""

    service: EpisodeService
    loop: LoopThread
    batch: int

    async def take(self, engine: int) -> Any:
        return await asyncio.wrap_future(self.loop.submit(self.service.next_work(self.batch, engine)))

    def give(self, answers: list[Any]) -> None:
        self.loop.submit(self.service.answered(pickle.loads(pickle.dumps(answers))))  # noqa: S301


class InProcessEpisodes:
    """Stands for the Ray actor that plays episodes."""

    def __init__(self, setup: Any) -> None:
        self._service, self._loop = EpisodeService(setup), LoopThread("episodes")

    def start(self) -> None:
        self._loop.run(self._service.start(), timeout_s=60.0, what="starting")

    def listen(self) -> str:
        return self._loop.run(self._service.listen(), timeout_s=60.0, what="listening")

    def inbox(self, batch: int) -> InProcessInbox:
        return InProcessInbox(self._service, self._loop, batch)

    def begin(self, batch: int, tasks: Any, *args: Any) -> None:
        sent = pickle.loads(pickle.dumps(tasks))  # noqa: S301  as Ray sends it
        self._loop.run(self._service.begin(batch, sent, *args), timeout_s=60.0, what="beginning")

    def collect(self, batch: int) -> Any:
        return self._loop.run(self._service.collect(batch), timeout_s=60.0, what="collecting")

    def shutdown(self) -> None:
        self._loop.run(self._service.close(), timeout_s=60.0, what="ending")
        self._loop.stop()


@contextmanager
def in_process(*, reports: bool = False) -> Iterator[None]:
    """Makes this process the only rank of a world, and rewards a loop in it; a command's run stays in it, too.

    Runs in it read a tokenizer once. They write a picture and a report only if asked to: these take seconds.
    """
    environ = RankEnv(0, 1, 0, 1, "127.0.0.1", 1).as_environ()
    threads = torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in ENDING}
    with pytest.MonkeyPatch.context() as patch, world_of_one():
        for name, value in environ.items():
            patch.setenv(name, value)
        patch.setattr("hrl.trainer.ppo.rewards.RewardActor", InProcessRewards)
        patch.setattr("hrl.trainer.ppo.episodes.EpisodeActor", InProcessEpisodes)
        patch.setattr("hrl.trainer.run.run_cluster", lambda *_: nullcontext())
        load = functools.cache(load_tokenizer)
        for module in ("hrl.preflight.model_look", "hrl.workers.actor_rollout_ref", "hrl.episodes.service"):
            patch.setattr(f"{module}.load_tokenizer", lambda path, **options: load(str(path), **options))
        patch.setattr("hrl.trainer.run.run", run_configured)
        if not reports:
            patch.setattr(RunReporter, "_close_with_report", lambda *_: None)
            patch.setattr(RunReporter, "report_so_far", lambda *_: None)
        yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run_in_process(*overrides: str) -> None:
    """Do what `main_ppo` does, without a cluster; inside `in_process`.

    Raises:
        What ends the run.
    """
    config = compose_cli(["quickstart=ppo", *overrides, "trainer.device=cpu", "actor_rollout_ref.rollout.name=hf"])
    run_configured("ppo", config)


def run_configured(
    kind: str,
    config: Any,
    given: Given | None = None,
    *,
    trainer_cls: type[TrainingLoop] | None = None,
    display: Display | None = None,
    stop: StopRequest | None = None,
    restarts: int = 0,
) -> Path:
    """Do what `run` does, without a cluster; inside `in_process`."""
    trainer_cls = in_this_process(trainer_cls or KINDS[kind].trainer(config))
    return run(kind, config, given, trainer_cls=trainer_cls, display=display, stop=stop, restarts=restarts)
