"""Group estimators: GRPO's advantages.

Rewards of a batch, eight responses to a prompt, become advantages. A batch has the identifiers of its groups as
strings, and rewards `(B, R)` with the score on the last token. verl is called in both forms that its trainer has:
`grpo`, the default, a Python loop over rows, and `grpo_vectorized`. hrl's time has the numbering of the groups in it,
as theirs has, and the check that all rewards are finite, which they do not make. In `one token` responses have one
token, which leaves the estimator alone; in `512 tokens` most of the time goes to reading rewards and mask and to
writing advantages, which all three do.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from bench.harness import Case
from bench.peers import VERL
from hrl.algos.advantages import AdvantageConfig, AdvantageInput, compute_advantages
from hrl.algos.groups import group_codes

AXIS = "responses"
SECONDS = 14
THREADS = 1
_SAMPLES = 8


def cases() -> Iterator[Case]:
    """Yield growth in the number of responses, against both of verl's forms; then long responses."""
    from verl.trainer.ppo.core_algos import AdvantageEstimator, get_adv_estimator_fn

    loop, vectorised = (
        get_adv_estimator_fn(name) for name in (AdvantageEstimator.GRPO, AdvantageEstimator.GRPO_VECTORIZED)
    )
    for rows, length in ((512, 1), (2048, 1), (8192, 1), (32768, 1), (8192, 512)):
        rewards, mask, uids = _batch(rows, length)

        def ours(rewards: Tensor = rewards, mask: Tensor = mask, uids: np.ndarray = uids) -> Tensor:
            inputs = AdvantageInput(rewards, mask, group_codes(uids))
            return compute_advantages("grpo", inputs, AdvantageConfig())[0]

        for theirs, name, floor in ((loop, "grpo", 50.0), (vectorised, "grpo_vectorized", 4.0)):

            def verl(
                estimator=theirs,
                rewards: Tensor = rewards,
                mask: Tensor = mask,
                uids: np.ndarray = uids,
            ) -> Tensor:
                return estimator(token_level_rewards=rewards, response_mask=mask, index=uids)[0]

            label = f"{rows} rows of {length} token{'s' if length > 1 else ''}, {name}"
            named = floor if (rows, length) == (8192, 1) else None
            x = rows if length == 1 else None
            yield Case(label, VERL, ours, verl, _equal, named, x, name)


def _batch(rows: int, length: int) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return rewards and mask `(B, R)`, and the uid of every row as verl's trainer makes it."""
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    mask = (torch.arange(length) < lengths[:, None]).long()
    rewards = torch.zeros(rows, length)
    rewards[torch.arange(rows), lengths - 1] = torch.rand(rows, generator=generator)
    uids = np.array([str(uuid.UUID(int=prompt)) for prompt in range(rows // _SAMPLES)], dtype=object)
    return rewards, mask, np.repeat(uids, _SAMPLES)


def _equal(a: Tensor, b: Tensor) -> None:
    # hrl sums in float64, verl in float32.
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
