"""Check on two processes that a model family computes the same whatever its layout.

`hrl.models.probe` compares a small cut of a model, packed, with the model's own forward. Here the same cut lies on two
ranks, as an engine lays out the whole model, and is compared with itself on one: log-probs of the same rows, and the
gradients of all parameters. What a family does between its layers decides whether it can be laid out, and no list of
names could say that. Both ranks compute on the CPU, in float32, over gloo; after the start of the processes this takes
a second or two.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from hrl.config.model import FsdpConfig
from hrl.errors import HrlError
from hrl.models.adapter import (
    AdapterSource,
    adapted_layers,
    add_adapter,
    is_part,
    merged,
    name_without,
    parts_of,
    scaling_of,
)
from hrl.models.cut import UNREACHED_TOKENS
from hrl.models.hf_config import load_config
from hrl.models.loading import OWN_ATTENTION, Loaded, prepare
from hrl.models.ops.attention import ATTENTION_NAME
from hrl.models.ops.exchange import SequenceGroup
from hrl.models.probe import (
    FAILURES,
    MOST_ROUNDING,
    Family,
    first_line,
    first_that_runs,
    gradient_difference,
    gradient_tolerance_of,
    gradients_of,
    largest,
    packed_copy,
    plain_values,
    probe_rows,
    tolerance_of,
    unnoticed,
    values_of_rows,
)
from hrl.models.tensor_parallel import UnevenError
from hrl.workers.engine.sharding import build_mesh, build_sequence_group, build_sharded, build_weight_mesh

logger = logging.getLogger(__name__)

#: How a model lies on two processes: FSDP2's shards alone, a sequence group, a tensor group, an expert group, and
#: shards with an adapter on all linear layers.
Layout = Literal["shards", "sequence", "tensor", "experts", "adapter"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
NUM_RANKS = 2
ADAPTER = AdapterSource(2, 4, "all-linear", None, use_rslora=False, path=None, seed=0, merge=False)
#: For one collective, which both ranks reach within moments of each other unless one of them has failed.
COLLECTIVE_TIMEOUT_S = 60.0

_CPU = torch.device("cpu")
_KEYS: Mapping[Layout, str] = {
    "sequence": "ulysses_sequence_parallel_size",
    "tensor": "tensor_parallel_size",
    "experts": "expert_parallel_size",
}


@dataclass(frozen=True)
class LayoutResult:
    """How much two ranks differ from one.

    Attributes:
        difference: Largest difference of a log-prob, or of a score; infinite where there is none to compare.
        gradient_difference: Largest relative difference of a parameter's gradient; 0 if the log-probs differ already.
        refused: Why hrl does not lay the model out so; empty where it does.
        wrong: What differs, or how it fails, where it is laid out so; empty where all is equal.
        is_uneven: It is refused because of what two ranks can't share, which says nothing of other numbers of them.
    """

    difference: float
    gradient_difference: float
    refused: str = ""
    wrong: str = ""
    is_uneven: bool = False

    @property
    def is_right(self) -> bool:
        """Whether the differences are only rounding."""
        return not self.refused and not self.wrong


@dataclass(frozen=True)
class LayoutRequest:
    """Which model is compared in which layouts, as plain data.

    Attributes:
        path: Folder of the model's config.
        override_config: Fields of it to replace.
        trust_remote_code: The folder may run code.
        max_model_len: The longest sequence of the run in tokens.
        scalar: Whether it is a critic or reward model.
        layouts: To be compared.
        packs_rows: Whether rows are packed, or padded.
    """

    path: str
    override_config: Mapping[str, Any]
    trust_remote_code: bool
    max_model_len: int
    scalar: bool
    layouts: Sequence[Layout]
    packs_rows: bool = True

    @property
    def family(self) -> Family:
        """How cuts of the model are built."""
        auto = AutoModelForSequenceClassification if self.scalar else AutoModelForCausalLM
        return Family(auto, self.max_model_len, self.trust_remote_code)

    def config(self) -> PretrainedConfig:
        """Return the model's configuration."""
        return load_config(self.path, self.override_config, trust_remote_code=self.trust_remote_code)

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "layouts": list(self.layouts)}


def compare_layouts(rank: int, request: LayoutRequest, store: Path) -> dict[Layout, LayoutResult]:
    """Compare a model on this rank, while the other does the same.

    Args:
        rank: 0 or 1.
        request: What is compared.
        store: A folder for nothing else, of both ranks.

    Returns:
        Layout → what was found. Both ranks find the same, unless one fails.

    Raises:
        ProbeError: No cut of the model runs alone.
    """
    torch.set_num_threads(1)
    found: dict[Layout, LayoutResult] = {}
    with unnoticed():
        cuts_of = _Cuts(request)
        for layout in request.layouts:
            # A group of its own for each: after a failure of one rank the other is somewhere else.
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store / layout}",
                rank=rank,
                world_size=NUM_RANKS,
                timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
            try:
                found[layout] = _compare(cuts_of, layout, ADAPTER, num_ranks=NUM_RANKS)
            finally:
                dist.destroy_process_group()
    return found


def compare_adapter(request: LayoutRequest, adapter: AdapterSource) -> LayoutResult:
    """Compare a model that has an adapter with the same model to whose weights it was added, in this process alone.

    Args:
        request: What is compared, but for its layouts.
        adapter: Of which only the names of layers count.

    Raises:
        ProbeError: No cut of the model runs alone.
        AdapterError: The adapter's folder can't be read.
    """
    config = adapter.config()
    targets, excluded = (
        names if names is None or isinstance(names, str) else tuple(sorted(names))
        for names in (config.target_modules, config.exclude_modules)
    )
    tried = replace(
        adapter,
        rank=ADAPTER.rank,
        alpha=ADAPTER.alpha,
        target_modules=targets or (),
        exclude_modules=excluded,
        path=None,
    )
    with unnoticed():
        return _compare(_Cuts(request), "adapter", tried, num_ranks=1)


class _Cuts:
    """A small cut of a model, in each dtype in which it is wanted."""

    def __init__(self, request: LayoutRequest) -> None:
        self._request = request
        self.packs_rows = request.packs_rows
        self._of: dict[torch.dtype, tuple[Family, PretrainedConfig, PreTrainedModel]] = {}
        self.of(torch.float32)

    def of(self, dtype: torch.dtype) -> tuple[Family, PretrainedConfig, PreTrainedModel]:
        """Return how it was built, its configuration, and the model."""
        if dtype not in self._of:
            torch.manual_seed(0)  # both ranks have the same weights, whatever each has drawn before
            family = replace(self._request.family, dtype=dtype)
            self._of[dtype] = (family, *first_that_runs(self._request.config(), family))
        return self._of[dtype]


def _compare(cuts_of: _Cuts, layout: Layout, adapter: AdapterSource, *, num_ranks: int) -> LayoutResult:
    packs_rows = cuts_of.packs_rows
    if layout == "sequence" and not packs_rows:
        return LayoutResult(torch.inf, 0.0, refused="its rows are padded, not packed, and a row can't be cut")
    try:
        found = _Comparison(*cuts_of.of(torch.float32), layout, adapter, num_ranks, packs_rows).result()
        if found.wrong and found.difference < MOST_ROUNDING:  # rounding, in a model that amplifies it, or not
            found = _Comparison(*cuts_of.of(torch.float64), layout, adapter, num_ranks, packs_rows).result()
    except UnevenError as error:
        return LayoutResult(torch.inf, 0.0, refused=str(error), is_uneven=True)
    except HrlError as error:
        return LayoutResult(torch.inf, 0.0, refused=str(error))
    except (*FAILURES, NotImplementedError) as error:
        logger.debug("%s fails", layout, exc_info=True)
        why = "its code reads a weight that is cut, outside of the module that computes with it: " * (
            "DTensor" in str(error)
        )
        return LayoutResult(torch.inf, 0.0, wrong=f"it fails ({why}{first_line(error)})")
    return found


class _Comparison:
    """One cut in one layout: on both ranks of the world, or on one, whatever world that is in."""

    def __init__(
        self,
        family: Family,
        cut: PretrainedConfig,
        own: PreTrainedModel,
        layout: Layout,
        adapter: AdapterSource,
        num_ranks: int,
        packs_rows: bool,
    ) -> None:
        self.packs_rows = packs_rows
        self.cut, self.own, self.family, self.layout = cut, own, family, layout
        self.num_ranks = num_ranks
        self.adapter = adapter if layout == "adapter" else None
        self.rows = probe_rows(cut)
        self.every = tuple(range(len(self.rows.prompts)))

    def result(self) -> LayoutResult:
        """Return the differences, of both ranks."""
        wanted, gradients, weights = self._on_one()
        values, found, picked = self._on_two(weights) if self.num_ranks > 1 else self._alone(weights)
        difference = self._of_all(largest(values - wanted[list(picked)]))
        tolerance = tolerance_of(difference, self.own, self.cut, self.family, self.rows, self._plain())
        if not difference <= tolerance:
            return LayoutResult(difference, 0.0, wrong="its log-probs are not those of one process")
        apart = self._of_all(gradient_difference(found, gradients))
        wrong = ""
        if not apart <= gradient_tolerance_of(tolerance):
            wrong = f"its log-probs agree and its gradients do not ({_worst(found, gradients)})"
        return LayoutResult(difference, apart, wrong=wrong)

    def _of_all(self, number: float) -> float:
        """Return the largest of the ranks' numbers."""
        if self.num_ranks == 1:
            return number
        found = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)

    def _plain(self) -> Tensor:
        with torch.no_grad():
            return plain_values(self.own, self.rows, self.family.is_scalar)

    def _values(self, module: nn.Module, picked: tuple[int, ...], group: SequenceGroup | None = None) -> Tensor:
        return values_of_rows(
            module,
            self.rows,
            picked,
            scalar=self.family.is_scalar,
            share_prefix=True,
            group=group,
            packs_rows=self.packs_rows,
        )

    def _on_one(self) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return values `(B, R)`, gradients by name, and what the values weigh in the loss."""
        weights_of = partial(torch.randn, generator=torch.Generator().manual_seed(0))
        if self.adapter is not None:
            return self._merged(weights_of)
        model = packed_copy(self.cut, self.own, self.family, packs_rows=self.packs_rows)
        module = self.family.wrap(model)
        values = self._values(module, self.every)
        weights = weights_of(values.shape)
        return values.detach(), gradients_of(model, values, weights), weights

    def _merged(self, weights_of: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return the same of the model with the adapter added to it, by its own forward, without any adapter."""
        beside = packed_copy(self.cut, self.own, self.family, packs_rows=self.packs_rows)
        self._adapt(beside)
        parameters, layers = dict(beside.named_parameters()), adapted_layers(beside)
        plain = deepcopy(self.own)
        plain.zero_grad()
        own_parameters = dict(plain.named_parameters())
        pairs = {name: parts for name in parameters if (parts := parts_of(name)) is not None}
        scales = {name: scaling_of(layers[name.removesuffix(".base_layer.weight")]) for name in pairs}
        with torch.no_grad():
            for name, (a, b) in pairs.items():
                weight = own_parameters[name_without(name)]
                weight.copy_(merged(weight, parameters[a], parameters[b], scales[name], weight.dtype))
        values = plain_values(plain, self.rows, self.family.is_scalar)
        weights = weights_of(values.shape)
        of_whole = gradients_of(plain, values, weights)
        trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        gradients = {name: gradient for name, gradient in of_whole.items() if name in trained}
        for name, (a, b) in pairs.items():
            grad = of_whole.get(name_without(name))
            if grad is not None:  # W + s B A: by the chain rule
                gradients[a] = scales[name] * parameters[b].detach().T @ grad
                gradients[b] = scales[name] * grad @ parameters[a].detach().T
        return values.detach(), gradients, weights

    def _adapt(self, model: PreTrainedModel) -> None:
        """Put the adapter in, with a `B` that changes something."""
        assert self.adapter is not None, "the layout has an adapter"
        add_adapter(model, self.adapter, self.family.dtype)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if is_part(name) and not parameter.is_meta:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(0.3 * parameter.shape[-1] ** -0.5 * drawn)

    def _alone(self, weights: Tensor) -> tuple[Tensor, dict[str, Tensor], tuple[int, ...]]:
        """Return values of all rows, gradients, and which rows these are, of a model with its adapter beside it."""
        model = packed_copy(self.cut, self.own, self.family, packs_rows=self.packs_rows)
        self._adapt(model)
        module = self.family.wrap(model)
        values = self._values(module, self.every)
        return values.detach(), gradients_of(model, values, weights), self.every

    def _on_two(self, weights: Tensor) -> tuple[Tensor, dict[str, Tensor], tuple[int, ...]]:
        """Return what both ranks compute of the same: values of the rows, gradients, and which rows these are."""

        def load(meta: bool) -> Loaded:
            if meta:
                with torch.device("meta"):
                    model = self.family.build(self.cut, ATTENTION_NAME if self.packs_rows else OWN_ATTENTION)
                prepare(model, max_model_len=UNREACHED_TOKENS, recompute=True)
            else:
                model = packed_copy(self.cut, self.own, self.family, packs_rows=self.packs_rows)
            model._weight_conversions = None  # no files were read
            return Loaded(model, self.cut)

        key, dtype = _KEYS.get(self.layout), str(self.family.dtype).removeprefix("torch.")
        fsdp = FsdpConfig().model_copy(update={"dtype": dtype} | ({} if key is None else {key: NUM_RANKS}))
        mesh = build_mesh(_CPU, -1)
        weight_mesh = build_weight_mesh(_CPU, -1, fsdp.tensor_parallel_size, fsdp.expert_parallel_size)
        module, _ = build_sharded(
            load,
            self.family.wrap,
            fsdp,
            mesh,
            _CPU,
            train=True,
            adapt=None if self.adapter is None else self._adapt,
            weight_mesh=weight_mesh,
        )
        group = build_sequence_group(_CPU, fsdp.ulysses_sequence_parallel_size)
        is_together = fsdp.processes_together > 1
        half = len(self.every) // NUM_RANKS
        picked = self.every if is_together else self.every[dist.get_rank() * half :][:half]
        values = self._values(module, picked, group)
        gradients = gradients_of(module, values, weights[list(picked)])
        whole = {name.removeprefix("model."): _full(gradient) for name, gradient in gradients.items()}
        return values.detach(), whole, picked


def _full(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _worst(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """Return the name of the parameter whose gradient is furthest off."""
    names = sorted({*found, *wanted})
    return max(names, key=lambda name: gradient_difference(_only(found, name), _only(wanted, name)))


def _only(gradients: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {name: gradients[name]} if name in gradients else {}
