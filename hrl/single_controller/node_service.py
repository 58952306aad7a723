"""A service of the run in a Ray actor on this node: each answer has a deadline, and an end that explains itself."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hrl.processes.evidence import why_memory_ended_it
from hrl.processes.watch import NEEDED
from hrl.single_controller.own_ray import end_lost_ray, watched_get
from hrl.single_controller.worker_errors import cause_of, death_reason, is_death

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 120.0
_SHUTDOWN_TIMEOUT_S = 10.0


class NodeService:
    """The driver's side of a service that lives in a Ray actor on this node.

    Args:
        kind: The class of the actor, with the methods `start`, `process_id` and the one that `closing` names.
        args: Of its constructor.
        max_concurrency: Calls that it answers at a time.

    Attributes:
        handle: Handle of the actor.
        pid: Id of its process, once started.
    """

    title: ClassVar[str]
    """In messages, such as `the reward service`."""
    failure: ClassVar[type[Exception]]
    """What is raised for a failure of the service that can't be raised as it is."""
    gone: ClassVar[type[Exception]]
    """A subclass of `failure`: it has died or does not answer."""
    closing: ClassVar[str]
    """The method that ends what the service has started."""
    where_to_look: ClassVar[str] = ""
    """What follows a death of which nobody knows the reason."""
    start_timeout_s: ClassVar[float] = _ANSWER_TIMEOUT_S

    def __init__(self, kind: type, *args: Any, max_concurrency: int) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_concurrency": max_concurrency, "scheduling_strategy": here}
        self.handle = ray.remote(**options)(kind).remote(*args)
        self.pid = -1
        self._starting: ray.ObjectRef | None = None

    def begin_start(self) -> None:
        """Begin to start it; `start` waits."""
        if self._starting is None:
            self._starting = self.handle.start.remote()

    def start(self) -> None:
        """Start it, and return when it is ready.

        Raises:
            Exception: What its own `start` raised, or `gone`, as in every other call.
        """
        self.begin_start()
        self.pid = self._call("process_id", timeout_s=self.start_timeout_s)
        NEEDED.add(self.pid, self.title)
        self._answer(self._starting, "start", self.start_timeout_s)

    def require_alive(self) -> None:
        """Raise why it has died, if it has; one that is there is let be, even if it does not answer.

        Raises:
            Exception: `gone`.
        """
        asked = self.handle.process_id.remote()
        if ray.wait([asked], timeout=_SHUTDOWN_TIMEOUT_S)[0]:
            self._answer(asked, "process_id", _SHUTDOWN_TIMEOUT_S)

    def shutdown(self) -> None:
        """End all that it has started, then the actor.

        An actor that doesn't answer is killed: its processes end with it, and their guards end what they started.
        """
        NEEDED.remove(self.pid)
        if end_lost_ray():  # with which it ends
            return
        try:
            self._call(self.closing, timeout_s=_SHUTDOWN_TIMEOUT_S)
        except self.failure as error:
            logger.info("%s; it is killed", error)
        finally:
            ray.kill(self.handle)

    def _call(self, method: str, *args: Any, timeout_s: float = _ANSWER_TIMEOUT_S) -> Any:
        return self._answer(getattr(self.handle, method).remote(*args), method, timeout_s)

    def _answer(self, ref: Any, method: str, timeout_s: float) -> Any:
        try:
            return watched_get(ref, timeout_s)
        except RayTaskError as error:  # the service's own error says all; Ray's wrapper adds nothing to it
            cause = cause_of(error)
            raise cause if isinstance(cause, Exception) else self.failure(str(error)) from None
        except GetTimeoutError as error:
            raise self.gone(f"{self.title} did not answer `{method}` within {timeout_s:g} s") from error
        except RayError as error:
            if not is_death(error):
                raise
            known = NEEDED.why_it_ended(self.pid) or why_memory_ended_it()
            reason = known if known is not None else f"{death_reason(error)}{self.where_to_look}"
            raise self.gone(
                f"{self.title} (process {self.pid} on the driver's node) died before it answered `{method}`: {reason}"
            ) from error
