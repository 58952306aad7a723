"""Callbacks see copies, and their errors say whose they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hrl.trainer.callbacks import Callback, CallbackError, Callbacks, RunState


class Vandal(Callback):
    """Tries to change everything that it is given."""

    def on_step_end(self, run: RunState, metrics: Mapping[str, float]) -> None:
        with pytest.raises(TypeError):
            metrics["reward/mean"] = 1.0  # type: ignore[index]
        with pytest.raises(AttributeError):
            run.step = 7  # type: ignore[misc]

    def on_validation(self, run: RunState, metrics: Mapping[str, float]) -> None:
        with pytest.raises(TypeError):
            del metrics["val/a/n"]  # type: ignore[attr-defined]

    def on_rollouts(self, run: RunState, samples: Sequence[Mapping[str, Any]]) -> None:
        samples[0]["response"] = "mine"  # type: ignore[index]
        samples[0]["reward_parts"]["correct"] = 1.0


class Witness(Callback):
    def on_rollouts(self, run: RunState, samples: Sequence[Mapping[str, Any]]) -> None:
        self.samples = samples


def test_a_callback_changes_nothing_for_the_run_nor_for_the_next_callback() -> None:
    metrics = {"reward/mean": 0.5, "val/a/n": 2.0}
    samples = [{"response": "theirs", "reward_parts": {"correct": 0.0}}]
    witness = Witness()
    callbacks, state = Callbacks([Vandal(), witness]), RunState(3, Path("run"))
    callbacks.on_step_end(state, metrics)
    callbacks.on_validation(state, metrics)
    callbacks.on_rollouts(state, samples)
    assert metrics == {"reward/mean": 0.5, "val/a/n": 2.0}
    assert samples == list(witness.samples) == [{"response": "theirs", "reward_parts": {"correct": 0.0}}]
    assert (state.step, state.total_steps, state.stop_reason) == (0, 3, None)


@pytest.mark.parametrize("moment", ["on_step_end", "on_validation", "on_rollouts", "on_checkpoint"])
def test_an_exception_names_callback_and_moment(moment: str) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("answer")

    broken = type("Broken", (Callback,), {moment: fail})()
    given: Any = {"on_rollouts": [], "on_checkpoint": Path("step_1")}.get(moment, {"val/a": 1.0})
    with pytest.raises(CallbackError, match=rf"callback Broken raised KeyError in {moment} after step 0") as raised:
        getattr(Callbacks([broken]), moment)(RunState(1, Path("run")), given)
    assert isinstance(raised.value.__cause__, KeyError)


def test_any_object_with_some_of_the_moments_will_do() -> None:
    class Mine:
        def on_step_end(self, run: RunState, metrics: Mapping[str, float]) -> None:
            run.stop("enough")

    state, callbacks = RunState(3, Path("run")), Callbacks([Mine()])  # type: ignore[list-item]
    callbacks.on_rollouts(state, [])
    callbacks.on_step_end(state, {})
    assert state.stop_reason == "enough"


def test_the_first_reason_to_stop_stays() -> None:
    state = RunState(3, Path("run"))
    state.stop("first")
    state.stop("second")
    assert state.stop_reason == "first"
