"""Checkpoints that are damaged, and disks that refuse them, in whole runs of one process.

One run is made once: three steps, a checkpoint of each. A fault gets a copy of its folder, spoils the newest
checkpoint, and gives the same command again. At the end the two must be equal to the bit: checkpoints, samples, log.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import io
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from hrl.cluster.checkpoints import STATE_FILE, CheckpointError, CheckpointStore
from hrl.cluster.manifest import MANIFEST, Manifest
from hrl.report.run_folder import RunFolder
from tests.chaos.faults import Fault, Outcome, not_tried
from tests.chaos.same_run import differences
from tests.chaos.small import runner

LAST = 3
_LARGE = 1 << 20
#: What differs where a run has another `trainer.on_save_error`.
ITS_KEY = ("config.yaml differs", f"{STATE_FILE} differs")
NO_MOUNT = "this system lets nobody mount a disk"


def arguments(folder: Path, *overrides: str) -> list[str]:
    """The command of a run that saves every step and keeps all."""
    return runner().arguments(
        folder,
        "actor_rollout_ref.rollout.name=hf",
        "trainer.device=cpu",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "data.val_max_samples=4",
        "trainer.save_freq=1",
        "trainer.max_ckpt_to_keep=null",
        f"trainer.total_training_steps={LAST}",
        *overrides,
    )


def run(arguments: list[str], kind: str = "ppo") -> tuple[int, str]:
    """Do what the command does, in this process; return its exit status and what it wrote to the terminal."""
    from hrl.trainer.command import run_command
    from hrl.workers.runtime import seed_everything
    from tests.runs.in_process import in_process

    said = io.StringIO()
    with in_process(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        seed_everything(1)  # as a rank that joins its world
        status = run_command(kind, arguments)
    return status, " ".join(said.getvalue().split())


@functools.cache
def straight() -> Path:
    """The folder of a run that nobody disturbed."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-checkpoints-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    status, said = run(arguments(folder / "run"))
    assert status == 0, said
    return folder / "run"


def copy(folder: Path, to: Path) -> None:
    """Copy a run's folder; large files, which nobody changes in place, are links."""

    def either(file: str, target: str) -> None:
        if os.stat(file).st_size > _LARGE:
            os.link(file, target)
        else:
            shutil.copy2(file, target)

    shutil.copytree(folder, to, copy_function=either)


def change(file: Path, how: Callable[[bytes], bytes]) -> None:
    """Put other content into a file."""
    content = how(file.read_bytes())
    file.unlink()
    file.write_bytes(content)


def flip(content: bytes, place: float = 0.5) -> bytes:
    at = min(len(content) - 1, int(place * len(content)))
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def judged(wrong: list[str], began: float, said: str, message: str) -> Outcome:
    """2 if nothing is wrong, else 0 with the first thing that is."""
    seconds = time.monotonic() - began
    return Outcome(2, seconds, message) if not wrong else Outcome(0, seconds, f"{wrong[0]}; it said: {said[-400:]}")


# ---------------------------------------------------------------------------------------------- damaged checkpoints


def falls_back(spoil: Callable[[Path], object], named: str) -> Callable[[Path], Outcome]:
    """The newest checkpoint is spoilt: the run says so, continues from the one before, and ends as if nothing were."""

    def inject(folder: Path) -> Outcome:
        mine = folder / "run"
        copy(straight(), mine)
        newest = mine / "checkpoints" / f"step_{LAST}"
        spoil(newest)
        began = time.monotonic()
        status, said = run(arguments(mine))
        expected = f"{newest} is damaged: {named}"
        wrong = [
            *([f"exit status {status}"] if status else []),
            *([f"nothing says {expected!r}"] if expected not in said else []),
            *([f"nothing says that it continues after step {LAST - 1}"] if f"step_{LAST - 1}" not in said else []),
            *([] if os.path.lexists(newest.with_name(f"damaged.{newest.name}")) else ["it was not set aside"]),
            *differences(straight(), mine),
        ]
        return judged(wrong, began, said, sentence(said, "is damaged"))

    return inject


def sentence(said: str, word: str) -> str:
    """What was said around a word, without the folders."""
    at = said.find(word)
    begin = max(said.rfind("/", 0, at) + 1, at - 60)
    return said[begin : at + 200].replace("\n", " ")


def every_file(folder: Path) -> Outcome:
    """A bit flips in one file after the other, at its beginning, in its middle and at its end."""
    store = CheckpointStore(folder / "run" / "checkpoints")
    copy(straight(), folder / "run")
    began, newest = time.monotonic(), store.path(LAST)
    files = [file for file in sorted(newest.rglob("*")) if file.is_file()]
    wrong = []
    for file in files:
        whole = file.read_bytes()
        for place in (0.0, 0.5, 1.0):
            change(file, functools.partial(flip, place=place))
            choice = store.choose("auto", None)
            name = file.relative_to(newest).as_posix()
            if choice.path != store.path(LAST - 1) or choice.damaged[0].damages[0].file != name:
                wrong.append(f"{name} flipped at {place:.0%}: {choice}")
            change(file, lambda _, whole=whole: whole)
    if store.choose("auto", None).path != newest:
        wrong.append("put back as it was, it is not taken")
    return judged(wrong, began, "", f"{3 * len(files)} flips in {len(files)} files, each found and named")


def none_is_whole(folder: Path) -> Outcome:
    """All checkpoints are damaged: the run stops, names each, and changes nothing."""
    mine = folder / "run"
    copy(straight(), mine)
    for shard in mine.glob("checkpoints/step_*/actor/shard-*"):
        change(shard, flip)
    before = sorted(str(path) for path in mine.rglob("*"))
    began = time.monotonic()
    status, said = run(arguments(mine))
    wrong = [
        *([] if status in (1, 2) else [f"exit status {status}"]),
        *([] if "none is whole" in said and said.count("is damaged: actor/shard-") == LAST else ["poorly said"]),
        *([] if sorted(str(path) for path in mine.rglob("*")) == before else ["the folder was changed"]),
    ]
    return judged(wrong, began, said, sentence(said, "none is whole"))


def named_one(folder: Path) -> Outcome:
    """`trainer.resume_from_path` names a damaged checkpoint: refused, with the file's name."""
    copy(straight(), folder / "run")
    named = folder / "run" / "checkpoints" / f"step_{LAST}"
    change(named / "actor" / STATE_FILE, flip)
    began = time.monotonic()
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={named}"]
    status, said = run(arguments(folder / "other", *resume))
    poor = f"is damaged: actor/{STATE_FILE}" not in said or f"step_{LAST - 1}" not in said
    wrong = [*([] if status == 2 else [f"exit status {status}"]), *(["poorly said"] if poor else [])]
    return judged(wrong, began, said, sentence(said, "is damaged"))


def superseded(folder: Path) -> Outcome:
    """`trainer.resume_from_path` names a checkpoint that the run has superseded: refused, and nothing is changed."""
    mine = folder / "run"
    copy(straight(), mine)
    checkpoints = mine / "checkpoints"

    def resumed(named: Path, to: Path = mine) -> tuple[int, str]:
        return run(arguments(to, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={named}"))

    status, said = resumed(checkpoints / "step_1")
    assert status == 0, said
    aside = checkpoints / "superseded" / "1" / "step_2"
    before = {path: path.stat().st_mtime_ns for path in mine.rglob("*") if path.is_file()}
    began = time.monotonic()
    status, said = resumed(aside)
    after = {path: path.stat().st_mtime_ns for path in mine.rglob("*") if path.is_file()}
    status_of_branch, said_of_branch = resumed(aside, folder / "branch")
    wrong = [
        *([] if status == 2 else [f"exit status {status}"]),
        *([] if "holds checkpoints of an earlier run" in said and "Traceback" not in said else ["poorly said"]),
        *([] if before == after else ["the folder was changed"]),
        *([] if not status_of_branch else [f"in a folder of its own: exit status {status_of_branch}"]),
        *([] if f"resumed from {aside}" in said_of_branch else ["in a folder of its own, it was not begun with"]),
    ]
    return judged(wrong, began, said, sentence(said, "holds checkpoints"))


def evaluated(folder: Path) -> Outcome:
    """`hrl eval` and `hrl export` are given a checkpoint whose weights are damaged."""
    from hrl.trained.export import export
    from hrl.trained.folders import find_trained

    copy(straight(), folder / "run")
    change(folder / "run" / "checkpoints" / f"step_{LAST}" / "hf" / "model.safetensors", flip)
    began, said = time.monotonic(), []
    for use in (lambda: find_trained(str(folder / "run")), lambda: export(str(folder / "run"), folder / "out")):
        with contextlib.suppress(CheckpointError):
            try:
                use()
            except CheckpointError as error:
                said.append(str(error))
                raise
    wrong = [] if len(said) == 2 and all("hf/model.safetensors is not" in each for each in said) else ["it was used"]
    wrong += ["a part of the export is left"] if [*folder.glob("*out*")] else []
    return judged(wrong, began, str(said), sentence(" ".join(said), "is damaged"))


def other_kind(kind: str) -> Callable[[Path], Outcome]:
    """A run of another kind whose newest checkpoint is damaged continues from the one before."""

    def inject(folder: Path) -> Outcome:
        mine = folder / "run"
        command = [
            f"quickstart={kind}", f"trainer.default_local_dir={mine}", f"model.path={runner().model}",
            "trainer.device=cpu", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=null", "trainer.test_freq=-1",
            "data.train_batch_size=4", "trainer.val_before_train=false",
        ]  # fmt: skip
        status, said = run([*command, "trainer.total_training_steps=2"], kind)
        assert status == 0, said
        newest = mine / "checkpoints" / "step_2"
        shard = next(newest.glob("*/shard-*"))
        change(shard, flip)
        began = time.monotonic()
        status, said = run([*command, "trainer.total_training_steps=3"], kind)
        steps = CheckpointStore(mine / "checkpoints").steps()
        wrong = [
            *([f"exit status {status}"] if status else []),
            *([] if f"{newest} is damaged: {shard.relative_to(newest)}" in said else ["the file is not named"]),
            *([] if steps == [1, 2, 3] else [f"checkpoints of {steps}"]),
        ]
        return judged(wrong, began, said, sentence(said, "is damaged"))

    return inject


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def empty_state(path: Path) -> None:
    change(path / STATE_FILE, lambda _: b"")


def pointer(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to("step_99")


def without_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


def copied_in_part(path: Path) -> None:
    """As a copy leaves it that was cut short: neither a manifest nor a record, and half of a shard."""
    without_manifest(path)
    for record in path.rglob("written*.json"):
        record.unlink()
    cut(SHARD)(path)


def state_alone(path: Path) -> None:
    state = (path / STATE_FILE).read_bytes()
    empty(path)
    (path / STATE_FILE).write_bytes(state)


def cut(file: str) -> Callable[[Path], None]:
    return lambda path: change(path / file, lambda content: content[: len(content) // 2])


SHARD = "actor/shard-00001-model-00001-of-00001.safetensors"

# ---------------------------------------------------------------------------------------------- disks that refuse


@contextmanager
def small_disk(at: Path, megabytes: float) -> Iterator[None]:
    """A disk of its own for a folder; it takes root, and may not be had."""
    at.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(megabytes * 1e6)}", "tmpfs", str(at)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


@functools.cache
def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder) / "disk", 1):
                return True
        except (subprocess.CalledProcessError, OSError):
            return False


def no_room(folder: Path) -> Outcome:
    """The disk has no room for a single checkpoint: said before a step is made."""
    if not can_mount():
        return not_tried(NO_MOUNT)
    mine = folder / "run"
    with small_disk(mine, 60):
        began = time.monotonic()
        status, said = run(arguments(mine))
        made = (mine / "metrics.jsonl").exists()
    wrong = [
        *([] if status == 1 else [f"exit status {status}"]),
        *([] if "a checkpoint takes " in said and "Traceback" not in said else ["poorly said"]),
        *(["a step was made"] if made else []),
    ]
    return judged(wrong, began, said, sentence(said, "a checkpoint takes"))


def full(megabytes: float, *overrides: str, goes_on: bool = False) -> Callable[[Path], Outcome]:
    """The checkpoints are on a disk that is full in the second save.

    Args:
        megabytes: Room beyond the first checkpoint.
        *overrides: Of the command.
        goes_on: Whether the run is to go on without.
    """

    def inject(folder: Path) -> Outcome:
        if not can_mount():
            return not_tried(NO_MOUNT)
        size = Manifest.read(straight() / "checkpoints" / "step_1").size / 1e6
        mine = folder / "run"
        store = CheckpointStore(mine / "checkpoints")
        with small_disk(store.folder, size + megabytes + 0.1), pytest.MonkeyPatch.context() as patch:
            patch.setattr("hrl.cluster.disk.room_in", lambda _: 1 << 40)  # as where a quota or another job takes it
            began = time.monotonic()
            status, said = run(arguments(mine, *overrides))
            choice = store.choose("auto", None)
            left = [path.name for path in store.folder.iterdir()]
        wrong = [
            *([] if status == 1 else [f"exit status {status}"]),
            *([] if "step 2 is not saved: " in said else ["poorly said"]),
            *([] if "; kept: step 1" in said and "Traceback" not in said else ["poorly said"]),
            *([] if choice.path == store.path(1) and left == ["step_1"] else [f"what is left: {left}"]),
            *([] if not goes_on or ("The run goes on" in said and "step 3 is not saved" in said) else ["it stopped"]),
        ]
        return judged(wrong, began, said, sentence(said, "is not saved"))

    return inject


def log_on_a_full_disk(goes_on: bool) -> Callable[[Path], Outcome]:
    """The disk of the run folder, on which the checkpoints are not, is full while the log of step 2 is written.

    Args:
        goes_on: Whether the run is to go on, and finds room again in step 3; else it ends, and is started again.
    """
    overrides = ["trainer.on_save_error=continue"] if goes_on else []

    def inject(folder: Path) -> Outcome:
        if not can_mount():
            return not_tried(NO_MOUNT)
        mine, elsewhere, filler = folder / "run", folder / "elsewhere", folder / "run" / "filler"
        write_metrics = RunFolder.write_metrics

        def fill(self: RunFolder, step: int, metrics: Any) -> None:
            filler.unlink(missing_ok=True)
            with contextlib.suppress(OSError), open(filler if step == 2 else os.devnull, "wb", buffering=0) as file:
                while step == 2:
                    file.write(b"f" * 512)
            write_metrics(self, step, metrics)

        with small_disk(mine, 1), pytest.MonkeyPatch.context() as patch:
            elsewhere.mkdir()
            (mine / "checkpoints").symlink_to(elsewhere)
            patch.setattr("hrl.cluster.disk.room_in", lambda _: 1 << 40)  # it is that of the run folder
            began = time.monotonic()
            with pytest.MonkeyPatch.context() as full_in_step_2:
                full_in_step_2.setattr(RunFolder, "write_metrics", fill)
                status, said = run(arguments(mine, *overrides))
            log = (mine / "metrics.jsonl").read_text()
            filler.unlink(missing_ok=True)
            if not goes_on:
                status_again, _ = run(arguments(mine))
            wrong = [
                *([] if status == (0 if goes_on else 1) else [f"exit status {status}"]),
                *([] if "can't be written: No space left on device" in said else ["poorly said"]),
                *([] if not goes_on or "the log is written again" in said else ["nothing says that it goes on"]),
                *([] if "Traceback" not in said else ["a traceback"]),
                *(
                    []
                    if log.endswith("\n") and log.count("\n") == (LAST if goes_on else 1)
                    else [f"log: {log[-80:]!r}"]
                ),
                *([] if goes_on or not status_again else [f"started again: exit status {status_again}"]),
                *(each for each in differences(straight(), mine) if not goes_on or not each.endswith(ITS_KEY)),
            ]
        return judged(wrong, began, said, sentence(said, "can't be written"))

    return inject


def refused(
    fault: Callable[[pytest.MonkeyPatch], AbstractContextManager[Any] | None], what: str
) -> Callable[[Path], Outcome]:
    """From the second save on, something refuses what is written: one line, nothing left, the first stays."""

    def inject(folder: Path) -> Outcome:
        mine = folder / "run"
        store = CheckpointStore(mine / "checkpoints")
        status, said = run(arguments(mine, "trainer.total_training_steps=1"))
        assert status == 0, said
        began = time.monotonic()
        with pytest.MonkeyPatch.context() as patch, fault(patch) or contextlib.nullcontext():
            status, said = run(arguments(mine))
        left = [path.name for path in store.folder.iterdir() if not path.name.startswith("damaged.")]
        wrong = [
            *([] if status == 1 else [f"exit status {status}"]),
            *([] if "step 2 is not saved: " in said and what in said and "Traceback" not in said else ["poorly said"]),
            *([] if store.choose("auto", None).path == store.path(1) and left == ["step_1"] else [f"left: {left}"]),
        ]
        return judged(wrong, began, said, sentence(said, "is not saved"))

    return inject


def failing(target: str, number: int) -> Callable[[pytest.MonkeyPatch], None]:
    """An operation of the system fails with an error number inside the second save."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        patch.setattr(target, fail)

    return fault


@contextmanager
def largest_file(megabytes: float) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(megabytes * 1e6), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def lies_about_names(patch: pytest.MonkeyPatch) -> None:
    rename = Path.rename
    patch.setattr("hrl.cluster.checkpoints.RENAME_PATIENCE_S", 0.2)
    patch.setattr(Path, "rename", lambda self, to: None if self.name.startswith("tmp.step_") else rename(self, to))


def changes_what_it_gets(patch: pytest.MonkeyPatch) -> None:
    from hrl.workers.engine import digest

    write = digest.DigestingFile.write

    def worn(self: Any, data: Any) -> None:
        if len(data) > 1000:
            self._file.seek(-1, os.SEEK_CUR) if self._size else None
            self._file.write(b"!") if self._size else None
        write(self, data)

    patch.setattr(digest.DigestingFile, "write", worn)


FLIPPED = "a byte of a checkpoint flipped"
TORN = "the newest checkpoint truncated, empty or wrong"
FULL = "the disk is full while a checkpoint is written"
LOG_FULL = "the disk is full while the log is written"
LIES = "a file system that does not keep what it is given"

FAULTS = [
    Fault(FLIPPED, "every file, three places", every_file),
    Fault(FLIPPED, "a shard, continued", falls_back(lambda path: change(path / SHARD, flip), f"{SHARD} is not what")),
    Fault(FLIPPED, "the driver's state", falls_back(lambda path: change(path / STATE_FILE, flip), f"{STATE_FILE} is")),
    Fault(FLIPPED, "the manifest", falls_back(lambda path: change(path / MANIFEST, flip), f"{MANIFEST} is damaged")),
    Fault(FLIPPED, "the checkpoint that resume_from_path names", named_one),
    Fault(FLIPPED, "the weights that eval and export read", evaluated),
    *(Fault(FLIPPED, f"in a run of {kind}", other_kind(kind)) for kind in ("sft", "dpo", "rm")),
    Fault(TORN, "a shard cut in half", falls_back(cut(SHARD), f"{SHARD} has ")),
    Fault(TORN, "an empty state", falls_back(empty_state, f"{STATE_FILE} has")),
    Fault(TORN, "a folder without files", falls_back(empty, f"{MANIFEST} is missing")),
    Fault(TORN, "a link that leads nowhere", falls_back(pointer, f"{MANIFEST} is missing")),
    Fault(TORN, "no manifest", falls_back(without_manifest, f"{MANIFEST} is missing")),
    Fault(TORN, "a copy that was cut short", falls_back(copied_in_part, f"{MANIFEST} is missing: the folder was not")),
    Fault(TORN, "nothing but its state", falls_back(state_alone, f"{MANIFEST} is missing: the folder was not")),
    Fault(
        TORN,
        "another run's shard among the shards",
        falls_back(lambda path: shutil.copy(path / SHARD, path / "actor" / "shard-9.safetensors"), "actor/shard-9"),
    ),
    Fault("a checkpoint of another history", "from superseded/, in the same folder", superseded),
    Fault("no checkpoint is whole", "a flipped byte in each", none_is_whole),
    Fault(FULL, "at the shard", full(40)),
    Fault(FULL, "at the exported weights", full(80)),
    Fault(FULL, "at the tokenizer or the state", full(93.5)),
    Fault(FULL, "seen before the first step", no_room),
    Fault(FULL, "the run is to go on", full(40, "trainer.on_save_error=continue", goes_on=True)),
    Fault(FULL, "a limit on the size of files", refused(lambda _: largest_file(30), "File too large")),
    Fault(LOG_FULL, "the run ends, and is started again", log_on_a_full_disk(goes_on=False)),
    Fault(LOG_FULL, "the run is to go on, and there is room again", log_on_a_full_disk(goes_on=True)),
    Fault(
        FULL,
        "a quota, at the driver's manifest",
        refused(failing("hrl.cluster.manifest.Manifest.write", errno.EDQUOT), "Disk quota exceeded"),
    ),
    Fault(
        "the run folder becomes read-only",
        "at the first file",
        refused(failing("hrl.workers.engine.digest.DigestingFile.write", errno.EROFS), "Read-only file system"),
    ),
    Fault(
        "the run folder becomes read-only",
        "when it is made durable",
        refused(failing("hrl.workers.engine.background.os.fsync", errno.EIO), "Input/output error"),
    ),
    Fault(LIES, "a rename that does not happen", refused(lies_about_names, "was renamed to step_2 without an error")),
    Fault(LIES, "a byte that it changes", refused(changes_what_it_gets, "is not what was written to it: read back")),
]
