"""What the driver says of a service in an actor of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from hrl.single_controller import node_service
from hrl.single_controller.node_service import NodeService


class Gone(RuntimeError):
    """A service is gone."""


class Service(NodeService):
    """One whose actor is made up."""

    title, failure, gone, closing = "the made-up service", RuntimeError, Gone, "close"

    def __init__(self) -> None:
        self.handle = SimpleNamespace(process_id=SimpleNamespace(remote=lambda: "asked"))
        self.pid = 7


@pytest.mark.parametrize("has_died", [True, False])
def test_a_service_that_has_died_says_why_and_one_that_does_not_answer_is_let_be(
    has_died: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(*_: Any) -> None:
        raise ActorDiedError()

    monkeypatch.setattr(node_service.ray, "wait", lambda refs, timeout: (refs, []) if has_died else ([], refs))
    monkeypatch.setattr(node_service, "watched_get", get)
    if has_died:
        with pytest.raises(
            Gone, match=r"the made-up service \(process 7 on the driver's node\) died before it answered"
        ):
            Service().require_alive()
    else:
        Service().require_alive()
