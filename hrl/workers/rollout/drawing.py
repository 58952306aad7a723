"""Draws tokens with one random number each.

vLLM's sampler makes a Gumbel number for each entry of the vocabulary, on a GPU by a kernel for each request that has a
seed, and reads the logits two more times for the log-probs. One number is enough: the token at which the cumulated
probabilities pass it. The exponentials whose sums give the probabilities also give the log-probs' normaliser.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

#: Entries of the vocabulary whose probabilities are summed first.
BLOCK = 256
#: Rows whose exponentials are held at once on a CPU, few enough for its cache.
CPU_ROWS = 8
#: How far one number takes the offset of a GPU's generator.
PHILOX_STEP = 4


@dataclass(frozen=True)
class Ahead:
    """A place behind the next one of a generator's answer, for which a token is drawn that may not be kept."""

    generator: torch.Generator
    by: int


class Positions:
    """For which token of its answer each generator is asked next. They are vLLM's, one for a request."""

    def __init__(self) -> None:
        self._drawn: WeakKeyDictionary[torch.Generator, int] = WeakKeyDictionary()

    def number(self, generator: torch.Generator | Ahead) -> float:
        """Return the random number of a generator's next token, and count it; or one of a place ahead, uncounted."""
        if isinstance(generator, Ahead):
            seed, by = generator.generator.initial_seed(), generator.by
            return seeded_number(seed, self._next(generator.generator) + by)
        number = seeded_number(generator.initial_seed(), self._next(generator))
        self.count(generator, 1)
        return number

    def count(self, generator: torch.Generator, tokens: int) -> None:
        """Note that this many more tokens of its answer are drawn."""
        if generator.device.type == "cpu":  # has no offset; prompts are not cut there, so no token is dropped
            self._drawn[generator] = self._drawn.get(generator, 0) + tokens
        else:  # for a token that it drops, after a piece of a prompt, vLLM takes the offset back by a step
            generator.set_offset(generator.get_offset() + PHILOX_STEP * tokens)

    def _next(self, generator: torch.Generator) -> int:
        if generator.device.type == "cpu":
            return self._drawn.get(generator, 0)
        return int(generator.get_offset()) // PHILOX_STEP


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token from each row of `softmax(logits)`.

    A row's results do not depend on the other rows, bit for bit. A row in which a logit is NaN or plus infinity, as of
    weights that are not finite, gives some token with the log-prob NaN.

    Args:
        logits: `(B, V)` float32; minus infinity where a token is excluded, finite somewhere in every row. Overwritten.
        uniform: `(B,)` float64 in [0, 1), a random number for each row.

    Returns:
        The tokens, `(B,)` int64, and all log-probs, `(B, V)` float32, in the memory of `logits`.
    """
    missing = -logits.shape[1] % BLOCK
    padded = functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
    shape = (len(logits), padded.shape[1] // BLOCK)
    masses = torch.empty(shape, dtype=torch.float64, device=logits.device)  # of each block, before division
    tops = padded.amax(1, keepdim=True)
    step = CPU_ROWS if logits.device.type == "cpu" else max(1, len(logits))
    for rows, top, out in zip(padded.split(step), tops.split(step), masses.split(step), strict=True):
        out.copy_((rows - top).exp_().unflatten(1, (-1, BLOCK)).sum(-1))
    bounds = masses.cumsum(1)
    total = bounds[:, -1:]
    block, rest = _place(bounds, uniform[:, None] * total)
    weights = (
        padded.unflatten(1, (-1, BLOCK))[torch.arange(len(logits), device=logits.device), block]
        .sub(tops)
        .exp_()
        .double()
    )
    entry, _ = _place(weights.cumsum(1), rest)
    return (block * BLOCK + entry).clamp_max_(logits.shape[1] - 1), logits.sub_(tops).sub_(total.log().float())


def seeded_number(seed: int, position: int) -> float:
    """Return the random number in [0, 1) that a seed has for one position of its answer."""
    digest = blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _place(bounds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the targets `(B, 1)` fall between the ascending `bounds (B, N)`, and how far into their interval.

    A target at or above the last bound, which only rounding can make, falls into the last interval that is not empty;
    one that is NaN into the last.
    """
    below_end = torch.minimum(target, torch.nextafter(bounds[:, -1:], torch.zeros_like(bounds[:, -1:])))
    index = torch.searchsorted(bounds, below_end, right=True).clamp_max_(bounds.shape[1] - 1)
    start = bounds.gather(1, (index - 1).clamp_min(0)).masked_fill_(index == 0, 0.0)
    return index.squeeze(1), below_end - start
