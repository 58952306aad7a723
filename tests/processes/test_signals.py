"""What a signal does to a command: now, or in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from hrl.processes.signals import ENDING, STEP_SHARE, NotBegunError, StopRequest, kept_from_children


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _handlers_come_back() -> Iterator[None]:
    numbers = (*ENDING, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    for number, handler in before.items():
        signal.signal(number, handler)


def installed(grace_s: float | None = None) -> tuple[StopRequest, Clock]:
    clock = Clock()
    stop = StopRequest(grace_s, clock)
    stop.install()
    return stop, clock


@pytest.mark.parametrize("number", ENDING)
def test_every_signal_that_asks_for_an_end_is_noted_and_told_in_order_and_ends_the_command_elsewhere(
    number: signal.Signals,
) -> None:
    signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under `nohup`
    stop, _ = installed()
    told: list[str] = []
    with stop.in_order(told.append):
        os.kill(os.getpid(), number)
        assert stop.is_asked
    assert told == [number.name]
    other, clock = installed()
    with pytest.raises(NotBegunError):
        os.kill(os.getpid(), number)
    assert not other.is_asked
    clock.now += 1.0
    with pytest.raises(KeyboardInterrupt) as second:
        os.kill(os.getpid(), number)
    assert second.type is KeyboardInterrupt


def test_a_signal_after_work_that_failed_is_not_one_before_it_began() -> None:
    stop, _ = installed()
    with pytest.raises(ValueError, match="of the work"), stop.in_order(lambda name: None):
        raise ValueError("of the work")
    with pytest.raises(KeyboardInterrupt) as raised:
        os.kill(os.getpid(), signal.SIGTERM)
    assert raised.type is KeyboardInterrupt


def test_the_second_signal_means_now() -> None:
    stop, clock = installed()
    told: list[str] = []
    with stop.in_order(told.append):
        os.kill(os.getpid(), signal.SIGTERM)
        clock.now += 0.6
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        clock.now += 0.6
        with pytest.raises(KeyboardInterrupt):  # and so does every further one
            os.kill(os.getpid(), signal.SIGINT)
    assert told == ["SIGTERM"]


def test_once_a_block_has_ended_well_the_rest_of_the_run_is_in_order_too() -> None:
    stop, clock = installed()
    told: list[str] = []
    with stop.in_order(told.append):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.is_asked and told == []
    with stop.in_order(told.append):
        pass
    assert told == ["SIGTERM"]
    clock.now += 0.6
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    failed, _ = installed()
    with pytest.raises(ValueError), failed.in_order(told.append):
        raise ValueError
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_what_comes_twice_at_once_is_one_request() -> None:
    """As from `timeout`, which signals its child and then the child's group."""
    stop, clock = installed()
    with stop.in_order(lambda name: None):
        for passed_s in (0.0, 0.1, 0.3):
            clock.now = 100.0 + passed_s
            os.kill(os.getpid(), signal.SIGTERM)
        clock.now = 100.6  # only what counts begins the time anew
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_limit_of_processor_time_is_told_every_second_and_asked_for_once() -> None:
    stop, clock = installed()
    with stop.in_order(lambda name: None):
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGXCPU)
            clock.now += 1.0
    assert stop.is_asked


def test_nohup_is_honoured_and_ctrl_c_reaches_a_background_job() -> None:
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    stop, _ = installed()
    with stop.in_order(lambda name: None):
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.is_asked
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_asked


def test_a_caller_who_installs_nothing_keeps_his_own_handlers() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGALRM)
    stop = StopRequest(grace_s=5.0)
    with stop.in_order(lambda name: None):
        assert signal.getsignal(signal.SIGALRM) is before
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert not stop.is_asked


def test_a_step_is_interrupted_when_its_share_of_the_grace_has_passed_and_what_follows_is_not() -> None:
    stop, _ = installed(grace_s=0.2)
    with stop.in_order(lambda name: None):
        stop.step_begins()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.left_s == pytest.approx(STEP_SHARE * 0.2)
            time.sleep(5)
        assert stop.is_late
    again, _ = installed(grace_s=0.1)
    with again.in_order(lambda name: None):
        again.step_begins()
        again.step_is_over()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        again.step_begins()
        again.step_is_over()
    assert again.is_asked and not again.is_late


def test_a_signal_between_two_steps_limits_the_next_one_to_what_is_left_of_the_share() -> None:
    stop, clock = installed(grace_s=400.0)
    with stop.in_order(lambda name: None):
        os.kill(os.getpid(), signal.SIGTERM)
        clock.now += 299.9  # of 300
        stop.step_begins()
        assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(0.1, abs=0.1)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(5)
        assert stop.is_late
        stop.step_is_over()
        assert not stop.is_late, "what follows is interrupted by a second signal alone"
    too_late, clock = installed(grace_s=400.0)
    with too_late.in_order(lambda name: None):
        os.kill(os.getpid(), signal.SIGTERM)
        clock.now += 301.0
        with pytest.raises(KeyboardInterrupt):
            too_late.step_begins()
        assert too_late.is_late


def test_a_timer_of_the_callers_own_is_left_alone_where_nothing_is_installed() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 1000.0)
    stop = StopRequest(grace_s=5.0)
    with stop.in_order(lambda name: None):
        stop.step_begins()
        stop.step_is_over()
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 900.0


def test_it_is_told_while_the_main_thread_waits() -> None:
    """At once means: not when the step is over."""
    script = (
        "import sys\n"
        "from hrl.processes.signals import StopRequest\n"
        "stop = StopRequest()\n"
        "stop.install()\n"
        "with stop.in_order(lambda name: print(name, flush=True)):\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
        "sys.exit(75 if stop.is_asked else 1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "SIGUSR1\n"
        assert process.poll() is None
        process.communicate("")
    assert process.returncode == 75


def test_what_is_started_in_the_block_blocks_what_a_scheduler_sends_to_all() -> None:
    got: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with kept_from_children():
        child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1)
        signal.signal(signal.SIGTERM, lambda *_: None)  # as Ray does, in its own way
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # an earlier test may have left a thread to take it
        assert not got
    assert got == [signal.SIGTERM]  # it came late, and to the handler of before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    with child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        for number in set(ENDING) - {signal.SIGINT}:  # which Ray itself keeps from its processes
            child.send_signal(number)
        child.stdin.write(b"\n")
        child.stdin.close()
    assert child.returncode == 0


USER = """
import os, signal, subprocess, sys, time
from multiprocessing import resource_tracker
from hrl.processes.signals import ENDING, stay_alone, stay_kept

signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
stay_kept()
assert set(ENDING) <= signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the tracker's start unblocks two"
stay_alone()
for number in ENDING:
    os.kill(os.getpid(), number)
started = subprocess.Popen(["sleep", "60"])
started.terminate()
assert started.wait(10) == -signal.SIGTERM
begun, beginning = os.pipe()
if (fork := os.fork()) == 0:
    os.write(beginning, b".")
    while True:
        time.sleep(0.05)
os.read(begun, 1)  # what comes before is forgotten by Python
os.kill(fork, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == -signal.SIGTERM
"""


def test_a_process_with_code_of_the_users_ignores_them_alone_and_can_end_what_it_starts() -> None:
    done = subprocess.run([sys.executable, "-c", USER], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
