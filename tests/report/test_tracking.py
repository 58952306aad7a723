import logging
import sys
import threading
import types
from importlib.machinery import ModuleSpec

import pytest

from hrl.report import tracking
from hrl.report.tracking import Tracking, sample_table

SAMPLE = {"prompt": "1+1", "response": "2", "score": 1.0, "uid": "a"}


class Recorder:
    """A tracker that writes down what it was told."""

    def __init__(self, run):
        self.run = run
        self.steps = []
        self.generations = []
        self.finished = False

    def log(self, metrics, step):
        self.steps.append((step, dict(metrics)))

    def log_generations(self, generations, step):
        self.generations.append((step, generations))

    def finish(self):
        self.finished = True


class Raising(Recorder):
    def log(self, metrics, step):
        raise OSError("no route to host")


class Hanging(Recorder):
    def log(self, metrics, step):
        threading.Event().wait()


class NeverStarts(Recorder):
    def __init__(self, run):
        raise PermissionError("no key")


@pytest.fixture
def install(monkeypatch):
    """Registers a tracker under the name of a module that is there, and returns the instances made."""

    def add(cls, name):
        made = []
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(tracking.TRACKERS, name, lambda run: made.append(cls(run)) or made[0])
        return made

    return add


def test_every_tracker_gets_every_step_in_order(tmp_path, install):
    first, second = install(Recorder, "first_tracker"), install(Recorder, "second_tracker")
    tracker = Tracking("proj", "exp", ["first_tracker", "second_tracker"], {"a": 1}, run_dir=tmp_path)
    for step in range(20):
        tracker.log({"x": step * 2.0}, step)
    tracker.log_generations([SAMPLE], 19)
    tracker.finish()
    for made in (first, second):
        assert made[0].steps == [(step, {"x": step * 2.0}) for step in range(20)]
        assert made[0].generations == [(19, (SAMPLE,))]
        assert made[0].finished
        assert (made[0].run.project, made[0].run.name, made[0].run.config) == ("proj", "exp", {"a": 1})


@pytest.mark.parametrize("broken", [Raising, NeverStarts])
def test_a_tracker_that_raises_stops_neither_the_run_nor_its_neighbour(tmp_path, install, caplog, broken):
    install(broken, "broken_tracker")
    good = install(Recorder, "good_tracker")
    with caplog.at_level(logging.WARNING):
        tracker = Tracking("p", "e", ["broken_tracker", "good_tracker"], run_dir=tmp_path)
        for step in range(5):
            tracker.log({"x": 1.0}, step)
        tracker.finish()
    assert len(good[0].steps) == 5
    warnings = [record.message for record in caplog.records if "broken_tracker" in record.message]
    assert len(warnings) == 1, "said once, not at every step"


def test_failures_are_counted(tmp_path, install):
    install(Raising, "broken_tracker")
    tracker = Tracking("p", "e", ["broken_tracker"], run_dir=tmp_path)
    for step in range(3):
        tracker.log({"x": 1.0}, step)
    tracker.finish()
    assert tracker.failures == 3


def test_a_tracker_that_hangs_holds_up_nobody(tmp_path, install, monkeypatch):
    install(Hanging, "hanging_tracker")
    monkeypatch.setattr(tracking, "_MAX_WAITING_CALLS", 10)
    tracker = Tracking("p", "e", ["hanging_tracker"], run_dir=tmp_path)
    for step in range(50):
        tracker.log({"x": 1.0}, step)
    tracker.finish(timeout_s=0.2)
    assert tracker.failures >= 40, "calls beyond the limit are counted, not kept"


def test_an_unknown_tracker_is_named_with_the_nearest_one(tmp_path):
    with pytest.raises(ValueError, match="no tracker 'wandbb'; did you mean 'wandb'"):
        Tracking("p", "e", ["wandbb"], run_dir=tmp_path)


def test_a_tracker_that_is_not_installed_names_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"uv pip install -e '\.\[swanlab\]'"):
        Tracking("p", "e", "swanlab", run_dir=tmp_path)


def test_a_table_shows_no_secret_that_an_environment_said():
    key = "sk-proj-aB3dE5fG7hJ9kL1mN3pQ5rS7tU9v"
    sample = {"prompt": "x", "response": "y", "question": f"Log in with {key}.", "ground_truth": None, "score": 1.0}
    assert key not in str(sample_table([sample])) and "Log in with" in str(sample_table([sample]))


def test_a_table_of_samples_has_truth_and_every_part():
    first = {"prompt": "<|user|>1+1", "question": "1+1", "response": "2", "score": 1.0, "ground_truth": 2}
    samples = [
        first | {"data_source": "sums", "reward_parts": {"exact": True}},
        SAMPLE | {"reward_parts": {"tags": 0.5}},
    ]
    assert sample_table(samples) == (
        ["source", "prompt", "truth", "response", "score", "exact", "tags"],
        [["sums", "1+1", "2", "2", 1.0, 1.0, None], [None, "1+1", None, "2", 1.0, None, 0.5]],
    )


def test_a_run_that_continues_is_the_same_run_to_its_trackers_and_another_run_is_another(tmp_path, install):
    made = install(Recorder, "some_tracker")
    known = []
    for folder in ("one", "one", "other"):
        (tmp_path / folder).mkdir(exist_ok=True)
        made.clear()
        Tracking("p", "e", "some_tracker", run_dir=tmp_path / folder).finish()
        known.append((made[0].run.id, made[0].run.continues))
    (first, new), (second, again), (third, third_again) = known
    assert first == second != third and len(first) == 21
    assert (new, again, third_again) == (False, True, False)


def test_a_run_without_trackers_has_no_file_of_them(tmp_path):
    Tracking("p", "e", "console", run_dir=tmp_path)
    assert not list(tmp_path.iterdir())
