"""Score the responses of a step while others are still being generated.

`begin` announces the samples, `submit` hands over each one when it is finished, and `collect` waits for the rest and
returns the results in the order of `begin`. `RewardLoop` runs in the caller's process; `RewardActor` runs it in a Ray
actor on the driver's node, which has the files that the configuration names and which all workers can reach.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hrl.errors import HrlError
from hrl.metrics import Metric
from hrl.processes.lifetime import die_with_parent
from hrl.reward.library.base import FAILURE
from hrl.reward.pool import PlayedEpisode, RewardOutcome, RewardPool, RewardRow, Status
from hrl.reward.spec import RewardSpec
from hrl.single_controller.node_service import NodeService

if TYPE_CHECKING:
    from hrl.config.reward import RewardConfig

logger = logging.getLogger(__name__)

MAX_FAILED_SHARE = 0.1
_FAILURES = ("error", "timeout", "crash")
_COUNTED: dict[str, Status] = {
    "reward/num_errors": "error",
    "reward/num_timeouts": "timeout",
    "reward/num_crashes": "crash",
    "reward/num_skipped": "skip",
    "reward/num_unscorable": "unscorable",
}
_MARGIN_S = 10.0
_CONCURRENT_CALLS = 8
_MAX_OPEN = 2
"""A validation, and the step after it whose samples are drawn beside it."""


class RewardError(HrlError, RuntimeError):
    """The rewards of a step can't be computed; names function and sample, with the first failure's traceback."""


class RewardServiceError(RewardError):
    """The process that has the rewards of a run computed is gone, or does not answer."""

    may_pass = True


@dataclass
class _Step:
    title: str
    rows: dict[Hashable, RewardRow]
    submitted: dict[Hashable, Future[RewardOutcome]] = field(default_factory=dict)
    outcomes: dict[Hashable, RewardOutcome] = field(default_factory=dict)
    failed: list[Hashable] = field(default_factory=list)


class RewardLoop:
    """Scores the samples of a step, or of two at a time.

    A sample fails if the function raises, returns something that isn't a reward or exceeds the deadline, or if its
    process dies twice. With `reward.on_error=raise` the first failure ends the step; `skip` leaves failed samples out
    and counts them, and ends the step if they are more than `MAX_FAILED_SHARE` of it.

    Args:
        spec: The reward function.
        reward: The section `reward`.
    """

    def __init__(self, spec: RewardSpec, reward: RewardConfig) -> None:
        self._spec = spec
        self._on_error = reward.on_error
        self._pool = RewardPool(spec, reward)
        self._changed = threading.Condition()
        self._steps: dict[int, _Step] = {}
        self._refused: list[str] = []
        self._given_up: set[int] = set()  # steps that were dropped, or that `collect` raised for

    def start(self) -> None:
        """Start the processes.

        Raises:
            RewardFunctionError: The function can't be loaded.
        """
        self._pool.start()

    def takes_pictures(self) -> bool:
        """Return whether the function takes the pictures of prompts."""
        return self._pool.takes_pictures

    def begin(self, step: int, rows: Sequence[RewardRow], title: str | None = None) -> None:
        """Announce the samples of a step. If two others were not collected, the older one is dropped.

        Args:
            step: Identifies the samples in later calls; never used twice.
            rows: The samples.
            title: Name of the step in messages, if not its number.

        Raises:
            ValueError: Two rows with the same key.
        """
        title = title or f"step {step}"
        by_key: dict[Hashable, RewardRow] = {}
        for row in rows:
            if by_key.setdefault(row.key, row) is not row:
                raise ValueError(f"two samples of {title} have the key {row.key!r}")
        with self._changed:
            while len(self._steps) >= _MAX_OPEN:
                self._give_up(next(iter(self._steps)))
            self._steps[step] = _Step(title, by_key)

    def submit(self, step: int, key: Hashable, solution_str: str, played: PlayedEpisode | None = None) -> None:
        """Queue a finished sample for scoring; `played` is what an episode was, None of a single response.

        The sender doesn't wait for an answer. A sample that is refused (it was not announced, was submitted before, or
        isn't plain data) is therefore reported by the next `collect`. An episode of no turn is worth 0, and nobody is
        asked: it did not begin, or failed.
        """
        with self._changed:
            state = self._steps.get(step)
            if state is None:
                if step not in self._given_up:  # late samples of a step that was given up need no report
                    self._refuse(f"step {step}", key, f"step {step} was not begun, or is collected already")
            elif key not in state.rows:
                self._refuse(state.title, key, "the sample was not announced")
            elif key in state.submitted:
                self._refuse(state.title, key, "the sample was submitted twice")
            else:
                if played is not None and not played.turns:
                    future = state.submitted[key] = Future()
                    future.add_done_callback(functools.partial(self._note, state, key))
                    future.set_result(RewardOutcome("ok", 0.0))
                    return
                row = state.rows[key]
                name = f"sample {_show(key)} of {state.title} (data source {row.data_source!r})"
                try:
                    future = state.submitted[key] = self._pool.submit(row, solution_str, name, played)
                except (ValueError, RuntimeError) as error:  # not plain data; or the processes have ended
                    self._refuse(state.title, key, str(error))
                else:
                    future.add_done_callback(functools.partial(self._note, state, key))

    def collect(self, step: int, deadline_s: float) -> list[RewardOutcome]:
        """Return the outcome of every announced sample, in the order of `begin`, once all are scored.

        Args:
            step: The step given to `begin`.
            deadline_s: Seconds to wait, also for samples that were never submitted.

        Raises:
            RewardError: A sample failed and `reward.on_error` doesn't allow it, a sample was refused since the last
                call, or the deadline passed.
        """
        end = time.monotonic() + deadline_s
        with self._changed:
            state = self._steps.get(step)
            if state is None:
                raise KeyError(f"step {step} was not begun, or is collected already")
            try:
                while len(state.outcomes) < len(state.rows):
                    self._check_failures(state)
                    in_time = self._changed.wait(max(0.0, end - time.monotonic()))
                    if not in_time and len(state.outcomes) < len(state.rows):
                        raise RewardError(_describe_late(state, deadline_s))
                self._check_failures(state)
                outcomes = [state.outcomes[key] for key in state.rows]
            except RewardError:
                self._give_up(step)
                raise
            del self._steps[step]
        return outcomes

    def shutdown(self) -> None:
        """Kill the processes."""
        self._pool.shutdown()

    # ------------------------------------------------------------------ under the lock

    def _refuse(self, title: str, key: Hashable, reason: str) -> None:
        self._refused.append(f"{_show(key)} of {title}: {reason}")
        self._changed.notify_all()

    def _give_up(self, step: int) -> None:
        for future in self._steps.pop(step).submitted.values():
            future.cancel()  # affects queued samples; running ones end at their deadline
        self._given_up.add(step)

    def _note(self, state: _Step, key: Hashable, future: Future[RewardOutcome]) -> None:
        """Record an outcome from the pool's thread, and wake `collect` if it may be done."""
        if future.cancelled():
            return
        with self._changed:
            outcome = state.outcomes[key] = future.result()
            if outcome.status in _FAILURES:
                state.failed.append(key)
            if state.failed or len(state.outcomes) == len(state.rows):
                self._changed.notify_all()

    def _check_failures(self, state: _Step) -> None:
        refused, self._refused = self._refused, []
        if refused:
            raise RewardError(
                f"{self._spec.source.title} could not be given {len(refused)} sample(s). The first, {refused[0]}"
            )
        allowed = 0 if self._on_error == "raise" else int(MAX_FAILED_SHARE * len(state.rows))
        if len(state.failed) <= allowed:
            return
        key = state.failed[0]
        first = state.outcomes[key]
        policy = "reward.on_error=raise" if self._on_error == "raise" else f"reward.on_error=skip allows {allowed}"
        which = f"sample {_show(key)} (data source {state.rows[key].data_source!r})"
        share = f"{len(state.failed)} of {len(state.rows)} samples of {state.title}"
        raise RewardError(
            f"{self._spec.source.title} failed on {share} ({policy}). The first, {which}, {first.status}: {first.error}"
        )


def _describe_late(state: _Step, deadline_s: float) -> str:
    missing = [key for key in state.rows if key not in state.submitted]
    running = [key for key in state.submitted if key not in state.outcomes]
    return (
        f"rewards of {state.title} were not complete after {deadline_s:g} s: {len(missing)} samples were never "
        f"submitted, {len(running)} not yet scored (the first: {_show((missing or running)[0])})"
    )


def reward_metrics(outcomes: Sequence[RewardOutcome]) -> dict[str, Metric]:
    """Return counts of failures and the duration of calls.

    `reward/num_unscorable` counts responses that a built-in function failed on and scored as wrong answers,
    `reward/num_unjudged` those of the samples left out that a function had no score for because it failed itself.
    """
    counts = Counter(outcome.status for outcome in outcomes)
    metrics = {name: Metric.total(counts[status]) for name, status in _COUNTED.items()}
    unjudged = sum(
        outcome.status == "skip" and any(part.rpartition("/")[2] == FAILURE for part in outcome.parts)
        for outcome in outcomes
    )
    metrics["reward/num_unjudged"] = Metric.total(unjudged)
    metrics["reward/num_retries"] = Metric.total(sum(outcome.attempts - 1 for outcome in outcomes))
    durations = [outcome.duration_s for outcome in outcomes]
    metrics["reward/call_s_mean"] = Metric.mean(sum(durations), len(durations))
    metrics["reward/call_s_max"] = Metric.max(max(durations, default=0.0))
    return metrics


def _show(key: Hashable) -> str:
    return "/".join(map(str, key)) if isinstance(key, tuple) else str(key)


# ---------------------------------------------------------------------- as a Ray actor


class _Actor(RewardLoop):
    """The loop in a process of its own."""

    def __init__(self, spec: RewardSpec, reward: RewardConfig) -> None:
        die_with_parent()  # the parent is the raylet, which ends with the driver; the kernel is faster than Ray here
        super().__init__(spec, reward)

    def process_id(self) -> int:
        """Return the id of this process."""
        return os.getpid()


class RewardActor(NodeService):
    """A `RewardLoop` in a Ray actor on this node: the same calls, the same results, the same errors.

    Workers send samples with `handle.submit.remote(step, key, text)`, without awaiting it.

    Args:
        spec: The reward function.
        reward: The section `reward`.
    """

    title = "the reward service"
    failure, gone = RewardError, RewardServiceError
    closing = "shutdown"
    where_to_look = (
        "\nReward functions run in processes of their own and can't take it along: see `dmesg` for the kernel's "
        "out-of-memory killer. If that was it, lower reward.num_workers, or give the driver's node more memory"
    )

    def __init__(self, spec: RewardSpec, reward: RewardConfig) -> None:
        super().__init__(_Actor, spec, reward, max_concurrency=_CONCURRENT_CALLS)

    def takes_pictures(self) -> bool:
        """Return whether the function takes the pictures of prompts."""
        return self._call("takes_pictures")

    def begin(self, step: int, rows: Sequence[RewardRow], title: str | None = None) -> None:
        """Announce the samples of a step; see `RewardLoop.begin`."""
        self._call("begin", step, rows, title)

    def collect(self, step: int, deadline_s: float) -> list[RewardOutcome]:
        """Return the outcome of every announced sample; see `RewardLoop.collect`."""
        return self._call("collect", step, deadline_s, timeout_s=deadline_s + _MARGIN_S)
