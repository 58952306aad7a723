"""Seconds in which engines sample a batch: prefills, full iterations, and the last ones with few requests left.

An episode waits for its environment behind each of its turns. The engine decodes the others meanwhile, so that of the
episodes that are played at one time fewer are decoded, and each goes on by a token in an iteration and its share of
the wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf, log, sqrt

from hrl.plan.assumptions import Assumptions
from hrl.plan.cost import added
from hrl.plan.hardware import Hardware
from hrl.plan.shapes import ModelShape
from hrl.plan.workload import Workload

PREFILL = "prefill of the prompts"
WEIGHTS = "decoding: reading weights"
PRODUCTS = "decoding: products"
ATTENTION = "decoding: attention over the cache"
LINKS = "decoding: all-reduces of tensor parallelism"
ENGINE = "decoding: the engine's own work and the sampler"
UNEVEN = "waiting for the engine with the most tokens"
ENVIRONMENT = "waiting for environments"
SERVICE = "templates, parsing and routing of turns"

_WIDTH = 2
"""Bytes of a weight, an activation and an element of the cache: engines run in 16 bits."""
_BINS = 128
_ROUNDS, _NEAR = 30, 1e-3


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
        shares_prompts: Whether the samples of a prompt share its cache, and the turns of an episode its history.
        max_episodes: Episodes that are played at one time, of one engine.
    """

    shape: ModelShape
    hardware: Hardware
    assumed: Assumptions
    count: int
    ranks: int
    cache_bytes: float
    max_requests: int
    shares_prompts: bool
    max_episodes: float = inf

    @property
    def cache_share(self) -> float:
        """Share of a token's cache that one device of an engine has: whole heads of keys and values at least."""
        return self.shape.size.cache_share(self.ranks)

    def working(self, work: Workload) -> int:
        """Return how many engines have something to do: a group of samples is not divided, one of episodes is."""
        return min(self.count, ceil(work.prompts if work.episodes is None else work.sequences))

    def waiting(self, work: Workload) -> int:
        """Return the requests of the engine with the most groups, or its episodes."""
        if work.episodes is not None:
            return ceil(work.sequences / self.count)
        return ceil(work.prompts / self.count) * work.samples

    def width(self, work: Workload) -> float:
        """Return the most requests that one engine runs at once: its limit, or what its cache holds."""
        of_prompt = work.prompt / (work.samples if self.shares_prompts else 1)
        of_request = self.shape.size.kv_bytes_per_token * self.cache_share * (of_prompt + work.running_response)
        if of_request == 0:  # states of one size, which are not counted
            return float(self.max_requests)
        fits = self.cache_bytes / self.ranks / of_request
        return max(1.0, min(self.max_requests, fits))

    def enough(self, work: Workload) -> float:
        """Return how many episodes keep an engine at its width, though some of them wait for their environment."""
        width = self.width(work)
        if work.wait_s == 0.0:
            return width
        return width * (1.0 + work.wait_s / sum(self.iteration(width, work.prompt + work.running_response).values()))

    def running(self, work: Workload) -> float:
        """Return the requests or episodes that run at once on one engine: what it has, or what the limits allow."""
        return max(1.0, min(self.waiting(work), self.max_episodes, self.enough(work)))

    def seconds(self, work: Workload) -> dict[str, float]:
        """Return what sampling the batch is spent on.

        While more requests wait than run, a finished one is replaced: that part runs at full width. The rest is one
        wave, whose width falls with the lengths of its responses and which ends with the longest.
        """
        terms = dict(self._batch(work, 1.0))
        even, fullest = sum(terms.values()), sum(dict(self._batch(work, 1.0 + self._excess(work))).values())
        return added([*terms.items(), (UNEVEN, fullest - even), (SERVICE, self._service_s(work) - fullest)])

    def _batch(self, work: Workload, fullness: float) -> dict[str, float]:
        """Return what an engine spends on its part of the batch that has `fullness` times the mean of tokens."""
        waiting, running = self.waiting(work), self.running(work)
        context = work.prompt + work.running_response
        if running == self.enough(work):  # the engine is never idle, whoever waits
            rows = self.width(work)
            full = self.iteration(rows, context)
        else:
            rows, full = running, self.token(running, context, work.wait_s)
        replaced = max(0.0, waiting - running) * work.sampled / rows * fullness
        return added(
            [
                (PREFILL, self._prefill_s(work, waiting)),
                (ENGINE, self.assumed.wave_s),
                *((label, replaced * seconds) for label, seconds in full.items()),
                *self._wave(work, running * fullness),
            ]
        )

    def token(self, playing: float, context: float, wait_s: float) -> dict[str, float]:
        """Return what the time is spent on in which every episode goes on by a token.

        Args:
            playing: Episodes of one engine that run; those that do not wait for their environment are decoded.
            context: Mean tokens before the new one.
            wait_s: Seconds that an episode waits for each token.
        """
        if wait_s == 0.0:
            return self.iteration(playing, context)
        rows = playing
        for _ in range(_ROUNDS):
            terms = self.iteration(max(1.0, rows), context)
            each_s = sum(terms.values())
            before, rows = rows, playing * each_s / (each_s + wait_s)
            if abs(rows - before) < _NEAR * before:
                break
        return added([*terms.items(), (ENVIRONMENT, wait_s)])

    def iteration(self, rows: float, context: float) -> dict[str, float]:
        """Return what one iteration is spent on that decodes a token of each of `rows` requests.

        Args:
            rows: Running requests.
            context: Mean tokens before the new one.
        """
        shape, size, assumed, hardware = self.shape, self.shape.size, self.assumed, self.hardware
        memory_rate, flop_rate = hardware.memory_rate * assumed.memory_share, hardware.flops * assumed.decode_share
        # Layer by layer, products and attention take turns; each is bound by memory or by operations.
        read = _WIDTH * shape.weights_read(rows) / self.ranks / memory_rate
        flops = rows * (shape.flops.per_token + shape.flops.per_head_token) / self.ranks
        products = flops / flop_rate / (assumed.expert_share if shape.active_share < 0.5 else 1.0)
        cache = rows * context * size.kv_bytes_per_token * self.cache_share / memory_rate
        scores = rows * context * shape.flops.per_pair / self.ranks / flop_rate
        sampler = rows * 4 * size.vocab_size * assumed.sampler_passes / hardware.memory_rate
        own = assumed.engine_step_s + rows * assumed.engine_row_s + sampler
        return added(
            [
                (WEIGHTS if read > products else PRODUCTS, max(read, products)),
                (ATTENTION, max(cache, scores)),
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
        """Return the seconds of prefills.

        A prompt is computed once for its samples, and for each other one its last block. A further turn of an episode
        computes what its environment said and the last block before that, or, without shared caches, its whole history.
        """
        firsts = waiting / (work.samples if self.shares_prompts else 1)
        again = (waiting - firsts) * min(work.prompt, self.assumed.block_tokens / 2)
        tokens, pairs = firsts * work.prompt + again, (firsts * work.prompt / 2 + again) * work.prompt
        history, further = work.prompt + work.response / 2, waiting * (work.turns - 1.0)
        if self.shares_prompts:
            said = waiting * work.environment_tokens + further * min(history, self.assumed.block_tokens / 2)
            tokens, pairs = tokens + said, pairs + said * history
        else:
            tokens, pairs = tokens + further * history, pairs + further * history**2 / 2
        flops = self.shape.flops.per_token * tokens + self.shape.flops.per_pair * pairs
        share = self.assumed.prefill_share * (self.assumed.expert_share if self.shape.active_share < 0.5 else 1.0)
        return flops / self.ranks / (self.hardware.flops * share) + self._links_s(tokens)

    def _wave(self, work: Workload, running: float) -> Iterator[tuple[str, float]]:
        """Yield the terms of a wave that begins with `running` requests and ends with the batch's longest response."""
        step = work.longest / _BINS
        for index in range(_BINS):
            position = (index + 0.5) * step
            share = work.alive(position)
            if share * work.sequences < 0.5:  # nobody's response is as long
                return
            for label, seconds in self.token(max(1.0, share * running), work.prompt + position, work.wait_s).items():
                yield label, step * seconds * work.sampled / work.response

    def _service_s(self, work: Workload) -> float:
        """Return the seconds that the one service of all episodes works; 0 for single answers."""
        return 0.0 if work.episodes is None else self.assumed.turn_s * work.sequences * work.turns

    def _excess(self, work: Workload) -> float:
        """Return by how much the tokens of the fullest engine exceed the mean, expected of as many random sums."""
        engines = self.working(work)
        if engines == 1:
            return 0.0
        spread = sqrt(work.squared_response - work.response**2) / work.response
        return spread * sqrt(2 * log(engines) / self.waiting(work))
