"""Generalised advantage estimation as a reverse scan over trained tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from hrl.algos.masked import TrainedTokens, check_shapes, in_pieces, whiten

BLOCK_TOKENS = 32
"""Tokens summed up by one matrix product. Larger blocks cost more multiplications, smaller ones more products."""


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
        Advantages and returns `(B, R)`, 0 outside the mask, in the dtype of `rewards`, without gradient.
    """
    check_shapes(mask, rewards=rewards, values=values)
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for piece in in_pieces(advantages, returns, rewards.detach(), values.detach(), mask):
        _fill_rows(*piece, gamma=gamma, lam=lam)
    return whiten(advantages, mask) if whitened else advantages, returns


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each trained token on, over trained tokens alone. `(B, R)`."""
    returns, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0, whitened=False)
    return returns


def _fill_rows(
    advantages: Tensor, returns: Tensor, rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> None:
    """Write advantages and returns of these rows into their first two arguments."""
    tokens = TrainedTokens.of(mask)
    packed_values = tokens.pack(values).double()
    # Behind a row's last token rewards and values are 0, so nothing comes in from there.
    deltas = tokens.pack(rewards).double().sub_(packed_values)
    deltas[:, :-1].add_(packed_values[:, 1:], alpha=gamma)
    packed = discounted_sums(deltas, gamma * lam)
    advantages.copy_(tokens.unpack(packed))
    returns.copy_(tokens.unpack(packed.add_(packed_values)))


def discounted_sums(steps: Tensor, decay: float) -> Tensor:
    """`y_t = sum_{k >= t} decay^(k - t) x_k` along the last dimension, any shape, without a loop over time.

    The sums within blocks of :data:`BLOCK_TOKENS` are one product with a triangular matrix of powers. What enters a
    block from behind is the sum at the start of the next block, and those starts are a shorter scan of the same kind.
    """
    length = steps.shape[-1]
    size = min(BLOCK_TOKENS, length)
    if size < 2:
        return steps
    places = torch.arange(size, device=steps.device, dtype=steps.dtype)
    distance = places.unsqueeze(-1) - places
    powers = torch.where(distance >= 0, decay ** distance.clamp(min=0), 0.0)
    whole = steps if length % size == 0 else pad(steps, (0, -length % size))
    sums = whole.unflatten(-1, (-1, size)) @ powers
    starts = discounted_sums(sums[..., 0], decay**size)
    sums.addcmul_(pad(starts[..., 1:], (0, 1)).unsqueeze(-1), decay ** (size - places))
    return sums.flatten(-2)[..., :length]
