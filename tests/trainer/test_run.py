"""What becomes of a signal that comes after the last step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hrl.processes.signals import ENDING, StopRequest
from hrl.trainer import run as module


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    numbers = (*ENDING, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    stop = StopRequest(grace_s=100.0, clock=lambda: 0.0)
    stop.install()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("waiting", "said"),
    [
        ((), "SIGTERM: all steps are made; ending the processes; again to stop now"),
        (
            (4,),
            "SIGTERM: all steps are made; ending the processes, sending checkpoints for at most 90 s "
            "(trainer.grace_s); again to stop now",
        ),
    ],
)
def test_a_first_signal_while_the_processes_end_is_told_and_leaves_a_run_that_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stop: StopRequest, waiting: tuple[int, ...], said: str
) -> None:
    told: list[str] = []
    console = SimpleNamespace(note=told.append)
    trainer = SimpleNamespace(
        stop=stop,
        fit=lambda: None,
        uploads=SimpleNamespace(steps=lambda: frozenset(waiting)),
        reporter=SimpleNamespace(folder=SimpleNamespace(path=tmp_path), console=console),
    )

    @contextmanager
    def running(*_: object, **given: Any) -> Iterator[SimpleNamespace]:
        assert given["stop"] is stop
        yield trainer
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(module, "running", running)
    config: Any = SimpleNamespace(trainer=SimpleNamespace(save_freq=1, total_training_steps=4))
    assert module.run("ppo", config, stop=stop) == tmp_path
    assert told == [said]
