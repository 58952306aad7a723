"""Stochastic rounding: a bfloat16 weight that moves on average by what its update says.

bfloat16 has 8 significant bits, so between two neighbours lies about 0.4 to 0.8 % of a weight. An update of 1e-6 to a
weight of 0.02 is a hundredth of that: rounded to the nearest it is lost, every time, and all but the smallest weights
never move. Here a number between two neighbours `a < x < b` becomes `b` with probability `(x - a) / (b - a)` and
`a` otherwise, so that its expectation is `x` (Gupta et al. 2015, "Deep learning with limited numerical precision").

The chance comes from no generator but from a hash of (seed, parameter, its step, the element's place in the whole
parameter). So a resumed run rounds as the straight one does, and so does a run on another number of ranks.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_WORD = 1 << 32
_DROPPED_BITS = 16  # of a float32's 23, those that a bfloat16 lacks
_DROPPED = (1 << _DROPPED_BITS) - 1


def rounding_key(seed: int, name: str, step: int) -> int:
    """64 bits that say how a parameter is rounded at one of its steps."""
    text = f"{seed}/{name}/{step}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@torch.no_grad()
def round_stochastically(wide: Tensor, key: int, first: int) -> Tensor:
    """Float32 numbers as bfloat16, each rounded to one of its two neighbours by chance.

    Args:
        wide: `(n,)` float32.
        key: See `rounding_key`.
        first: Place of `wide[0]` in the flattened whole parameter.

    Returns:
        `(n,)` bfloat16. What is not finite stays so.
    """
    # In the bits of a float32 a larger magnitude is a larger integer, whatever the sign: adding chance below the cut
    # carries into the kept bits with just the probability that is wanted.
    bits = wide.view(torch.int32) + noise(wide.numel(), key, first, wide.device)
    rounded = bits.bitwise_and_(~_DROPPED).view(torch.float32)
    return torch.where(torch.isfinite(wide), rounded, wide).to(torch.bfloat16)


def noise(count: int, key: int, first: int, device: torch.device) -> Tensor:
    """`(count,)` int32, uniform in [0, 65536): element i is a function of `key` and `first + i` alone."""
    out = torch.empty(count, dtype=torch.int32, device=device)
    start = 0
    while start < count:  # one turn, unless a parameter has more elements than 32 bits can count
        block, low = divmod(first + start, _WORD)
        stop = min(count, start + _WORD - low)
        places = torch.arange(stop - start, dtype=torch.int32, device=device)
        out[start:stop] = _hash(places.add_(_signed(low)), _signed((key ^ (key >> 32) * (2 * block + 1)) % _WORD))
        start = stop
    return out.bitwise_and_(_DROPPED)


def _hash(words: Tensor, key: int) -> Tensor:
    """Mixes int32 words in place: xor-shift and multiply, twice (the constants of Wellons' `lowbias32`)."""
    words.bitwise_xor_(key)
    words.bitwise_xor_(_shifted(words, 16)).mul_(0x7FEB352D)
    words.bitwise_xor_(_shifted(words, 15)).mul_(_signed(0x846CA68B))
    return words.bitwise_xor_(_shifted(words, 16))


def _shifted(words: Tensor, bits: int) -> Tensor:
    """To the right, with zeros behind: torch's shift of a signed word repeats its sign."""
    return (words >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word
