"""What moves at the foot of a terminal, and that it leaves the terminal as it was."""

import io
import logging
import re
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from hrl.report import console as console_module
from hrl.report.console import JsonConsole, RunConsole
from hrl.report.live import Foot, PhaseBar, RunBar, Stage
from hrl.report.step_line import Field, StepLine
from hrl.trainer.command import PresentStandardError

LINE = StepLine((Field("reward", ("reward/mean",), "6.3f"),), {})


def drawn(renderable: object, width: int = 80) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(renderable)
    return file.getvalue().splitlines()


def terminal(width: int = 80) -> tuple[RunConsole, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, highlight=False, color_system=None, _environ={})
    return RunConsole(console), file


def in_a_file() -> tuple[RunConsole, io.StringIO]:
    file = io.StringIO()
    return RunConsole(Console(file=file, width=80, _environ={})), file


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_of_the_run_counts_down_between_steps(width: int) -> None:
    now = [100.0]
    bar = RunBar(30, 12, clock=lambda: now[0], began_at=35.0)
    assert bar.line(width).plain == f"run {'━' * 12}{'─' * 18} 12/30 steps  1:05 gone"
    bar.update(13, 90.0)
    now[0] += 20
    assert bar.line(width).plain == f"run {'━' * 13}{'─' * 17} 13/30 steps  1:25 gone, about 1:10 left"


def test_a_phase_that_few_steps_have_is_shown_in_those() -> None:
    bar = PhaseBar(["gen"], clock=lambda: 0.0)
    bar.begin_step("step 1/30")
    bar.begin("validate")
    assert "validate" in bar.__rich__().plain
    bar.begin_step("step 2/30")
    assert bar.__rich__().plain == "step 2/30  · gen"


def test_a_narrow_terminal_has_the_counts_without_the_bar() -> None:
    bar = RunBar(30, 15, clock=lambda: 9.0, left_s=3.0)
    assert bar.line(30).plain.startswith("run  15/30 steps")
    assert len(bar.line(50).plain) <= 50


def test_the_foot_has_phases_stages_and_the_bar_a_line_each() -> None:
    foot = Foot(clock=lambda: 7.0)
    foot.phases = PhaseBar(["gen", "update"], clock=lambda: 7.0)
    foot.phases.begin_step("step 3/30")
    foot.stages = [Stage("loading actor, ref", 2.0, "ref is ready; still loading: actor")]
    foot.bar = RunBar(30, 2, clock=lambda: 7.0)
    phases, stage, bar = drawn(foot)
    assert phases == "step 3/30  · gen  · update"
    assert stage[1:] == " loading actor, ref  5 s  ref is ready; still loading: actor"
    assert bar.startswith("run ━") and "2/30 steps  0:07 gone" in bar
    assert all(len(line) <= 40 for line in drawn(foot, 40)) and len(drawn(foot, 40)) == 3


def test_a_stage_moves_on_a_terminal_and_leaves_a_line() -> None:
    console, file = terminal()
    with console.stage("starting Ray"):
        time.sleep(0.6)
    assert " starting Ray  0 s" in file.getvalue()
    assert re.search(r"✓   0\.\d s  starting Ray\n", file.getvalue())


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_whatever_ends_it_the_terminal_has_its_cursor_back(failure: type[BaseException]) -> None:
    console, file = terminal()
    console.expect(30, LINE, ["gen"])
    with (
        pytest.raises(failure),
        console.run_bar(3),
        console.step_phases(4),
        console.phase("gen"),
        console.stage("validating"),
    ):
        raise failure("stop")
    shown = file.getvalue()
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "✓" not in shown.partition("validating")[2].partition("\n")[0]
    with console.stage("again"):
        pass  # and it can draw again


def test_lines_stand_above_the_foot_and_one_foot_is_drawn() -> None:
    console, file = terminal()
    console.expect(30, LINE, ["gen"])
    with console.run_bar(0):
        for step in (1, 2):
            with console.step_phases(step), console.phase("gen"):
                pass
            console.step(step, {"reward/mean": 0.5, "timing_s/step": 1.0}, (), 28.0)
        with console.stage("saving step 2"):
            pass
    shown = file.getvalue()
    assert shown.count("\x1b[?25l") == 1, "one foot for the whole run: it does not flicker"
    assert "step  2/30  reward  0.500   1.0s" in shown
    assert "about 0:28 left" in shown


def test_a_file_gets_a_line_when_a_stage_begins_and_now_and_then_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console_module, "FIRST_TICK_S", 0.1)
    console, file = in_a_file()
    with console.stage("loading actor") as tell:
        tell("half way")
        time.sleep(0.5)
    lines = file.getvalue().splitlines()
    assert re.fullmatch(r"\[  0\.\d s\] loading actor", lines[0])
    assert re.fullmatch(r"\[  0\.\d s\] loading actor: 0 s so far, half way", lines[1])
    assert len(lines) == 3, "after 0.1 s, and after 0.2 s more"
    assert "\x1b" not in file.getvalue()


def test_a_terminal_without_cursor_control_gets_lines_as_a_file_does() -> None:
    file = io.StringIO()
    console = RunConsole(Console(file=file, force_terminal=True, width=80, _environ={"TERM": "dumb"}))
    with console.run_bar(0), console.step_phases(1), console.stage("starting Ray"):
        pass
    assert re.fullmatch(r"\[  0\.\d s\] starting Ray\n", file.getvalue())


def test_programs_are_told_when_a_stage_begins_and_ends() -> None:
    lines: list[SimpleNamespace] = []
    console = JsonConsole(io.StringIO())
    console._write = lambda event, **content: lines.append(SimpleNamespace(event=event, **content))  # type: ignore[method-assign]
    with console.stage("starting Ray") as tell:
        tell("nearly")
    begun, at, ended = lines
    assert (begun.event, begun.title, at.now, ended.title) == ("stage", "starting Ray", "nearly", "starting Ray")
    assert ended.seconds >= 0


def test_what_a_stage_says_shows_no_secret() -> None:
    (in_file, file), (moving, foot), said = in_a_file(), terminal(), io.StringIO()
    for console in (in_file, moving, JsonConsole(said)):
        with console.stage("fetching sftp://me:canary@host/x") as tell:
            tell("at step_5 of https://host/x?sig=canary")
            time.sleep(0.3 if console is moving else 0)
        console.banner("as password=canary", {})
    assert all(
        "<masked>" in shown and "canary" not in shown for shown in (each.getvalue() for each in (file, foot, said))
    )


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_warning_stands_above_the_foot(monkeypatch: pytest.MonkeyPatch) -> None:
    console, file = terminal()
    monkeypatch.setattr("sys.stderr", FakeTerminal())
    record = logging.makeLogRecord({"msg": "rank 0 was busy", "levelno": logging.WARNING})
    with console.stage("ending the processes"):
        PresentStandardError().emit(record)
    assert "\x1b[2Krank 0 was busy\n" in file.getvalue(), "on a line of its own"


def test_a_warning_that_goes_to_a_file_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    console, file = terminal()
    elsewhere = io.StringIO()
    monkeypatch.setattr("sys.stderr", elsewhere)
    with console.stage("ending the processes"):
        PresentStandardError().emit(logging.makeLogRecord({"msg": "rank 0 was busy"}))
    assert elsewhere.getvalue() == "rank 0 was busy\n" and "busy" not in file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_running_phase_is_in_sight_however_many_came_before(width):
    labels = ["gen", "reward", "logp", "ref", "values", "adv", "critic", "update", "sync"]
    bar = PhaseBar(labels, lambda: 0.0)
    bar.begin_step("step  1/30")
    for label in labels[:-2]:
        bar.begin(label)
        bar.end(label)
    bar.begin("update")
    shown = bar.line(width).plain
    assert "▸ update 0.0s" in shown[:width]
    assert ("✓ gen" in shown) == (width == 200), "what is over goes first"
    assert bar.line(200).plain == bar.__rich__().plain
