"""Programs: the last fenced block of a response, run with the row's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from hrl.processes.sandbox import PLACES, TIME_S, Sandbox, SandboxError
from hrl.reward.library.answer import Answer
from hrl.reward.library.base import ArgumentError
from hrl.reward.score import PROGRAMS
from hrl.reward.scorers.base import Scorer
from hrl.reward.scorers.programs import Trial, check, scorer_of

_MOST_THREADS = 32
"""Of an event loop's own, at most."""


class Programs(Answer):
    """Compares responses with answers as `Answer` does, and runs answers that are programs beside each other.

    Args:
        trial: How programs are tried.
        only_programs: Whether all answers are programs; else those are whose data source says so.
    """

    def __init__(self, trial: Trial, *, only_programs: bool = False) -> None:
        super().__init__()
        self._trial = scorer_of(trial)
        self._only_programs = only_programs

    @property
    def max_concurrency(self) -> int:
        """As many as there are places for programs, so that none waits in line; and threads."""
        return min(PLACES.number, _MOST_THREADS)

    async def __call__(  # type: ignore[override]
        self,
        response: str,
        ground_truth: Any,
        data_source: str = "",
        extra_info: Mapping[str, Any] | None = None,
        blames_response: Callable[[bool], None] = lambda is_to_blame: None,
    ) -> Mapping[str, Any]:
        """Return the scorer's reward.

        Args:
            response: The text.
            ground_truth: Of the row.
            data_source: Of the row.
            extra_info: Of the row.
            blames_response: As of `Answer`; programs have a deadline of their own, before that of the call.

        Raises:
            ArgumentError: The row has no answer. Other `ValueError`s say what is wrong with it.
        """
        score = super().__call__
        if self._is_program(data_source):
            return await asyncio.to_thread(score, response, ground_truth, data_source, extra_info)
        return score(response, ground_truth, data_source, extra_info, blames_response)

    def _is_program(self, data_source: str) -> bool:
        return self._only_programs or data_source in PROGRAMS

    def _scorer_of(self, data_source: str) -> Scorer:
        return self._trial if self._is_program(data_source) else super()._scorer_of(data_source)


class Code(Programs):
    """Pays for a program that passes the row's tests.

    The program is the last closed fence of the response after any `<think>…</think>` that says it is Python, else the
    last that says nothing. It runs in a sandbox and never sees what is expected.

    Args:
        partial: Whether it is paid the share of tests that it passes; else 1 for all of them.
        time_s: Seconds of the processor for one run: for each input, or for all calls and asserts.
        memory_mib: Address space of a run.
        packages: Whether it may import what is installed beside hrl.
        most: Tests of a row that are run, the first ones.
        deadline_s: Seconds by the clock for all runs of a program.
        trust: Run programs where the system can't hold them; they can do there what this user can.
    """

    def __init__(
        self,
        partial: bool = False,
        time_s: float = TIME_S,
        memory_mib: int = 1024,
        packages: bool = False,
        most: int | None = None,
        deadline_s: float = 27.0,
        trust: bool = False,
    ) -> None:
        if most is not None and most < 1:
            raise ArgumentError(f"most is {most}, must be at least 1")
        if not deadline_s > 0:
            raise ArgumentError(f"deadline_s is {deadline_s}, must be greater than 0")
        if not trust:
            check()
        sandbox = Sandbox(time_s, memory_mib, packages=packages, trust=trust)
        try:
            sandbox.check()
        except SandboxError as error:
            raise ArgumentError(str(error)) from error
        super().__init__(Trial(sandbox, partial, most, deadline_s), only_programs=True)
