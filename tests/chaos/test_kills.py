"""A run that is killed twice in one go: the short half of `tests/chaos/kills.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from hrl.cluster.checkpoints import CheckpointStore, state_text
from hrl.report.run_folder import RunFolder
from tests.chaos import kills
from tests.chaos.kills import STATEFUL, Chain, Progress, Scene, Straight, judged, store_of
from tests.chaos.victims import in_one_process


@pytest.mark.cluster
def test_a_run_that_was_killed_twice_in_place_of_a_write_is_bit_for_bit_the_run_that_nobody_killed(
    tmp_path: Path,
) -> None:
    chain = Chain("twice", Scene(in_one_process, STATEFUL, steps=3), kills=2, at_writes=True, seed=9)
    for fault in chain.faults():
        outcome = fault.inject(tmp_path)
        assert outcome.score == 2, outcome.message
    assert chain.killed == 2


class Ended:
    """A run that ends at once."""

    pid = None

    def poll(self) -> int:
        return 0

    def output(self) -> str:
        return ""


def test_a_run_that_had_ended_is_no_kill_and_a_chain_that_kills_too_seldom_has_shown_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kills, "differences", lambda *_: [])
    scene = Scene(lambda *_: Ended(), (), steps=3, base=lambda _: [])
    vars(scene)["straight"] = Straight(tmp_path, first_s=0.1, step_s=0.1, first_operations=3, step_operations=3)
    chain = Chain("late", scene, kills=3, at_writes=True)
    *tried, last = [fault.inject(tmp_path) for fault in chain.faults()]
    assert chain.killed == 0 and all("no kill" in outcome.message for outcome in tried)
    assert last.score == 0 and "only 0 of 3 kills" in last.message


@pytest.mark.parametrize(
    ("logged", "saved", "begun", "score"),
    [(2, [], None, 2), (7, [3], None, 2), (7, [], None, 0), (6, [3], 6, 2), (9, [3], 9, 0)],
)
def test_the_newest_checkpoint_may_be_one_interval_older_than_what_was_begun_and_not_two(
    tmp_path: Path, logged: int, saved: list[int], begun: int | None, score: int
) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, logged + 1)))
    store = CheckpointStore(RunFolder.checkpoints_in(tmp_path))
    for step in saved:
        store.begin(step)
        store.commit(step, state_text({"step": step}))
    if begun:
        store.begin(begun)
    outcome = judged(tmp_path, "now", 0.0, interval=3)
    assert outcome.score == score, outcome.message


def test_a_checkpoint_that_is_damaged_in_the_store_alone_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for each in (folder, store_of(folder)):
        store = CheckpointStore(RunFolder.checkpoints_in(each))
        (store.begin(1) / "weights").write_bytes(b"wwww")
        store.commit(1, state_text({"step": 1}))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert judged(folder, "now", 0.0).score == 2
    (store.path(1) / "weights").write_bytes(b"wxww")
    outcome = judged(folder, "now", 0.0)
    assert outcome.score == 0 and "in its store, the steps [1] are not whole" in outcome.message


def test_progress_is_a_longer_log_also_after_a_resume_has_cut_it_and_a_save_that_was_not_there(tmp_path: Path) -> None:
    log, saves = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    (saves / "tmp.step_4").mkdir(parents=True)
    log.write_text("three lines\n" * 3)
    progress = Progress(tmp_path)
    assert not progress.has_been_made()
    log.write_text("one line\n")
    assert not progress.has_been_made(), "a resume cuts the log"
    log.write_text("one line\n" * 2)
    assert progress.has_been_made()
    progress = Progress(tmp_path)
    assert not progress.has_been_made()
    (saves / "tmp.step_5").mkdir()
    assert progress.has_been_made()
