"""Seconds in which engines sample a batch: prefills, full iterations, and the last ones with few requests left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log, sqrt

from hrl.plan.assumptions import Assumptions
from hrl.plan.cost import added
from hrl.plan.hardware import Hardware
from hrl.plan.shapes import ModelShape
from hrl.plan.workload import Workload

PREFILL = "prefill of the prompts"
MEMORY = "decoding: reading weights and cache"
PRODUCTS = "decoding: products"
LINKS = "decoding: all-reduces of tensor parallelism"
ENGINE = "decoding: the engine's own work and the sampler"
UNEVEN = "waiting for the engine with the most tokens"

_WIDTH = 2
"""Bytes of a weight, an activation and an element of the cache: engines run in 16 bits."""
_BINS = 128


@dataclass(frozen=True)
class Engines:
    """The engines of a run.

    Attributes:
        shape: The policy.
        hardware: A device.
        assumed: Constants.
        count: Number of engines.
        ranks: Devices of each.
        cache_bytes: Memory of an engine's cache, of all its devices.
        max_requests: Requests that it runs at once, `rollout.max_num_seqs`.
        shares_prompts: Whether the samples of a prompt share its cache.
    """

    shape: ModelShape
    hardware: Hardware
    assumed: Assumptions
    count: int
    ranks: int
    cache_bytes: float
    max_requests: int
    shares_prompts: bool

    def running(self, work: Workload) -> float:
        """Return the requests that one engine runs at once: what it has, its limit, or what its cache holds."""
        waiting = ceil(work.sequences / self.count)
        of_prompt = work.prompt / (min(work.samples, waiting) if self.shares_prompts else 1)
        fits = self.cache_bytes / (self.shape.size.kv_bytes_per_token * (of_prompt + work.running_response))
        return max(1.0, min(waiting, self.max_requests, fits))

    def seconds(self, work: Workload) -> dict[str, float]:
        """Return what sampling the batch is spent on.

        While more requests wait than run, a finished one is replaced: that part runs at full width. The rest is one
        wave, whose width falls with the lengths of its responses and which ends with the longest.
        """
        terms = dict(self._batch(work, 1.0))
        even, fullest = sum(terms.values()), sum(dict(self._batch(work, 1.0 + self._excess(work))).values())
        return added([*terms.items(), (UNEVEN, fullest - even)])

    def _batch(self, work: Workload, fullness: float) -> dict[str, float]:
        """Return what an engine spends on its part of the batch that has `fullness` times the mean of tokens."""
        waiting, running = ceil(work.sequences / self.count), self.running(work)
        replaced = max(0.0, waiting - running) * work.response / running * fullness
        full = self.iteration(running, work.prompt + work.running_response).items()
        return added(
            [
                (PREFILL, self._prefill_s(work, waiting)),
                (ENGINE, self.assumed.wave_s),
                *((label, replaced * seconds) for label, seconds in full),
                *self._wave(work, running * fullness),
            ]
        )

    def iteration(self, rows: float, context: float) -> dict[str, float]:
        """Return what one iteration is spent on that decodes a token of each of `rows` requests.

        Args:
            rows: Running requests.
            context: Mean tokens before the new one.
        """
        shape, size, assumed = self.shape, self.shape.size, self.assumed
        weights = _WIDTH * shape.weights_read(rows) / self.ranks
        cache = rows * context * size.kv_bytes_per_token / self.ranks
        memory = (weights + cache) / (self.hardware.memory_rate * assumed.memory_share)
        flops = shape.flops.per_token + shape.flops.per_head_token + shape.flops.per_pair * context
        share = assumed.decode_share * (assumed.expert_share if shape.active_share < 0.5 else 1.0)
        products = rows * flops / self.ranks / (self.hardware.flops * share)
        sampler = rows * 4 * size.vocab_size * assumed.sampler_passes / self.hardware.memory_rate
        own = assumed.engine_step_s + rows * assumed.engine_row_s + sampler
        return added(
            [
                (MEMORY if memory > products else PRODUCTS, max(memory, products)),
                (LINKS, self._links_s(rows)),
                (ENGINE, own),
            ]
        )

    def _links_s(self, rows: float) -> float:
        if self.ranks == 1:
            return 0.0
        size = self.shape.size
        moved = 2 * (self.ranks - 1) / self.ranks * rows * size.hidden_size * _WIDTH
        rate = self.hardware.link_rate * self.assumed.collective_share
        return 2 * size.num_layers * (self.assumed.allreduce_s + moved / rate)

    def _prefill_s(self, work: Workload, waiting: int) -> float:
        prompts = waiting / (work.samples if self.shares_prompts else 1)
        flops = prompts * (self.shape.flops.per_token * work.prompt + self.shape.flops.per_pair * work.prompt**2 / 2)
        share = self.assumed.prefill_share * (self.assumed.expert_share if self.shape.active_share < 0.5 else 1.0)
        return flops / self.ranks / (self.hardware.flops * share) + self._links_s(prompts * work.prompt)

    def _wave(self, work: Workload, running: float) -> Iterator[tuple[str, float]]:
        """Yield the terms of a wave that begins with `running` requests and ends with the batch's longest response."""
        step = work.longest_response / _BINS
        for index in range(_BINS):
            position = (index + 0.5) * step
            share = work.alive(position)
            if share * work.sequences < 0.5:  # nobody's response is as long
                return
            for label, seconds in self.iteration(max(1.0, share * running), work.prompt + position).items():
                yield label, step * seconds

    def _excess(self, work: Workload) -> float:
        """Return by how much the tokens of the fullest engine exceed the mean, expected of as many random sums."""
        if self.count == 1:
            return 0.0
        spread = sqrt(work.squared_response - work.response**2) / work.response
        return spread * sqrt(2 * log(self.count) * self.count / work.sequences)
