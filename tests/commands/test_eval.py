"""`hrl eval` ends as a run does."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from hrl import cli
from hrl.processes.signals import ENDING
from hrl.trained import evaluate


def test_a_key_with_blanks_around_the_sign_is_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "some/model", "rows.jsonl", "data.prompt_key", "=", "question"]) == 2
    told = "data.prompt_key = question has blanks around the `=`. Write data.prompt_key=question."
    assert told in capsys.readouterr().err


def test_a_termination_ends_an_evaluation_as_ctrl_c_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def terminated(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(evaluate, "evaluate", terminated)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        assert cli.main(["eval", "bundled:smollm2-135m-instruct", "rows.jsonl"]) == 130
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "interrupted" in capsys.readouterr().err
