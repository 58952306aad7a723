"""A run in a notebook: one output, however long the run."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hrl.report.notebook import HEAD_LINES, TAIL_LINES, NotebookConsole, in_notebook
from hrl.report.step_line import Field, StepLine

LINE = StepLine((Field("reward", ("reward/mean",), "6.3f"),), {})


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a notebook was asked to show: for every output the HTML after each of its changes."""
    made: list[Any] = []

    def display(content: Any, display_id: bool) -> Any:
        history = [content._repr_html_()]
        made.append(history)
        return SimpleNamespace(update=lambda again: history.append(again._repr_html_()))

    monkeypatch.setattr("IPython.display.display", display)
    return made


def test_a_long_run_is_one_output_of_limited_length(outputs: list[Any]) -> None:
    console = NotebookConsole().expect(500, LINE)
    console.banner("hrl", {"model": "<b>tiny</b>"})
    for step in range(1, 501):
        with console.step_phases(step), console.phase("gen"):
            pass
        console.step(step, {"reward/mean": step / 500, "timing_s/step": 1.0}, left_s=500.0 - step)
    (history,) = outputs
    last = history[-1]
    assert "value='500' max='500'" in last and "step 500/500" in last and "reward  1.000" in last
    assert "&lt;b&gt;tiny&lt;/b&gt;" in last and "<b>" not in last
    assert "lines: all steps are in run.metrics" in last
    assert last.count("\n") <= HEAD_LINES + TAIL_LINES


def test_nothing_but_a_kernel_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    for shell, is_one in ((None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=object()), True)):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))  # type: ignore[arg-type]
        assert in_notebook() == is_one
