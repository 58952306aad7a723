"""Where the tokens of a mixture of experts choose their experts: recorded, replayed, and measured.

transformers writes every mixture as a block with a router and a module `experts`, and the block picks experts by one
call of `torch.topk` on the router's scores, a number for each token and expert. What comes before that call and after
it is the family's own: softmax or sigmoid, groups of experts, a bias, a normalisation of the weights. So the choice is
followed in that call, inside the block's forward, and nothing of a family is written here.

To replay a choice is to answer the call with given experts and with their scores: logits and scores are still
computed, with gradients, and the family makes of the scores what it makes of those of its own choice (Ma et al. 2025,
"Stabilizing MoE reinforcement learning by aligning training and inference routers", https://arxiv.org/abs/2510.11370).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hrl.errors import HrlError
from hrl.routing import routing_dtype

#: The product of experts that has no loop in Python: torch's grouped product.
GROUPED = "grouped_mm"
_LOOP = "eager"
_TOPK = (torch.topk, Tensor.topk)


class RoutingError(HrlError, RuntimeError):
    """Experts can't be recorded or replayed; the message says of which model, and why."""


@dataclass(frozen=True)
class PackedRouting:
    """What is known, of the tokens of a packed row, to whoever follows which experts they go to.

    Attributes:
        num_rows: `(T,)` float32, of how many rows each token is one.
        paths: By row of the micro-batch, where its tokens lie in the packed row; None for a row that does not run.
        replayed: `(T, L, K)`, experts to choose, or `missing` for all K; None where all tokens choose by themselves.
        has_missing: Whether any is missing.
        is_known: Whether none is missing of a token that is part of a row.
    """

    num_rows: Tensor
    paths: tuple[np.ndarray | None, ...]
    replayed: Tensor | None
    has_missing: bool
    is_known: bool


@dataclass(frozen=True)
class ExpertLayer:
    """A layer in which tokens choose experts.

    Attributes:
        name: Of the block in the model.
        block: Router and experts.
        num_experts: E, of those among which a token chooses.
        router: The module whose output has the router's logits, as the family says; None where it doesn't.
        logits_index: Where in that output.
    """

    name: str
    block: nn.Module
    num_experts: int
    router: nn.Module | None
    logits_index: int


@dataclass
class Chosen:
    """What a layer did in one forward.

    Attributes:
        experts: `(T, K)` int64, that each token went to.
        own: `(T, K)` int64, that each token would have gone to by itself; None where nothing was replayed.
        logits: `(T, E)`, the router's, with gradient where there is one; None where the family doesn't say.
    """

    experts: Tensor | None = None
    own: Tensor | None = None
    logits: Tensor | None = None


@dataclass
class RoutingPass:
    """One forward through the layers with experts, and the computations of it again for its backward.

    Attributes:
        replayed: `(T, L, K)`, experts to choose, or `missing` for all K of a token; None for the model's own.
        has_missing: Whether any is missing.
        chosen: Of each layer.
    """

    num_layers: int
    replayed: Tensor | None = None
    has_missing: bool = True
    chosen: list[Chosen] = field(init=False)

    def __post_init__(self) -> None:
        self.chosen = [Chosen() for _ in range(self.num_layers)]

    def choose(self, layer: int, name: str, scores: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        """Answer a layer's `torch.topk` of scores `(T, E)`.

        Raises:
            RoutingError: What is to be replayed has another number of tokens or of experts for each.
        """
        chosen = self.chosen[layer]
        is_first = chosen.experts is None  # else an activation is computed again, by the same operations
        if self.replayed is None:
            result = torch.topk(scores, k, *args, **kwargs)
            if is_first:
                chosen.experts = result[1].detach()
            return result
        given = self.replayed[:, layer]
        if given.shape != (scores.shape[0], k):
            raise RoutingError(
                f"{name}: {scores.shape[0]} tokens choose {k} experts each, and a choice of {tuple(given.shape)} is to "
                "be replayed: the sampler's model has another number of experts for each token, or of layers"
            )
        with torch.no_grad():
            own = torch.topk(scores, k, *args, **kwargs)[1]
            experts = given.long()
            if self.has_missing:
                experts = torch.where(given == torch.iinfo(given.dtype).max, own, experts)
        if is_first:
            chosen.experts, chosen.own = experts, own
        return torch.return_types.topk((scores.gather(-1, experts), experts))

    def is_replayed(self, layer: int) -> Tensor:
        """Return `(T,)` bool, the tokens whose choice in a layer was replayed; only where something is."""
        assert self.replayed is not None, "something is replayed"
        return self.replayed[:, layer, 0] != torch.iinfo(self.replayed.dtype).max

    def stacked(self, dtype: np.dtype[Any]) -> Tensor:
        """Return what all layers chose, `(T, L, K)` on the device.

        Raises:
            RoutingError: A layer did not choose by `torch.topk`.
        """
        found = [chosen.experts for chosen in self.chosen]
        if any(experts is None for experts in found):
            raise RoutingError(
                f"layer {found.index(None)} of those with experts does not choose them by one torch.topk of its "
                "router's scores, so its choice can't be recorded or replayed"
            )
        return torch.stack(found, 1).to(torch.from_numpy(np.zeros(0, dtype)).dtype)


class ExpertLayers:
    """The layers of a model in which tokens choose experts, in their order.

    Args:
        layers: All of them; none in a dense model.
        is_balanced_by_loss: Whether the family has a loss that balances the load of experts.

    Attributes:
        layers, is_balanced_by_loss: As given.
        current: The pass that forwards belong to; None lets the model alone.
    """

    def __init__(self, layers: Sequence[ExpertLayer], *, is_balanced_by_loss: bool = False) -> None:
        self.layers = tuple(layers)
        self.is_balanced_by_loss = is_balanced_by_loss
        self.current: RoutingPass | None = None
        self._hooks: list[RemovableHandle] = []
        for index, layer in enumerate(self.layers):
            self._follow(index, layer)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def num_experts(self) -> int:
        """E; of the layer with most."""
        return max((layer.num_experts for layer in self.layers), default=0)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of recorded choices."""
        return routing_dtype(self.num_experts)

    def require_some(self) -> None:
        """Refuse a model none of whose layers have experts that can be followed.

        Raises:
            RoutingError: It has none.
        """
        if not self.layers:
            raise RoutingError(
                "this model has no layer whose experts can be recorded or replayed: set actor.router_replay.mode="
                "disabled, or take a mixture of experts (docs/experts.md says which)"
            )

    def follow(self, routing: PackedRouting | None) -> RoutingPass | None:
        """Let the next forward, and what is computed again for its backward, belong to a new pass, which is returned.

        Args:
            routing: Of the micro-batch that comes; None lets the model alone.
        """
        known = None if routing is None or not self.layers else routing
        self.current = None if known is None else RoutingPass(len(self.layers), known.replayed, known.has_missing)
        return self.current

    def require_balance(self) -> None:
        """Refuse a model that has no loss for the load of its experts.

        Raises:
            RoutingError: It has no experts, or its family balances them in another way.
        """
        if not self.is_balanced_by_loss or any(layer.router is None for layer in self.layers) or not self.layers:
            what = "has no experts" if not self.layers else "is of a family that is not balanced by an auxiliary loss"
            raise RoutingError(f"router_aux_loss_coef is set, and this model {what}: set it to 0")

    @contextmanager
    def recording(self) -> Iterator[RoutingPass]:
        """Follow a forward inside the block, of whatever shape, in which tokens choose by themselves."""
        self.current = RoutingPass(len(self.layers))
        try:
            yield self.current
        finally:
            self.current = None

    @contextmanager
    def following(self, routing: PackedRouting | None) -> Iterator[RoutingPass | None]:
        """Follow a forward inside the block, see `follow`."""
        try:
            yield self.follow(routing)
        finally:
            self.current = None

    def _follow(self, index: int, layer: ExpertLayer) -> None:
        own_forward = layer.block.forward

        def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            routing = self.current
            if routing is None:
                return own_forward(*args, **kwargs)
            with _Answered(layer.num_experts, routing, index, layer.name):
                return own_forward(*args, **kwargs)

        layer.block.forward = MethodType(forward, layer.block)
        if layer.router is not None:
            self._hooks.append(layer.router.register_forward_hook(_takes_logits(self, index, layer.logits_index)))


def _takes_logits(layers: ExpertLayers, index: int, place: int) -> Callable[..., None]:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        if layers.current is None:
            return
        chosen = layers.current.chosen[index]
        if chosen.logits is None:  # those of a layer that is computed again would keep its graph
            chosen.logits = (output[place] if isinstance(output, tuple) else output).flatten(0, -2)

    return hook


class _Answered(TorchFunctionMode):
    """Inside of it, a layer's choice of experts is a pass's to answer."""

    def __init__(self, num_experts: int, routing: RoutingPass, index: int, name: str) -> None:
        super().__init__()
        self._num_experts, self._routing, self._index, self._name = num_experts, routing, index, name
        self._num_choices = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Scores of groups, among which some families choose first, have other shapes.
        if function in _TOPK and args and args[0].ndim == 2 and args[0].shape[-1] == self._num_experts:
            self._num_choices += 1
            if self._num_choices > 1:
                raise RoutingError(f"{self._name} chooses among its experts more than once, which can't be followed")
            return self._routing.choose(self._index, self._name, *args, **kwargs)
        return function(*args, **kwargs)


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """Return the layers of a transformers model whose blocks have a router and `experts`, in their order."""
    names = {id(module): name for name, module in model.named_modules()}
    recorders = _logit_recorders(model)
    found = []
    for module in model.modules():
        experts = getattr(module, "experts", None)
        num_experts = getattr(experts, "num_experts", None)
        # What transformers' `use_experts_implementation` has decorated takes tokens, their experts and their weights.
        if not isinstance(experts, nn.Module) or not hasattr(experts, "_is_expert_parallel") or num_experts is None:
            continue
        router, place = _router(module, recorders)
        found.append(ExpertLayer(names[id(module)], module, num_experts, router, place))
    return found


def _logit_recorders(model: nn.Module) -> list[Any]:
    """Return what the model's classes say of where their routers' logits are."""
    found: list[Any] = []
    for module in model.modules():
        declared = getattr(module, "_can_record_outputs", None)
        if isinstance(module, PreTrainedModel) and declared and "router_logits" in declared:
            entry = declared["router_logits"]
            found += entry if isinstance(entry, list) else [entry]
    return found


def _router(block: nn.Module, recorders: Sequence[Any]) -> tuple[nn.Module | None, int]:
    for recorder in recorders:
        for name, module in block.named_modules():
            wanted = getattr(recorder, "layer_name", None)
            if type(module) is recorder.target_class and (wanted is None or wanted.rpartition(".")[2] in name):
                return module, recorder.index
    return None, 0


def follow_experts(model: PreTrainedModel) -> ExpertLayers:
    """Let the choices of a model's tokens be followed; to be called once, before layers are set to be recomputed."""
    # transformers gives those families the function that have the loss.
    has_loss = any(
        hasattr(sys.modules[type(part).__module__], "load_balancing_loss_func")
        for part in model.modules()
        if isinstance(part, PreTrainedModel)
    )
    followed = ExpertLayers(expert_layers(model), is_balanced_by_loss=has_loss)
    model.hrl_experts = followed
    return followed


def followed_experts(module: nn.Module) -> ExpertLayers:
    """Return what `follow_experts` has made of a model, or of one that a module wraps; no layers where it has not."""
    found = (getattr(part, "hrl_experts", None) for part in module.modules())
    return next((layers for layers in found if layers is not None), ExpertLayers(()))


def use_grouped_products(model: PreTrainedModel) -> None:
    """Let experts multiply by torch's grouped product, which is quickest on a CPU too.

    In float64, which it lacks, they are a loop.
    """
    if expert_layers(model):
        model.set_experts_implementation(_LOOP if model.dtype == torch.float64 else GROUPED)
