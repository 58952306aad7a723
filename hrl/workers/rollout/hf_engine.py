"""transformers as a rollout engine: slow, simple, and close enough to the trainer to check another engine against.

Requests that wait together are sampled together, in one left-padded batch with a key-value cache. Every sample has its
own generator, so its tokens do not depend on its neighbours (up to the rounding of matrix products of another shape).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hrl.models.checkpoint_form import CheckpointForm, saved_tensors
from hrl.models.hf_config import load_config
from hrl.models.ops.rope import fix_rope_frequencies
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import (
    EngineDeadError,
    EngineSetup,
    OnTokens,
    RolloutEngine,
    RolloutError,
    SampleOutput,
    told_on,
)
from hrl.workers.weight_sync.receiver import WeightReceiver
from hrl.workers.weight_sync.wire import Manifest, ReceiverReport, WeightSyncError

T = TypeVar("T")


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


@dataclass
class _Request:
    prompt_ids: list[int]
    sampling: SamplingParams
    done: asyncio.Future[tuple[list[int], list[float]]]
    tell: OnTokens | None


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
        self._thread = ThreadPoolExecutor(1, "hf-engine")
        self._waiting: list[_Request] = []
        self._batch: list[_Request] = []
        self._runner: asyncio.Task[None] | None = None

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
        self, prompt_ids: list[int], sampling: SamplingParams, request_id: str, on_tokens: OnTokens | None
    ) -> SampleOutput:
        self._running(self._model)
        loop = asyncio.get_running_loop()
        request = _Request(prompt_ids, sampling, loop.create_future(), told_on(loop, on_tokens))
        self._waiting.append(request)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run_waiting())
            self._runner.add_done_callback(self._fail_what_is_open)
        tokens, log_probs = await request.done
        stopped = bool(tokens) and tokens[-1] in self._stop_token_ids
        return SampleOutput(tokens, log_probs, "stop" if stopped else "length", self.policy_version)

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
        model = AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=getattr(torch, self.setup.config.dtype),
            trust_remote_code=source.trust_remote_code,
            config=load_config(source.path, source.override_config, trust_remote_code=source.trust_remote_code),
        )
        fix_rope_frequencies(model, source.max_model_len)
        return model.to(self._device).eval()

    async def _run_waiting(self) -> None:
        await asyncio.sleep(0)  # let the other requests of the wave arrive
        while waiting := [request for request in self._waiting if not request.done.cancelled()]:
            self._batch, self._waiting = waiting[: self._max_num_seqs], waiting[self._max_num_seqs :]
            try:
                outputs = await self._in_thread(self._sample, self._running(self._model), self._batch)
            except RolloutError:
                raise
            except (RuntimeError, ValueError) as error:  # these requests can't be sampled; others perhaps can
                failure = RolloutError(f"the transformers engine could not sample: {type(error).__name__}: {error}")
                failure.__cause__ = error
                _fail(self._batch, failure)
                continue
            for request, output in zip(self._batch, outputs, strict=True):
                if not request.done.done():
                    request.done.set_result(output)

    def _fail_what_is_open(self, runner: asyncio.Task[None]) -> None:
        """Fail the open requests of a runner that has ended early, for whatever reason; nobody else would."""
        error = EngineDeadError("the transformers engine was shut down") if runner.cancelled() else runner.exception()
        if error is not None:
            _fail([*self._batch, *self._waiting], error)
            self._waiting = []

    @torch.inference_mode()
    def _sample(self, model: PreTrainedModel, batch: Sequence[_Request]) -> list[tuple[list[int], list[float]]]:
        width = max(len(request.prompt_ids) for request in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64, device=self._device)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids, device=self._device)
            mask[row, width - len(request.prompt_ids) :] = 1
        generators = [torch.Generator().manual_seed(request.sampling.seed) for request in batch]
        outputs: list[tuple[list[int], list[float]]] = [([], []) for _ in batch]
        running = [request.sampling.max_tokens > 0 for request in batch]
        positions = (mask.cumsum(1) - 1).clamp_(min=0)
        cache = None
        while any(running):
            result = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache = result.past_key_values
            logits = result.logits[:, -1].float()
            next_ids = torch.zeros(len(batch), 1, dtype=torch.int64)
            for row, request in enumerate(batch):
                running[row] = running[row] and not request.done.cancelled()
                if not running[row]:
                    continue
                token, log_prob = draw(logits[row].cpu(), request.sampling, generators[row])
                next_ids[row] = token
                outputs[row][0].append(token)
                outputs[row][1].append(log_prob)
                if request.tell is not None:
                    request.tell([token], [log_prob])
                stopped = token in self._stop_token_ids
                running[row] = not stopped and len(outputs[row][0]) < request.sampling.max_tokens
            ids = next_ids.to(self._device)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            positions = positions[:, -1:] + 1
        return outputs

    async def _in_thread(self, function, *args):  # type: ignore[no-untyped-def]
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _running(self, part: T | None) -> T:
        if part is None:
            raise EngineDeadError("the transformers engine is not running")
        return part


def _fail(requests: Sequence[_Request], error: BaseException) -> None:
    for request in requests:
        if not request.done.done():
            request.done.set_exception(error)


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
