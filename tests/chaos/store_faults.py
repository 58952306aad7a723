"""A run's remote store that is not there, refuses, ends, damages what it was given, or is used by two runs."""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from hrl.cluster import remote_store
from hrl.cluster.checkpoints import CheckpointStore
from hrl.cluster.manifest import damages
from hrl.cluster.remote_store import RemoteStore
from hrl.report.run_folder import RunFolder
from tests.chaos import small
from tests.chaos.faults import Fault, Outcome
from tests.chaos.same_run import differences
from tests.cluster.s3_server import S3Server, s3_server
from tests.runs.runner import TWO_ROWS

ADDRESS = "s3://runs/one"
_OVERRIDES = (
    "actor_rollout_ref.rollout.name=hf",
    "trainer.device=cpu",
    "trainer.save_freq=1",
    *TWO_ROWS,
)
#: What a run in a process that is warm may take, and the attempts at a store that is gone beside.
_IN_TIME_S = 120.0


@dataclass
class Ended:
    """A run that has ended.

    Attributes:
        status: Its exit status.
        said: Everything that it has written.
        seconds: From its start.
    """

    status: int
    said: str
    seconds: float

    def from_words(self, words: str) -> str:
        """What it said, from these words on; the end of all if it did not say them."""
        said = " ".join(self.said.split())
        return said[said.find(words) :] if words in said else said[-500:]


@dataclass
class World:
    """A server, and runs that use it.

    Attributes:
        folder: Of the fault.
        server: With an empty bucket.
        after_save: Called, once, when the run has sent its first checkpoint.
    """

    folder: Path
    server: S3Server
    after_save: list[Callable[[], None]] = field(default_factory=list)

    def run(self, name: str, steps: int, *overrides: str) -> Ended:
        """Run the command to its end in this process."""
        from hrl.trainer.main_ppo import main
        from tests.runs.in_process import in_process

        arguments = small.runner().arguments(
            self.folder / name, *_OVERRIDES, f"trainer.total_training_steps={steps}", *overrides
        )
        said, began = io.StringIO(), time.monotonic()
        upload = RemoteStore.upload

        def sent(store: RemoteStore, *what: object) -> None:
            upload(store, *what)  # type: ignore[arg-type]
            while self.after_save:
                self.after_save.pop()()

        with pytest.MonkeyPatch.context() as patch, in_process():
            patch.setattr(RemoteStore, "upload", sent)
            patch.setattr(remote_store, "_PAUSES_S", (0.5, 1.0))
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                status = main(arguments)
        return Ended(status, said.getvalue(), time.monotonic() - began)

    def whole(self, name: str) -> list[int]:
        """Steps of a run's checkpoints on the disk that are undamaged."""
        store = CheckpointStore(RunFolder.checkpoints_in(self.folder / name))
        return [step for step in store.steps() if not damages(store.path(step))]


@contextlib.contextmanager
def world(folder: Path) -> Iterator[World]:
    """Start a server with a bucket."""
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        server.make_bucket("runs")
        yield World(folder, server)


def judged(ended: Ended, expected: int, words: str, right: bool = True) -> Outcome:
    """Score a run by its exit status, time, message and results."""
    if ended.status != expected or not right or ended.seconds > _IN_TIME_S:
        return Outcome(
            0, ended.seconds, f"exit status {ended.status}, results {'right' if right else 'wrong'}: {ended.said}"
        )
    return Outcome(2 if words in " ".join(ended.said.split()) else 1, ended.seconds, ended.from_words(words))


def in_a_world(fault: Callable[[World], Outcome]) -> Callable[[Path], Outcome]:
    """Give a fault a server of its own."""

    @functools.wraps(fault)
    def inject(folder: Path) -> Outcome:
        with world(folder) as made:
            return fault(made)

    return inject


_STORE = f"trainer.default_remote_dir={ADDRESS}"


@in_a_world
def _not_there(made: World) -> Outcome:
    made.server.process.kill()
    ended = made.run("run", 1, _STORE)
    return judged(ended, 1, f"the store {ADDRESS} can't be read", not made.whole("run"))


@in_a_world
def _no_bucket(made: World) -> Outcome:
    return judged(
        made.run("run", 1, "trainer.default_remote_dir=s3://nobodys/one"), 1, "the store s3://nobodys/one can't be"
    )


@in_a_world
def _dies(made: World) -> Outcome:
    made.after_save.append(made.server.process.kill)
    ended = made.run("run", 3, _STORE)
    return judged(ended, 1, f"the store {ADDRESS} can't be", bool(made.whole("run")))


@in_a_world
def _dies_and_goes_on(made: World) -> Outcome:
    made.after_save.append(made.server.process.kill)
    ended = made.run("run", 3, _STORE, "trainer.on_save_error=continue")
    return judged(ended, 1, f"{ADDRESS} lacks the newest checkpoint", {2, 3} <= set(made.whole("run")))


@in_a_world
def _machine_lost(made: World) -> Outcome:
    straight = made.run("straight", 3, _STORE)
    store = RemoteStore(ADDRESS)
    store._fs.rm(store._root, recursive=True)
    lost = made.run("lost", 2, _STORE)
    shutil.rmtree(made.folder / "lost" / "checkpoints")
    shutil.move(made.folder / "lost", made.folder / "gone")
    ended = made.run("lost", 3, _STORE)
    shutil.copytree(made.folder / "gone" / "rollouts", made.folder / "lost" / "rollouts", dirs_exist_ok=True)
    # Only the newest is fetched; where nothing was lost, an older one may wait for its upload.
    shutil.rmtree(made.folder / "straight" / "checkpoints" / "step_1", ignore_errors=True)
    by_design = "checkpoint 2: state.json differs"  # it was made by a command with fewer steps, and says so
    wrong = [each for each in differences(made.folder / "straight", made.folder / "lost") if each != by_design]
    right = straight.status == lost.status == 0 and not wrong
    outcome = judged(ended, 0, f"fetched {ADDRESS}/checkpoints/step_2", right)
    return replace(outcome, message="; ".join([*wrong, outcome.message]))


def _damaged(damage: Callable[[bytes], bytes]) -> Callable[[Path], Outcome]:
    @in_a_world
    def inject(made: World) -> Outcome:
        made.run("lost", 2, _STORE)
        shutil.rmtree(made.folder / "lost")
        store = RemoteStore(ADDRESS)
        (shard, *_) = [name for name in store.manifest(2).files if "shard" in name]
        path = store._path(2, shard)
        store._fs.pipe_file(path, damage(store._fs.cat_file(path)))
        ended = made.run("lost", 2, _STORE)
        return judged(ended, 0, f"{ADDRESS}/checkpoints/step_2 is not used", made.whole("lost") == [1, 2])

    return inject


@in_a_world
def _another_run(made: World) -> Outcome:
    made.after_save.append(lambda: RemoteStore(ADDRESS).claim("another") and None)
    ended = made.run("run", 3, _STORE)
    return judged(ended, 1, f"another run writes to {ADDRESS}", bool(made.whole("run")))


@in_a_world
def _other_runs_checkpoints(made: World) -> Outcome:
    made.run("one", 1, _STORE)
    ended = made.run("other", 1, _STORE, "trainer.resume_mode=disable")
    return judged(ended, 2, "holds checkpoints of an earlier run", RemoteStore(ADDRESS).steps() == [1])


@in_a_world
def _login(made: World) -> Outcome:
    ended = made.run("run", 1, "trainer.default_remote_dir=s3://me:canary@runs/one")
    return judged(ended, 1, "holds a login", "canary" not in ended.said)


FAULTS = [
    Fault("a remote store that is not there", "no server", _not_there),
    Fault("a remote store that is not there", "no bucket", _no_bucket),
    Fault("a remote store that ends during a run", "the run ends", _dies),
    Fault("a remote store that ends during a run", "the run goes on", _dies_and_goes_on),
    Fault("the machine of a run is lost", "its remote store is there", _machine_lost),
    Fault("a checkpoint in a remote store is damaged", "a flipped byte", _damaged(lambda sent: sent[:-1] + b"\x7f")),
    Fault("a checkpoint in a remote store is damaged", "a cut shard", _damaged(lambda sent: sent[:-100])),
    Fault("two runs with one remote store", "at once", _another_run),
    Fault("two runs with one remote store", "one after the other", _other_runs_checkpoints),
    Fault("a login in an address", "of the remote store", _login),
]
