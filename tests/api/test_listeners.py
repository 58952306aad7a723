"""A callback that would never be called, or could not be, is refused before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

import hrl
from hrl.api.listeners import as_callbacks
from hrl.api.rows import UsageError


class Good(hrl.Callback):
    def on_step_end(self, run: hrl.RunState, metrics: Mapping[str, float]) -> None:
        pass


class Free:
    """No `hrl.Callback`, and has methods for others too."""

    def on_validation(self, *given: Any) -> None:
        pass

    def on_log(self, logs: Any) -> None:
        pass


class Listing(list):  # type: ignore[type-arg]
    """Keeps what it hears in itself."""

    def on_step_end(self, run: Any, metrics: Any) -> None:
        self.append(metrics)


class OfTrl:
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


class Slip(hrl.Callback):
    def on_step_ended(self, run: Any, metrics: Any) -> None:
        pass


class Foreign:
    def on_train_begin(self, args: Any) -> None:
        pass


class Late(hrl.Callback):
    async def on_step_end(self, run: Any, metrics: Any) -> None:
        pass


class NoMethod(hrl.Callback):
    on_step_end = 3  # type: ignore[assignment]


def test_one_several_and_none_will_do() -> None:
    good, free, listing = Good(), Free(), Listing()
    assert as_callbacks(good) == as_callbacks([good]) == as_callbacks(iter([good])) == [good]
    assert as_callbacks((good, free)) == [good, free]  # type: ignore[arg-type]
    assert as_callbacks(listing)[0] is listing  # type: ignore[arg-type]
    assert as_callbacks(None) == as_callbacks([]) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda run, metrics: None, "is the function <lambda>"),
        (3, "is a int without a method for a moment of a run. There are on_step_end, on_validation"),
        ("wandb", "is the text 'wandb', not an object with methods. Names of trackers go into config="),
        (Good, "is the class Good: give an object of it, Good()."),
        (OfTrl(), "is a OfTrl, whose on_step_end takes (args: 'Any', state: 'Any', control: 'Any'"),
        (OfTrl(), "it is called with (run, metrics)."),
        (Slip(), "is a Slip, whose on_step_ended is no moment of a run. Did you mean on_step_end?"),
        (Foreign(), "whose on_train_begin is no moment of a run. There are on_step_end"),
        (Late(), "whose on_step_end is async"),
        (NoMethod(), "whose on_step_end is 3, not a method."),
        (hrl.Callback(), "is a Callback without a method for a moment of a run."),
    ],
)
def test_what_would_not_be_called_is_refused_by_the_trainer(wrong: Any, message: str) -> None:
    for given, index in ((wrong, 0), ([Good(), wrong], 1)):
        with pytest.raises(UsageError, match=re.escape(message)) as raised:
            hrl.GRPO(callbacks=given)
        assert str(raised.value).startswith(f"callbacks[{index}] is ")
