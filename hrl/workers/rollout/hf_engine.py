"""transformers as a rollout engine: slow, simple, and close enough to the trainer to check another engine against.

Requests that wait together are sampled together, in one left-padded batch with a key-value cache: a wave. Those that
come meanwhile wait for its end. Every sample has its own generator, so its tokens do not depend on its neighbours (up
to the rounding of matrix products of another shape).

A model that gets padded rows in training (`ModelSource.packs_rows`) carries a state along the row, from which
transformers keeps padding on the left in some families and not in others. Its waves have contexts of one length.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hrl.models.adapter import add_adapter
from hrl.models.checkpoint_form import CheckpointForm, saved_tensors
from hrl.models.experts import ExpertLayers, follow_experts
from hrl.models.four_bit import hold_in_4bit
from hrl.models.head import backbone_of
from hrl.models.hf_config import load_config
from hrl.models.loading import language_model_class
from hrl.models.ops.rope import fix_rope_frequencies
from hrl.models.pictures import PictureProcessor, Sight, shown
from hrl.pictures import Picture
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import (
    EngineDeadError,
    EngineSetup,
    FinishReason,
    OnTokens,
    RolloutEngine,
    RolloutError,
    SampleOutput,
    told_on,
)
from hrl.workers.weight_sync.receiver import WeightReceiver
from hrl.workers.weight_sync.wire import Manifest, ReceiverReport, WeightSyncError

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: What families call what they keep of the tokens so far, in their outputs and as an argument.
_CACHES = ("past_key_values", "cache_params")


class HfModelWriter:
    """Copies weights in their checkpoint's form into a transformers model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._form = CheckpointForm.of(model)
        # Tied parameters appear once, under the name that the trainer gives them too.
        self._tensors = dict(saved_tensors(model))
        # Checkpoint name → name of the tensor that holds it, and its shape.
        self._holders = {piece.name: (name, piece.shape) for name in self._tensors for piece in self._form.pieces(name)}
        self._positions: tuple[str, dict[str, Tensor]] = ("", {})
        self._written: set[str] = set()

    def begin(self) -> None:
        """Expect a complete set of weights."""
        self._written = set()

    @torch.no_grad()
    def write(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Copy weights into the model.

        Raises:
            WeightSyncError: The model has no such parameter, or one of another shape.
        """
        for name, tensor in weights:
            if name not in self._holders:
                raise WeightSyncError(f"the model has no parameter {name!r}")
            holder, shape = self._holders[name]
            if shape != tuple(tensor.shape):
                raise WeightSyncError(f"{name!r} is {shape} in the model, received {tuple(tensor.shape)}")
            target = self._tensors[holder]
            if self._form.is_whole(holder):
                target.copy_(tensor)
            else:
                target.view(-1)[self._positions_in(holder)[name]] = tensor.to(target)
            self._written.add(name)

    def finish(self, kept: Collection[str] = ()) -> None:
        """Check that everything was written, but for the names in `kept`.

        Raises:
            WeightSyncError: Weights are missing; names them.
        """
        missing = sorted(self._holders.keys() - self._written - set(kept))
        if missing:
            raise WeightSyncError(f"the trainer sent nothing for {', '.join(missing[:8])}")

    def cancel(self) -> None:
        """Leave what was written: the receiver counts the model as broken until the next complete set."""

    def read_back(self, name: str) -> Tensor | None:
        """Return a weight as the model has it."""
        holder, _ = self._holders[name]
        tensor = self._tensors[holder].detach()
        return tensor if self._form.is_whole(holder) else tensor.view(-1)[self._positions_in(holder)[name]]

    def _positions_in(self, holder: str) -> dict[str, Tensor]:
        """Return where the pieces lie in the flattened tensor that holds them."""
        if self._positions[0] != holder:  # the pieces of one tensor come one after the other
            self._positions = holder, self._form.positions(holder, self._tensors[holder].shape)
        return self._positions[1]


@dataclass(eq=False)
class _Request:
    """A response that is asked for, and as much of it as is there: whoever samples it goes on from here.

    Attributes:
        prompt_ids: Its context.
        sampling: How it is sampled.
        done: Set when it is whole, or has failed.
        tell: Told of its tokens.
        generator: Its own.
        token_ids, log_probs: What has been sampled.
        routed: The experts of the tokens that have passed through the model, `(tokens, L, K)` each, in order.
        pictures: That the context shows.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    done: asyncio.Future[None]
    tell: OnTokens | None
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    routed: list[np.ndarray] = field(default_factory=list)
    pictures: Sequence[Picture] = ()

    def add(self, token: int, log_prob: float) -> None:
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        if self.tell is not None:
            self.tell([token], [log_prob])

    def end(self, error: BaseException | None = None) -> None:
        """Say that it is whole, or why it failed. May be called from any thread."""
        self.done.get_loop().call_soon_threadsafe(_settle, self.done, error)


class HfEngine(RolloutEngine):
    """One transformers model, sampled from in a thread.

    Raises:
        RolloutError: `rollout.engine_kwargs.hf` has arguments.
    """

    name = "transformers engine"
    own_process = False

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        if setup.arguments:
            raise RolloutError(f"rollout.engine_kwargs.hf={setup.arguments}: the transformers engine has no arguments")
        self._device = setup.device
        self._max_num_seqs = setup.config.max_num_seqs
        self._stop_token_ids = setup.tokens.stop
        self._model: PreTrainedModel | None = None
        self._receiver: WeightReceiver | None = None
        self._experts: ExpertLayers | None = None
        self._sight: Sight | None = None
        self._thread = ThreadPoolExecutor(1, "hf-engine")
        self._waiting: list[_Request] = []
        self._batch: list[_Request] = []
        self._runner: asyncio.Task[None] | None = None
        self._num_split_waves = 0

    async def start(self) -> None:
        """Load the model."""
        self._model = await self._in_thread(self._load)
        self._receiver = WeightReceiver(HfModelWriter(self._model), self.name)

    async def shutdown(self) -> None:
        """Cancel what is being sampled and drop the model."""
        if self._runner is not None:
            self._runner.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._model, self._receiver = None, None

    async def _generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        request_id: str,
        on_tokens: OnTokens | None,
        pictures: Sequence[Picture],
    ) -> SampleOutput:
        self._running(self._model)
        loop = asyncio.get_running_loop()
        generator = torch.Generator().manual_seed(sampling.seed)
        request = _Request(
            prompt_ids, sampling, loop.create_future(), told_on(loop, on_tokens), generator, pictures=pictures
        )
        self._waiting.append(request)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run_waiting())
            self._runner.add_done_callback(self._fail_what_is_open)
        await request.done
        tokens = request.token_ids
        stopped = bool(tokens) and tokens[-1] in self._stop_token_ids
        reason: FinishReason = "stop" if stopped else "length"
        routed = None if self._experts is None else np.concatenate(request.routed)
        return SampleOutput(tokens, request.log_probs, reason, self.policy_version, routed)

    def take_counts(self) -> dict[str, float]:
        """Return how many waves were too large for the memory, see `RolloutEngine.take_counts`."""
        count, self._num_split_waves = self._num_split_waves, 0
        return {"rollout/split_waves": float(count)} if count else {}

    async def _begin_weights(self, manifest: Manifest, handle: Mapping[str, object], version: int) -> None:
        await self._in_thread(self._running(self._receiver).begin, manifest, handle, version)

    async def weights_load(self, index: int) -> None:
        """Take one published bucket."""
        await self._in_thread(self._running(self._receiver).load, index)

    async def _commit_weights(self) -> list[ReceiverReport]:
        return [await self._in_thread(self._running(self._receiver).commit)]

    async def _abort_weights(self) -> bool:
        return await self._in_thread(self._running(self._receiver).abort)

    def _load(self) -> PreTrainedModel:
        source = self.setup.model
        config = load_config(source.path, source.override_config, trust_remote_code=source.trust_remote_code)
        model = language_model_class(config).from_pretrained(
            source.path,
            dtype=getattr(torch, self.setup.config.dtype),
            trust_remote_code=source.trust_remote_code,
            config=config,
        )
        if source.shows_pictures:
            processor = PictureProcessor(source.path, trust_remote_code=source.trust_remote_code)
            self._sight = Sight(backbone_of(model), processor)
        fix_rope_frequencies(model, source.max_model_len)
        if self.setup.config.enable_rollout_routing_replay:
            self._experts = follow_experts(model)
            self._experts.require_some()
        if source.adapter is not None and not source.adapter.merge:  # a sync brings its matrices alone
            add_adapter(model, source.adapter, model.dtype)
            if source.adapter.load_in_4bit:
                hold_in_4bit(model, self._device)
        return model.to(self._device).eval()

    async def _run_waiting(self) -> None:
        await asyncio.sleep(0)  # let the other requests of the wave arrive
        while waiting := [request for request in self._waiting if not request.done.done()]:
            self._batch, self._waiting = waiting[: self._max_num_seqs], waiting[self._max_num_seqs :]
            try:
                await self._in_thread(self._sample, self._running(self._model), self._batch)
            except RolloutError:
                raise
            except (RuntimeError, ValueError) as error:  # these requests can't be sampled; others perhaps can
                _fail(self._batch, _could_not(error))

    def _fail_what_is_open(self, runner: asyncio.Task[None]) -> None:
        """Fail the open requests of a runner that has ended early, for whatever reason; nobody else would."""
        error = EngineDeadError("the transformers engine was shut down") if runner.cancelled() else runner.exception()
        if error is not None:
            _fail([*self._batch, *self._waiting], error)
            self._waiting = []

    def _sample(self, model: PreTrainedModel, batch: Sequence[_Request]) -> None:
        """Sample requests to their ends; in halves, each from where it is, where the memory is too small for all."""
        waves = [batch] if self.setup.model.packs_rows else _by_length(batch)
        while waves:
            wave = waves.pop()
            try:
                self._sample_wave(model, wave)
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                # A traceback would hold all that the wave had in memory.
                failure = _could_not(error.with_traceback(None))
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            if len(wave) == 1:
                wave[0].end(failure)
                continue
            left = [request for request in wave if not self._is_over(request)]
            self._num_split_waves += 1
            logger.warning(
                "there is no memory for %d responses at once, which go on in halves (a smaller rollout.max_num_seqs "
                "spares the attempt): %s",
                len(left),
                failure,
            )
            waves += [left[len(left) // 2 :], left[: len(left) // 2]]

    @torch.inference_mode()
    def _sample_wave(self, model: PreTrainedModel, wave: Sequence[_Request]) -> None:
        contexts = [request.prompt_ids + request.token_ids for request in wave]
        width = max(map(len, contexts), default=0)
        ids = torch.zeros(len(wave), width, dtype=torch.int64, device=self._device)
        mask = torch.zeros_like(ids)
        for row, context in enumerate(contexts):
            ids[row, width - len(context) :] = torch.tensor(context, device=self._device)
            mask[row, width - len(context) :] = 1
        running = list(range(len(wave)))
        positions = (mask.cumsum(1) - 1).clamp_(min=0)
        cache, seen = dict[str, Any](), None
        if self._sight is not None:
            positions = torch.zeros(3, *ids.shape, dtype=torch.int64, device=self._device)
            for row, (request, context) in enumerate(zip(wave, contexts, strict=True)):
                found = self._sight.positions(np.array(context), request.pictures)
                positions[:, row, width - len(context) :] = torch.from_numpy(found.T).to(self._device)
            shows_at = [(each.pictures, width - len(context)) for each, context in zip(wave, contexts, strict=True)]
            seen = self._sight.padded(shows_at, width, self._device)
        # Without padding a mask says nothing, and Mamba, when it samples, is wrong with one. Positions are told to
        # whatever takes them: Bamba and MiniMax count them by the cache of their first layer, which counts none.
        takes_mask = self.setup.model.packs_rows
        takes_positions = takes_mask or "position_ids" in signature(model.forward).parameters
        while running := [row for row in running if not self._is_over(wave[row])]:
            with ExitStack() as stack:
                routing = None if self._experts is None else stack.enter_context(self._experts.recording())
                shows = {} if seen is None else stack.enter_context(shown(backbone_of(model), seen))[0]
                told = {"position_ids": positions} if takes_positions else {}
                told |= {"attention_mask": mask} if takes_mask else {}
                result = model(input_ids=ids, use_cache=True, **told, **cache, **shows)
            seen = None  # the cache has it
            if routing is not None and self._experts is not None:
                of_rows = routing.stacked(self._experts.dtype).unflatten(0, ids.shape).cpu().numpy()
                for row in running:
                    if not cache:  # what an earlier wave had is computed again
                        wave[row].routed = [of_rows[row, width - len(contexts[row]) :]]
                    else:
                        wave[row].routed.append(of_rows[row])
            cache = {name: result[name] for name in _CACHES if result.get(name) is not None}
            logits = result.logits[:, -1].float()
            next_ids = torch.zeros(len(wave), 1, dtype=torch.int64)
            for row in running:
                request = wave[row]
                token, log_prob = draw(logits[row].cpu(), request.sampling, request.generator)
                request.add(token, log_prob)
                next_ids[row] = token
            # A few families keep nothing that they hand out: all of the row runs again.
            ids = next_ids.to(self._device) if cache else torch.cat([ids, next_ids.to(self._device)], dim=1)
            mask = torch.cat([mask, torch.ones_like(ids[:, -1:])], dim=1)
            following = positions[..., -1:] + 1
            positions = following if cache else torch.cat([positions, following], dim=-1)

    def _is_over(self, request: _Request) -> bool:
        """Whether nothing more is sampled of a request; says so to whoever waits for it."""
        tokens = request.token_ids
        is_whole = (bool(tokens) and tokens[-1] in self._stop_token_ids) or len(tokens) >= request.sampling.max_tokens
        if is_whole:
            request.end()
        return is_whole or request.done.done()

    async def _in_thread(self, function, *args):  # type: ignore[no-untyped-def]
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _running(self, part: T | None) -> T:
        if part is None:
            raise EngineDeadError("the transformers engine is not running")
        return part


def _by_length(batch: Sequence[_Request]) -> list[Sequence[_Request]]:
    """Return the requests in waves, each of contexts of one length."""
    waves: dict[int, list[_Request]] = {}
    for request in batch:
        waves.setdefault(len(request.prompt_ids) + len(request.token_ids), []).append(request)
    return [*waves.values()]


def _fail(requests: Sequence[_Request], error: BaseException) -> None:
    for request in requests:
        _settle(request.done, error)


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _could_not(error: Exception) -> RolloutError:
    failure = RolloutError(f"the transformers engine could not sample: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def is_out_of_memory(error: Exception) -> bool:
    """Whether there was not enough memory, of a device or of the machine."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def draw(logits: Tensor, sampling: SamplingParams, generator: torch.Generator) -> tuple[int, float]:
    """Draw one token from logits `(V,)`; return it with its log-prob under the distribution it was drawn from."""
    if sampling.temperature == 0.0:
        log_probs = logits.log_softmax(-1)
        token = int(log_probs.argmax())
        return token, float(log_probs[token])
    log_probs = truncate((logits / sampling.temperature).log_softmax(-1), sampling.top_k, sampling.top_p)
    # Exponential race: with E ~ Exp(1), argmax(log p - log E) is distributed as p.
    noise = torch.empty_like(log_probs).exponential_(generator=generator)
    token = int((log_probs - noise.log()).argmax())
    return token, float(log_probs[token])


def truncate(log_probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return log-probs `(V,)` after top-k and top-p, normalised again; what is cut off becomes -inf.

    The nucleus is the smallest set of most likely tokens whose probability reaches `top_p`.
    """
    keep = torch.ones_like(log_probs, dtype=torch.bool)
    if 0 < top_k < log_probs.numel():
        keep &= log_probs >= log_probs.topk(top_k).values[-1]
    if top_p < 1.0:
        kept = log_probs.masked_fill(~keep, -torch.inf).log_softmax(-1)
        ordered, order = kept.sort(descending=True)
        before = ordered.exp().cumsum(0) - ordered.exp()
        keep[order[before >= top_p]] = False
    if bool(keep.all()):
        return log_probs
    return log_probs.masked_fill(~keep, -torch.inf).log_softmax(-1)
