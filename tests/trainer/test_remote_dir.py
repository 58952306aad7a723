"""Which checkpoints of a remote store count while a run makes their steps again."""

from __future__ import annotations

import io
import itertools
import math
import time
from pathlib import Path

import pytest
from rich.console import Console

from hrl.cluster.checkpoints import CheckpointStore, state_text
from hrl.cluster.remote_store import GivenUpError, RemoteStore, RemoteStoreError
from hrl.config import compose_cli
from hrl.processes.signals import RunStoppedError, StopRequest
from hrl.report.console import RunConsole
from hrl.report.run_folder import RunFolder
from hrl.trainer.remote_dir import sending, with_fetched

_NUMBERS = itertools.count()


class Going:
    """A run that goes on from step 1, whose store has steps 1 to 3 of it."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.store = RemoteStore(f"memory://going-on-{next(_NUMBERS)}")
        self.there, self.shown = CheckpointStore(path / "there"), io.StringIO()
        for step in (1, 2, 3):
            self.store.upload(save(self.there, step), step, {})
        config = compose_cli(
            [
                f"trainer.default_local_dir={path / 'run'}",
                f"trainer.default_remote_dir={self.store.address}",
                *overrides,
            ]
        )
        self.trainer = config.trainer
        self.folder = RunFolder(path / "run", resume=True)
        self.here = CheckpointStore(self.folder.checkpoints)

    def begin(self, *saves: int, stop: StopRequest | None = None) -> str:
        """Let the run begin, save these steps and end; return what it says."""
        console = RunConsole(Console(file=self.shown, width=400, color_system=None))
        with sending(self.trainer, self.folder, console, stop) as uploads:
            for step in saves:
                save(self.here, step)
                uploads.send(step)
        self.folder.close()
        return self.shown.getvalue()


def save(checkpoints: CheckpointStore, step: int) -> Path:
    checkpoints.begin(step)
    return checkpoints.commit(step, state_text({"step": step}))


def test_what_seemed_damaged_at_the_start_counts_until_the_run_has_saved_again(tmp_path: Path) -> None:
    run = Going(tmp_path)
    save(run.here, 1)
    assert "no longer" not in run.begin()
    assert run.store.steps() == [1, 2, 3]
    assert "checkpoints of steps 2, 3 in memory://" in run.begin(2)
    assert run.store.steps() == [1, 2] and run.store.superseded() == [3]


def test_where_the_user_goes_back_in_a_run_the_later_ones_count_no_longer(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoints" / "step_1"
    run = Going(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={step}")
    save(run.here, 1)
    assert "checkpoints of steps 2, 3 in memory://" in run.begin()
    assert run.store.steps() == [1] and run.store.superseded() == [2, 3]


class Asked(StopRequest):
    """A request that a signal makes as soon as the run waits for its store, of which `left_s` is left then."""

    def __init__(self, left_s: float) -> None:
        super().__init__()
        self.ends_at, self.looks = time.monotonic() + left_s, 0

    @property
    def is_asked(self) -> bool:
        return self.looks > 1

    def left_of(self, share: float) -> float:
        self.looks += 1
        return self.ends_at - time.monotonic() if self.is_asked else math.inf


def test_a_signal_shortens_the_wait_for_the_last_checkpoint_and_the_next_start_sends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(store: RemoteStore, *_: object) -> None:
        assert store.give_up.wait(60)
        raise GivenUpError

    run = Going(tmp_path)
    save(run.here, 3)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteStore, "upload", hangs)
        with pytest.raises(RunStoppedError) as stopped:
            run.begin(4, stop=Asked(0.2))
    assert stopped.value.step == 4
    assert "step 4 is not in memory://" in run.shown.getvalue()
    assert run.store.steps() == [1, 2, 3]
    run.folder.close()
    run.folder = RunFolder(tmp_path / "run", resume=True)
    run.begin()
    assert run.store.steps() == [3, 4]


def test_a_run_that_was_asked_to_end_while_it_sent_all_ends_as_one_that_was_not(tmp_path: Path) -> None:
    run = Going(tmp_path)
    save(run.here, 3)
    run.begin(4, stop=Asked(60.0))
    assert run.store.steps() == [3, 4]


@pytest.mark.parametrize(
    "secret", ["s3://me:canary@bucket/run{}", "s3://bucket/run{}?sig=canary", "s3://b/run{}#canary"]
)
@pytest.mark.parametrize("resumes", [False, True])
def test_an_address_with_a_secret_is_refused_before_it_is_shown(tmp_path: Path, secret: str, resumes: bool) -> None:
    step = secret.format("/checkpoints/step_2")
    named = [f"trainer.resume_from_path={step}", "trainer.resume_mode=resume_path"]
    overrides = named if resumes else [f"trainer.default_remote_dir={secret.format('')}"]
    shown = io.StringIO()
    console = RunConsole(Console(file=shown, width=400, color_system=None))
    with pytest.raises(
        RemoteStoreError, match=f"^{overrides[0].partition('=')[0]} holds .* never in an address"
    ) as caught:
        with_fetched(compose_cli([f"trainer.default_local_dir={tmp_path}", *overrides]), console)
    assert "canary" not in str(caught.value) and shown.getvalue() == "" and not list(tmp_path.iterdir())


def test_of_what_was_fetched_by_name_the_newest_stays(tmp_path: Path) -> None:
    run, shown = Going(tmp_path), io.StringIO()
    run.folder.close()
    console = RunConsole(Console(file=shown, width=400, color_system=None))
    other = RemoteStore(f"memory://going-on-{next(_NUMBERS)}")
    other.upload(run.there.path(3), 3, {})

    def fetched(store: RemoteStore, step: int) -> Path:
        named = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={store.address_of(step)}"]
        config = with_fetched(compose_cli([f"trainer.default_local_dir={tmp_path / 'run'}", *named]), console)
        return Path(str(config.trainer.resume_from_path))

    for store, step in ((run.store, 1), (run.store, 2), (run.store, 2), (other, 3)):
        there = fetched(store, step)
        CheckpointStore(there.parent).begin(9)  # a fetch that is killed
    assert (
        f"removed {fetched(run.store, 2).parent.parent / there.parent.name}, which an earlier start" in shown.getvalue()
    )
    assert [path.name for path in (tmp_path / "run" / "fetched").glob("*/*")] == ["step_2"]


@pytest.fixture(autouse=True)
def _few_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hrl.cluster.remote_store._PAUSES_S", (0.0,))
