"""A run that is killed twice in one go: the short half of `tests/chaos/kills.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import kills
from tests.chaos.kills import STATEFUL, Chain, Progress, Scene, Straight
from tests.chaos.victims import in_one_process


@pytest.mark.cluster
@pytest.mark.timeout(200)
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
    scene = Scene(lambda *_: Ended(), (), steps=3)
    vars(scene)["straight"] = Straight(tmp_path, first_s=0.1, step_s=0.1, first_operations=3, step_operations=3)
    chain = Chain("late", scene, kills=3, at_writes=True)
    *tried, last = [fault.inject(tmp_path) for fault in chain.faults()]
    assert chain.killed == 0 and all("no kill" in outcome.message for outcome in tried)
    assert last.score == 0 and "only 0 of 3 kills" in last.message


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
