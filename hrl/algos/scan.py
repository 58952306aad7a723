"""Generalised advantage estimation as a reverse scan over trained tokens.

Large batches on the CPU go through one compiled pass (numba) that touches each token once; anything else goes through
torch: rows packed to their trained tokens, one vector operation per time step over all rows.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
from torch import Tensor

from hrl.algos.masked import WHITEN_EPSILON, TrainedTokens, check_shapes, whiten

COMPILE_FROM_TOKENS = 1 << 16
"""Below this many entries the torch scan is over before numba would be imported."""


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, *, whitened: bool = True
) -> tuple[Tensor, Tensor]:
    """Advantages and returns over the trained tokens alone (Schulman et al., arXiv:1506.02438, equation 16).

    A masked token is not there: the value that follows a trained token is that of the next *trained* token.

    Args:
        rewards: Token-level rewards `(B, R)`; those outside the mask are ignored.
        values: Value before each token `(B, R)`; those outside the mask are ignored.
        mask: `(B, R)`, 1 on trained tokens.
        gamma: Discount.
        lam: Weight of longer returns.
        whitened: Whiten the advantages over all trained tokens of the batch. Returns are never whitened.

    Returns:
        Advantages and returns `(B, R)`, 0 outside the mask, in the dtype of `rewards`.
    """
    check_shapes(mask, rewards=rewards, values=values)
    if rewards.device.type == "cpu" and rewards.numel() >= COMPILE_FROM_TOKENS and importlib.util.find_spec("numba"):
        return _compiled_gae(rewards, values, mask, gamma, lam, whitened)
    return _torch_gae(rewards, values, mask, gamma, lam, whitened)


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each trained token on, over trained tokens alone. `(B, R)`."""
    returns, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0, whitened=False)
    return returns


def _compiled_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, whitened: bool
) -> tuple[Tensor, Tensor]:
    from hrl.algos.scan_kernels import scan_rows, whiten_rows

    rewards_array, trained = rewards.detach().numpy(), mask.detach().numpy()
    # Zeroed pages come from the kernel on first touch: where a batch is padding, no memory is written.
    advantages, returns = (np.zeros(rewards_array.shape, rewards_array.dtype) for _ in range(2))
    ends = np.zeros(len(rewards_array), np.int64)
    moments = scan_rows(
        rewards_array, values.detach().numpy(), trained, float(gamma), float(lam), advantages, returns, ends
    )
    if whitened:
        whiten_rows(advantages, trained, ends, *moments, WHITEN_EPSILON)
    return torch.from_numpy(advantages), torch.from_numpy(returns)


def _torch_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, whitened: bool
) -> tuple[Tensor, Tensor]:
    tokens = TrainedTokens.of(mask)
    packed_values = tokens.pack(values.detach().double())
    following = torch.nn.functional.pad(packed_values[:, 1:], (0, 1))
    deltas = tokens.pack(rewards.detach().double()) + gamma * following - packed_values
    # Behind a row's last token rewards and values are 0, so the running advantage arrives there as 0.
    steps = deltas.T.contiguous().unbind(0)
    for earlier, later in zip(reversed(steps[:-1]), reversed(steps[1:]), strict=True):
        earlier.add_(later, alpha=gamma * lam)
    packed = torch.stack(steps, dim=1) if steps else deltas
    advantages = tokens.unpack(packed)
    returns = tokens.unpack(packed + packed_values)
    if whitened:
        advantages = whiten(advantages, mask)
    return advantages.to(rewards.dtype), returns.to(rewards.dtype)
