"""What a run leaves and shows, from its first step to its end, whatever the end is."""

import errno
import io
import socket
from contextlib import closing
from time import perf_counter
from types import SimpleNamespace

import pytest
from rich.console import Console

from hrl.config import compose_cli
from hrl.processes.terminal import StandardStreams
from hrl.report.charts import LOSS, REWARD
from hrl.report.console import RunConsole
from hrl.report.dashboard import Dashboard
from hrl.report.health import Raised
from hrl.report.outcome import read_outcome
from hrl.report.page_server import LiveViewError
from hrl.report.phases import Tokens
from hrl.report.reporter import RunReporter
from hrl.report.run_folder import RunFolder, read_jsonl
from hrl.trainer.kinds import KINDS

CONFIG = compose_cli([])


def sample(prompt, response, score):
    return {"data_source": "sums", "prompt": prompt, "response": response, "score": score, "finish_reason": "length"}


def samples(*scores, first="2"):
    return [sample("1+1", first, scores[0]), sample("2+2", "4", scores[1])]


class Run:
    """A reporter and what it writes to the terminal."""

    def __init__(self, path, *, resume=False, picture=REWARD, keeps_refused=False, streams=None):
        self.path = path
        self.file = io.StringIO()
        console = RunConsole(Console(file=self.file, width=120, color_system=None))
        console.expect(2, KINDS["ppo"].line(CONFIG), ["gen"])
        folder = RunFolder(path, resume=resume, keeps_refused=keeps_refused)
        config = {"trainer": {"seed": 1}}
        self.reporter = RunReporter(folder, console, CONFIG.trainer, config, picture=picture, streams=streams)

    @property
    def shown(self):
        return self.file.getvalue()

    def told(self):
        """What was shown, without the ends of its lines."""
        return " ".join(self.shown.split())

    @property
    def page(self):
        return (self.path / "report.html").read_text()

    def step(self, step, show=False, **metrics):
        with self.reporter.step(step), self.reporter.phase("step"), self.reporter.phase("gen"):
            pass
        own = self.reporter.own_metrics(Tokens(response=4, all=8))
        self.reporter.step_done(step, metrics | own, perf_counter())
        self.reporter.samples(step, samples(0.0, 1.0), show=show)

    def validate(self, step, *scores, first="2"):
        self.reporter.validation_samples(step, samples(*scores, first=first), tracked=0)
        return {"val/sums/mean@1": sum(scores) / 2, "val/sums/n": 2.0}


def test_a_run_leaves_picture_report_and_samples_and_names_them(tmp_path):
    run = Run(tmp_path)
    with run.reporter:
        run.validate(0, 0.0, 1.0)
        run.step(1)
        run.step(2)
        run.validate(2, 1.0, 1.0, first="two")
    names = {file.name for file in (tmp_path / "rollouts").iterdir()}
    assert names == {"val_step_0.jsonl", "step_1.jsonl", "step_2.jsonl", "val_step_2.jsonl"}
    assert "before and after: 1 better, 0 worse, 1 as before" in run.shown
    assert "two" in run.shown
    assert f"reward curve: {tmp_path}/reward_curve.png\nreport: {tmp_path}/report.html\n" in run.shown
    assert ">finished</span>" in run.page and 'data-chart="seconds"' in run.page


def test_a_run_that_learns_from_data_leaves_a_loss_curve_and_no_samples(tmp_path):
    run = Run(tmp_path, picture=LOSS)
    with run.reporter as reporter:
        with reporter.step(1), reporter.phase("step"), reporter.phase("update"):
            pass
        own = reporter.own_metrics(Tokens(response=4, all=8))
        reporter.step_done(1, {"train/loss": 0.5} | own, perf_counter())
    assert {"loss_curve.png", "report.html"} <= {file.name for file in tmp_path.iterdir()}
    assert not (tmp_path / "rollouts").exists() and not (tmp_path / "reward_curve.png").exists()
    (record,) = records_of(tmp_path)
    assert record["perf/total_num_tokens"] == 8 and record["timing_per_token_ms/update"] >= 0


def test_a_run_without_validation_compares_nothing(tmp_path):
    run = Run(tmp_path)
    with run.reporter:
        run.step(1)
    assert "before and after" not in run.shown
    assert "No validation was run." in run.page


def test_a_run_without_a_step_still_leaves_its_report(tmp_path):
    run = Run(tmp_path)
    with run.reporter:
        pass
    assert not (tmp_path / "reward_curve.png").exists()
    stage, shown = run.shown.splitlines()
    assert stage.endswith("] writing the report") and shown == f"report: {tmp_path}/report.html"


@pytest.mark.parametrize(
    ("error", "told"),
    [(RuntimeError("rank 1: <lost>"), "failed"), (KeyboardInterrupt(), "interrupted")],
    ids=["failed", "interrupted"],
)
def test_the_error_of_a_run_goes_on_and_stands_in_the_report(tmp_path, error, told):
    run = Run(tmp_path)
    with pytest.raises(type(error)) as raised, run.reporter:
        run.step(1)
        raise error
    assert raised.value is error
    assert f">{told}</span>" in run.page
    assert ("RuntimeError: rank 1: &lt;lost&gt;" in run.page) == (told == "failed")


def test_a_report_that_cannot_be_written_hides_no_failure_and_frees_the_folder(tmp_path, caplog):
    run = Run(tmp_path)
    with pytest.raises(RuntimeError, match="the cause"), run.reporter:
        (tmp_path / "metrics.jsonl").write_text("no json\n")
        raise RuntimeError("the cause")
    assert "the report of the run could not be written" in caplog.text
    RunFolder(tmp_path).close()


@pytest.mark.parametrize(
    ("broken", "left"), [("write_picture", "report.html"), ("write_html_report", "reward_curve.png")]
)
def test_a_file_that_fails_does_not_keep_the_other_from_being_written(tmp_path, monkeypatch, caplog, broken, left):
    def fail(*_):
        raise ValueError("no font")

    monkeypatch.setattr(f"hrl.report.reporter.{broken}", fail)
    run = Run(tmp_path)
    with run.reporter:
        run.step(1)
    assert (tmp_path / left).exists() and f": {tmp_path / left}\n" in run.shown
    assert "could not be written" in caplog.text and "no font" in caplog.text


def records_of(path):
    return read_jsonl(path / "metrics.jsonl")


def test_a_resumed_run_compares_with_the_validation_before_it_was_interrupted(tmp_path):
    first = Run(tmp_path)
    with first.reporter as reporter:
        reporter.validation_done(0, first.validate(0, 0.0, 0.0))
        first.step(1)
    resumed = Run(tmp_path, resume=True)
    with resumed.reporter:
        resumed.step(2)
        resumed.validate(2, 1.0, 0.0)
    assert "before and after: 1 better, 0 worse, 1 as before" in resumed.shown
    assert [record["step"] for record in records_of(tmp_path)] == [0, 1, 2]


def test_a_finished_run_that_validates_again_keeps_one_record_a_step(tmp_path):
    first = Run(tmp_path)
    with first.reporter:
        first.step(1)
        first.step(2)
    before = records_of(tmp_path)
    again = Run(tmp_path, resume=True)
    with again.reporter as reporter:
        with reporter.phase("testing"):
            metrics = again.validate(2, 1.0, 0.0)
        reporter.validation_done(2, metrics)
    after = records_of(tmp_path)
    assert [record["step"] for record in after] == [1, 2]
    assert after[0] == before[0]
    assert after[1] == before[1] | {
        "val/sums/mean@1": 0.5,
        "val/sums/n": 2.0,
        "timing_s/testing": pytest.approx(0, abs=1),
    }


def test_the_last_step_shows_the_table_of_its_validation_and_the_others_do_not(tmp_path):
    run = Run(tmp_path)
    with run.reporter:
        for step in (1, 2):
            run.step(step, **run.validate(step, 1.0, 0.0))
    assert "validation after step 1" not in run.shown and run.shown.count("validation after step 2") == 1


def test_samples_are_kept_in_every_step_and_shown_where_asked(tmp_path):
    run = Run(tmp_path)
    with run.reporter:
        run.step(1)
        assert "samples of step" not in run.shown
        run.step(2, show=True)
    assert "samples of step 1" not in run.shown and "samples of step 2" in run.shown
    assert "ended by: length" in run.shown
    assert read_jsonl(tmp_path / "rollouts/step_1.jsonl") == samples(0.0, 1.0)


def test_what_a_tracker_failed_to_take_is_counted_in_the_metrics(tmp_path):
    run = Run(tmp_path)
    with run.reporter:
        run.step(1)
        run.reporter._tracking = SimpleNamespace(failures=2, log=lambda *_: None, finish=lambda: None)
        run.step(2)
    assert [record.get("tracking/failures") for record in records_of(tmp_path)] == [None, 2]


def test_what_the_console_lost_is_counted_in_the_metrics(tmp_path):
    streams = StandardStreams()
    run = Run(tmp_path, streams=streams)
    with run.reporter:
        run.step(1)
        streams.refused(1, OSError(errno.ENOSPC, "full"))
        run.step(2)
    assert [record.get("console/writes_lost") for record in records_of(tmp_path)] == [None, 1]


def test_how_a_run_ended_is_written_before_anything_is_said_of_it(tmp_path, monkeypatch):
    def closed(*_):
        raise BrokenPipeError

    run = Run(tmp_path, keeps_refused=True)
    with pytest.raises(BrokenPipeError), run.reporter:
        (tmp_path / "alarms.jsonl").mkdir()
        run.reporter.folder.write_alarm({})
        monkeypatch.setattr(run.reporter.console, "note", closed)
    assert read_outcome(tmp_path).status == "finished"


def test_a_log_that_the_disk_refuses_is_told_once_and_counted_and_told_when_it_is_written_again(tmp_path):
    run = Run(tmp_path, keeps_refused=True)
    log = tmp_path / "metrics.jsonl"
    with run.reporter:
        run.reporter.console.expect(4, KINDS["ppo"].line(CONFIG), ["gen"])
        run.step(1)
        log.rename(tmp_path / "moved")
        log.mkdir()
        run.step(2)
        run.step(3)
        assert run.told().count("can't be written: Is a directory; it is kept in memory") == 1
        assert "written again" not in run.told()
        log.rmdir()
        (tmp_path / "moved").rename(log)
        run.step(4)
        assert run.told().count("the log is written again") == 1
    records = records_of(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record.get("log/records_waiting") for record in records] == [None, None, 2, 4]
    assert "are lost" not in run.told()


def test_what_the_disk_refuses_to_the_end_is_told_as_lost(tmp_path):
    run = Run(tmp_path, keeps_refused=True)
    with run.reporter:
        (tmp_path / "alarms.jsonl").mkdir()
        run.reporter.folder.write_alarm({})
        run.step(1)
    assert "3 records of the log and the samples are lost, which the disk refused" in run.told()


# ---------------------------------------------------------------------------------------------- alarms and time


def make_steps(run, steps):
    """Steps whose answers are nearly all cut off."""
    for step in steps:
        metrics = {"timing_s/step": 2.0, "reward/mean": 0.5, "response_length/clip_ratio": 0.9}
        metrics |= run.reporter.judge(step, metrics)
        run.reporter.step_done(step, metrics, perf_counter())


def test_an_alarm_is_told_once_and_is_in_metrics_and_in_a_file_of_its_own(tmp_path):
    run = Run(tmp_path)
    with run.reporter:
        make_steps(run, range(1, 6))
    assert run.shown.count("alarm truncation in step 3: more than 0.5 of the answers") == 1
    lines = [line for line in run.shown.splitlines() if line.startswith("step ")]
    assert f"alarms: truncation in 3 of 5 steps; {tmp_path / 'alarms.jsonl'} has what they mean" in run.shown
    assert ["!" in line for line in lines] == [False, False, True, True, True]
    assert [record["health/truncation"] for record in read_jsonl(run.reporter.folder.metrics_file)] == [0, 0, 1, 1, 1]
    (alarm,) = read_jsonl(tmp_path / "alarms.jsonl")
    assert (alarm["alarm"], alarm["step"], alarm["threshold"]) == ("truncation", 3, 0.5)
    assert alarm["meaning"] and alarm["remedy"]


def test_a_run_that_continues_tells_no_alarm_twice_and_forgets_those_of_steps_that_are_made_again(tmp_path):
    first = Run(tmp_path)
    with first.reporter:
        make_steps(first, range(1, 6))
    again = RunFolder(tmp_path, resume=True)
    assert again.rewind(2, tmp_path / "aside")
    again.close()
    assert (read_jsonl(tmp_path / "alarms.jsonl"), len(read_jsonl(tmp_path / "aside" / "alarms.jsonl"))) == ([], 1)

    second = Run(tmp_path, resume=True)
    with second.reporter:
        make_steps(second, [3])
    assert "alarm truncation in step 3" in second.shown, "with the two steps before the interruption"
    third = Run(tmp_path, resume=True)
    with third.reporter:
        make_steps(third, [4, 5])
    assert "alarm truncation" not in third.shown and "step 4/2!" in third.shown
    assert len(read_jsonl(tmp_path / "alarms.jsonl")) == 1


def test_alarms_of_an_earlier_run_move_aside_with_it(tmp_path):
    with Run(tmp_path).reporter as reporter:
        reporter.folder.write_alarm(Raised("kl", 1, 1.0, "1.2, 1.3, 1.4").record())
    with Run(tmp_path).reporter:
        pass
    assert not (tmp_path / "alarms.jsonl").exists()
    assert (tmp_path / "earlier" / "1" / "alarms.jsonl").exists()


def test_a_start_that_fails_is_written_down_as_failed_and_leaves_no_run_that_goes_on(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        trainer = CONFIG.trainer.model_copy(update={"dashboard": taken.getsockname()[1]})
        console = RunConsole(Console(file=io.StringIO(), width=120, color_system=None))
        with closing(RunFolder(tmp_path)) as folder, pytest.raises(LiveViewError, match="choose another port"):
            RunReporter(folder, console, trainer, {"trainer": {"seed": 1}})
    assert read_outcome(tmp_path).status == "failed"
    RunFolder(tmp_path).close()


def test_a_start_that_fails_after_the_live_view_listens_frees_its_port(tmp_path, monkeypatch):
    views = []

    def fail(*_, **__):
        raise RuntimeError("no tracker")

    def listening(folder, asked):
        views.append(Dashboard(folder, port=0))
        return views[0]

    monkeypatch.setattr("hrl.report.reporter._dashboard", listening)
    monkeypatch.setattr("hrl.report.reporter.Tracking", fail)
    with pytest.raises(RuntimeError, match="no tracker"):
        Run(tmp_path)
    with socket.socket() as again:
        again.bind(("127.0.0.1", int(views[0].address.strip("/").rsplit(":", 1)[1])))
    assert read_outcome(tmp_path).status == "failed"


def test_a_run_that_goes_on_after_its_end_was_written_down_is_running(tmp_path):
    told = []
    with Run(tmp_path).reporter as reporter:
        for _ in range(2):
            with reporter.run(0):
                told.append(read_outcome(tmp_path).status)
            reporter.report_so_far()
            told.append(read_outcome(tmp_path).status)
    assert told == ["running", "finished", "running", "finished"]
