"""Stochastic rounding to bfloat16, for weights that are stored in it.

bfloat16 has 8 significant bits, so neighbours are 0.4 to 0.8 % of a weight apart. An update of
1e-6 to a weight of 0.02 is a hundredth of that; rounded to nearest it is lost every time, and all but the smallest
weights never move. Here a number `x` between neighbours `a` and `b` becomes `b` with probability `(x - a) / (b - a)`
and `a` otherwise, so that its expectation is `x` (Gupta et al. 2015, "Deep learning with limited numerical precision").
The chance is a hash of (seed, parameter, its step, the element's place in the whole parameter), not drawn from a
generator. So a resumed run rounds as an uninterrupted one does, and so does a run on another number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from hrl.models.ops.layout import has_triton

_WORD = 1 << 32
_DROPPED_BITS = 16  # of a float32's 23, those that a bfloat16 lacks
_DROPPED = (1 << _DROPPED_BITS) - 1


def rounding_key(seed: int, name: str, step: int) -> int:
    """Return 64 bits that decide how a parameter is rounded at one of its steps."""
    text = f"{seed}/{name}/{step}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@torch.no_grad()
def round_stochastically(wide: Tensor, key: int, first: int) -> Tensor:
    """Round float32 numbers to bfloat16, each to one of its two neighbours by chance.

    Args:
        wide: `(n,)` float32.
        key: See `rounding_key`.
        first: Place of `wide[0]` in the flattened whole parameter.

    Returns:
        `(n,)` bfloat16. NaN and infinities stay what they are.
    """
    if wide.is_cuda and has_triton():
        return by_kernel(wide, key, first)
    # As integers, the bits of float32 numbers of one sign grow with the magnitude: adding chance below the cut carries
    # into the kept bits with exactly the probability that is wanted.
    bits = wide.view(torch.int32) + noise(wide.numel(), key, first, wide.device)
    rounded = bits.bitwise_and_(~_DROPPED).view(torch.float32)
    return torch.where(torch.isfinite(wide), rounded, wide).to(torch.bfloat16)


def by_kernel(wide: Tensor, key: int, first: int) -> Tensor:
    """Do as `round_stochastically`, in one kernel."""
    from hrl.workers.engine.rounding_kernel import round_run

    wide = wide.contiguous()
    out = torch.empty_like(wide, dtype=torch.bfloat16)
    for run, run_key, low in _runs(wide.numel(), key, first):
        round_run(wide[run], out[run], run_key, low)
    return out


def noise(count: int, key: int, first: int, device: torch.device) -> Tensor:
    """Return `(count,)` int32, uniform in [0, 65536); element i depends on `key` and `first + i` alone."""
    out = torch.empty(count, dtype=torch.int32, device=device)
    for run, run_key, low in _runs(count, key, first):
        places = torch.arange(run.stop - run.start, dtype=torch.int32, device=device)
        out[run] = _hash(places.add_(low), run_key)
    return out.bitwise_and_(_DROPPED)


def _runs(count: int, key: int, first: int) -> Iterator[tuple[slice, int, int]]:
    """Yield elements whose places have the same upper word: which, their key, and the first one's lower word."""
    start = 0
    while start < count:  # once, unless a parameter has more elements than 32 bits can count
        block, low = divmod(first + start, _WORD)
        stop = min(count, start + _WORD - low)
        yield slice(start, stop), _signed((key ^ (key >> 32) * (2 * block + 1)) % _WORD), _signed(low)
        start = stop


def _hash(words: Tensor, key: int) -> Tensor:
    """Mix int32 words in place: xor-shift and multiply, twice (the constants of Wellons' `lowbias32`)."""
    words.bitwise_xor_(key)
    words.bitwise_xor_(_shifted(words, 16)).mul_(0x7FEB352D)
    words.bitwise_xor_(_shifted(words, 15)).mul_(_signed(0x846CA68B))
    return words.bitwise_xor_(_shifted(words, 16))


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros, where torch's shift of a signed word repeats its sign."""
    return (words >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word
