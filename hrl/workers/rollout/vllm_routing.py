"""Which experts vLLM's tokens went to, where vLLM itself does not return them: on a CPU.

On a GPU vLLM does (`enable_return_routed_experts`), with its second model runner, which needs Triton. On a CPU its
first runner runs, for which that option is refused. The routers have the same hook there; what vLLM's connector adds to
it, from tokens of an iteration to those of a request, is done here.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hrl.errors import HrlError
from hrl.routing import missing, routing_dtype

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class NoRoutingError(HrlError, RuntimeError):
    """The engine's model has no routers whose choices could be recorded."""


def routed_layers(model: nn.Module) -> list[int]:
    """Return the numbers of the layers that have experts, as vLLM counts layers."""
    return [runner.layer_id for runner in _runners(model)]


def _runners(model: nn.Module) -> list[Any]:
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    found: list[Any] = [module for module in model.modules() if isinstance(module, MoERunner)]
    return sorted(found, key=lambda runner: runner.layer_id)


class RoutingRecorder:
    """Keeps the choices of every request that the engine runs, until they are taken.

    Args:
        model_runner: vLLM's first one.

    Raises:
        NoRoutingError: Its model has no experts, or routers that can't be listened to.
    """

    def __init__(self, model_runner: Any) -> None:
        runners = _runners(model_runner.get_model())
        if not runners:
            raise NoRoutingError("rollout.enable_rollout_routing_replay: the engine's model has no layer with experts")
        self._runner = model_runner
        self._step: list[Tensor | None] = [None] * len(runners)
        # Of each request: where pieces of its sequence begin, and their choices.
        self._kept: dict[str, list[tuple[int, np.ndarray]]] = {}
        for layer, runner in enumerate(runners):
            listen = getattr(runner.router, "set_capture_fn", None)
            if listen is None:
                raise NoRoutingError(
                    f"rollout.enable_rollout_routing_replay: {type(runner.router).__name__} of layer {runner.layer_id} "
                    "does not tell which experts it chooses"
                )
            listen(functools.partial(self._heard, layer))
        self._dtype = routing_dtype(max(runner.router.global_num_experts for runner in runners))
        own_execute = model_runner.execute_model

        @functools.wraps(own_execute)
        def execute(scheduled: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
            result = own_execute(scheduled, *args, **kwargs)
            if scheduled.total_num_scheduled_tokens:
                self._keep(scheduled)
            return result

        model_runner.execute_model = execute

    def _heard(self, layer: int, experts: Tensor) -> None:
        self._step[layer] = experts

    def _keep(self, scheduled: SchedulerOutput) -> None:
        """Give the iteration's choices, token by token, to the requests that were run."""
        heard = [experts for experts in self._step if experts is not None]
        if len(heard) != len(self._step):  # an iteration without a forward
            return
        self._step = [None] * len(heard)
        chosen = torch.stack(heard, 1).cpu().numpy().astype(self._dtype)  # (tokens, L, K)
        begins = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        others = scheduled.scheduled_cached_reqs
        begins |= dict(zip(others.req_ids, others.num_computed_tokens, strict=True))
        end = 0
        for request in self._runner.input_batch.req_ids:
            count = scheduled.num_scheduled_tokens.get(request, 0)
            if count:
                self._kept.setdefault(request, []).append((begins[request], chosen[end : end + count]))
                end += count

    def take(self, request: str) -> np.ndarray | None:
        """Return the choices `(tokens, L, K)` of a request, and forget them; None if it never ran.

        Tokens that were found in the cache have `missing` ones.

        Args:
            request: Its name, as it was given to vLLM, which may put something behind it.
        """
        own = next((name for name in self._kept if name == request or name.rpartition("-")[0] == request), None)
        pieces = [] if own is None else self._kept.pop(own)
        if not pieces:
            return None
        length = max(begin + len(piece) for begin, piece in pieces)
        routed = np.full((length, *pieces[0][1].shape[1:]), missing(self._dtype), self._dtype)
        for begin, piece in pieces:  # what was computed again after a preemption comes last
            routed[begin : begin + len(piece)] = piece
        return routed

    def forget(self) -> None:
        """Drop what nobody has taken: requests that were aborted."""
        self._kept.clear()
