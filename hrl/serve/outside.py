"""Calls from outside of a run: they are sampled beside its episodes while engines ask for work, and wait meanwhile."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

from hrl.episodes.router import RoundOverError, Router
from hrl.files import write_whole
from hrl.report.run_folder import SERVING
from hrl.serve.refusals import not_now
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import OnTokens, SampleOutput

logger = logging.getLogger(__name__)

_AT_ONCE = 16
"""Answers that are sampled at the same time; further ones wait, so that the run's own episodes go on."""
_LONGEST_WAIT_S = 300.0
_MOST_ROUNDS = 3
"""That may leave a call unfinished; then it is too long for the rounds of this run."""
_ONLY_THE_OWNER = 0o600


class OutsideCalls:
    """Samples answers to calls that belong to no episode, with the weights that the engines have.

    Engines sample in rounds, between which the trainer has the machine. A call that comes then waits for the next
    round, and one that a round leaves unfinished is sampled anew in the next, so a whole answer is of one version.

    Args:
        router: Of the run's episodes.
        longest_wait_s: After which a call without an answer is refused.
    """

    def __init__(self, router: Router, longest_wait_s: float = _LONGEST_WAIT_S) -> None:
        self._router, self._longest_wait_s = router, longest_wait_s
        self._seats = asyncio.Semaphore(_AT_ONCE)

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, name: str, on_tokens: OnTokens | None = None
    ) -> SampleOutput:
        """Have an answer sampled.

        Args:
            token_ids: The context.
            sampling: How it is sampled.
            name: Of this call alone.
            on_tokens: Told nothing, for ranks hand over what is finished.

        Raises:
            RequestRefusedError: There was no answer in time, or in a few rounds; the client is told to ask again.
        """
        try:
            async with asyncio.timeout(self._longest_wait_s):
                for _ in range(_MOST_ROUNDS):
                    async with self._seats:  # for one round: others who wait come before it is sampled anew
                        await self._router.is_open.wait()
                        try:
                            return await self._router.generate(token_ids, sampling, name, name, may_fail=True)
                        except RoundOverError:
                            logger.debug("%s waits for the next round", name)
                        finally:
                            self._router.forget(name)
        except TimeoutError:
            raise not_now(
                f"the run answers while it samples, and had no time for this call within {self._longest_wait_s:g} s; "
                "ask again"
            ) from None
        raise not_now(
            f"the run answers while it samples, and {_MOST_ROUNDS} rounds ended before this answer did; ask again for "
            "a shorter one (max_tokens), or ask a checkpoint with `hrl serve`"
        )


def write_address(folder: Path, base_url: str, key: str) -> Path:
    """Write where a run is reached, and with which key, into its folder; for nobody's eyes but the user's.

    Returns:
        The file, which a shell can source.
    """
    text = f"export OPENAI_BASE_URL={shlex.quote(base_url)}\nexport OPENAI_API_KEY={shlex.quote(key)}\n"
    return write_whole(folder / SERVING, text, mode=_ONLY_THE_OWNER)
