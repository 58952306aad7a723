"""The reward loop where all can reach it: a Ray actor that workers send samples to and the driver collects from.

It runs on the driver's node, where the files are that the configuration names.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hrl.processes.lifetime import die_with_parent
from hrl.reward.function import RewardSpec
from hrl.reward.loop import RewardBatch, RewardError, RewardLoop, RewardRow
from hrl.single_controller.errors import cause_of, death_reason, is_death

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 120.0
_SHUTDOWN_TIMEOUT_S = 10.0
_MARGIN_S = 10.0
_CONCURRENT_CALLS = 8


class _Loop:
    """The actor: a `RewardLoop` behind remote calls, of which `collect` waits for what `submit` brings."""

    def __init__(self) -> None:
        die_with_parent()  # the raylet, which ends with the driver: the kernel is quicker to tell than Ray
        self._ending = ExitStack()

    def start(self, spec: RewardSpec, settings: dict[str, Any]) -> tuple[int, str]:
        self._loop = RewardLoop(spec, **settings)
        self._ending.callback(self._loop.shutdown)
        self._loop.start()
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def begin(self, step: int, rows: Sequence[RewardRow], title: str | None) -> None:
        self._loop.begin(step, rows, title)

    def submit(self, step: int, key: Hashable, text: str) -> None:
        try:
            self._loop.submit(step, key, text)
        except (KeyError, ValueError, RuntimeError) as error:  # all that it raises; the worker awaits no answer
            self._loop.refuse(step, key, str(error.args[0]))

    def collect(self, step: int, deadline_s: float) -> RewardBatch:
        return self._loop.collect(step, deadline_s)

    def shutdown(self) -> None:
        self._ending.close()


class RewardActor:
    """A `RewardLoop` in a Ray actor on this node: the same calls, the same results, the same errors.

    Args:
        spec: The reward function.
        settings: Further arguments of `RewardLoop`.

    Attributes:
        handle: What workers send samples to, as `handle.submit.remote(step, key, text)`. They wait for no answer:
            what is wrong with a sample is raised by the next `collect`.
        scheduling: That it runs here and nowhere else.
        pid, node_id: Where it does run, once started.
    """

    def __init__(self, spec: RewardSpec, **settings: Any) -> None:
        self.scheduling = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(num_cpus=0, max_concurrency=_CONCURRENT_CALLS, scheduling_strategy=self.scheduling)(_Loop)
        self.handle = actor.remote()
        self._arguments = (spec, settings)
        self.pid, self.node_id = -1, ""

    def start(self) -> None:
        """Start the processes.

        Raises:
            RewardFunctionError: The function can't be loaded.
            RewardError: The actor died or did not answer, here as in every other call.
        """
        self.pid, self.node_id = self._call("start", *self._arguments)

    def begin(self, step: int, rows: Sequence[RewardRow], title: str | None = None) -> None:
        """As `RewardLoop.begin`."""
        self._call("begin", step, rows, title)

    def collect(self, step: int, deadline_s: float) -> RewardBatch:
        """As `RewardLoop.collect`."""
        return self._call("collect", step, deadline_s, timeout_s=deadline_s + _MARGIN_S)

    def shutdown(self) -> None:
        """End the processes with all that reward functions started in them, then the actor.

        An actor that can't be asked is killed: its processes go with it, and their guards end what these have started.
        """
        try:
            self._call("shutdown", timeout_s=_SHUTDOWN_TIMEOUT_S)
        except RewardError as error:
            logger.info("%s; it is killed", error)
        finally:
            ray.kill(self.handle)

    def _call(self, method: str, *args: Any, timeout_s: float = _ANSWER_TIMEOUT_S) -> Any:
        try:
            return ray.get(getattr(self.handle, method).remote(*args), timeout=timeout_s)
        except RayTaskError as error:
            # The cause is the loop's own error, which names function and sample; Ray's wrapping says nothing more.
            cause = cause_of(error)
            raise cause if isinstance(cause, Exception) else RewardError(str(error)) from None
        except GetTimeoutError as error:
            raise RewardError(f"the reward service did not answer `{method}` within {timeout_s:g} s") from error
        except RayError as error:
            if not is_death(error):
                raise
            raise RewardError(
                f"the reward service (process {self.pid} on the driver's node) died before it answered `{method}`: "
                f"{death_reason(error)}\nReward functions run in processes of their own and can't take it along: see "
                "`dmesg` for the kernel's out-of-memory killer. If that was it, lower reward.num_workers, or give the "
                "driver's node more memory"
            ) from error
