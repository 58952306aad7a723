"""Generalised advantage estimation.

1,024 responses of up to 4,096 tokens, as rewards and values `(B, R)` with a mask. verl and OpenRLHF walk over the
padded matrix from right to left, a column at a time; hrl takes the trained tokens alone. In `full` all responses have
the whole length, in `ragged` they fill a quarter of the matrix. OpenRLHF computes micro-batch by micro-batch (16
rows), and whitens later; the others whiten here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench.harness import Case
from bench.peers import OPENRLHF, OPENRLHF_NEEDS, VERL, stand_ins
from hrl.algos.advantages import gae

AXIS = "tokens of a response"
SECONDS = 41
THREADS = 1
_ROWS, _GAMMA, _LAM = 1024, 0.99, 0.95
_MICRO_BATCH = 16


def cases() -> Iterator[Case]:
    """Yield growth in the length of responses, then both fillings at full length."""
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    per_micro_batch = _experience_maker().get_advantages_and_returns

    for length in (512, 1024, 2048, 4096):
        for filling in ("full", "ragged"):
            rewards, values, mask = _batch(length, ragged=filling == "ragged")

            def ours(rewards: Tensor = rewards, values: Tensor = values, mask: Tensor = mask) -> tuple[Tensor, Tensor]:
                return gae(rewards, values, mask, _GAMMA, _LAM)

            def verl(rewards: Tensor = rewards, values: Tensor = values, mask: Tensor = mask) -> tuple[Tensor, Tensor]:
                return compute_gae_advantage_return(rewards, values, mask, _GAMMA, _LAM)

            def check(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], mask: Tensor = mask) -> None:
                for one, other in zip(a, b, strict=True):
                    torch.testing.assert_close(one * mask, other * mask, rtol=1e-4, atol=1e-4)

            floor = {"full": 20.0, "ragged": 60.0}[filling] if length == 4096 else None
            yield Case(f"{length} tokens, {filling}", VERL, ours, verl, check, floor, length, filling)

    rewards, values, mask = _batch(4096, ragged=False)

    def unwhitened() -> tuple[Tensor, Tensor]:
        return gae(rewards, values, mask, _GAMMA, _LAM, whitened=False)

    def openrlhf() -> tuple[Tensor, Tensor]:
        pieces = [
            per_micro_batch(
                SimpleNamespace(), *(column[at : at + _MICRO_BATCH] for column in (values, rewards, mask)), _GAMMA, _LAM
            )
            for at in range(0, _ROWS, _MICRO_BATCH)
        ]
        advantages, returns = zip(*pieces, strict=True)
        return torch.cat(advantages), torch.cat(returns)

    def equal(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
        for one, other in zip(a, b, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

    yield Case("4096 tokens, full, micro-batches of 16", OPENRLHF, unwhitened, openrlhf, equal, 100.0, rounds=3)


def _experience_maker() -> Any:
    """Return OpenRLHF's class."""
    # What looks whether packages are installed that are stood in for must look before.
    import vllm  # noqa: F401

    with stand_ins(*OPENRLHF_NEEDS):
        return importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker


def _batch(length: int, *, ragged: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards, values and mask `(B, R)`; rewards stand on the last token, as those of a function do."""
    generator = torch.Generator().manual_seed(length)
    lengths = torch.full((_ROWS,), length)
    if ragged:
        lengths = (torch.rand(_ROWS, generator=generator) ** 3 * length).long().clamp(1, length)
    mask = (torch.arange(length) < lengths[:, None]).float()
    rewards = torch.zeros(_ROWS, length)
    rewards[torch.arange(_ROWS), lengths - 1] = torch.randint(0, 2, (_ROWS,), generator=generator).float()
    return rewards, torch.randn(_ROWS, length, generator=generator) * mask, mask
