"""Cut a transformers model over the ranks of a tensor group, by the plan that its family has in transformers.

The plan (`base_model_tp_plan`) says of each projection which side of it is cut. Here its words become cuts of weights
(DTensors over the group's mesh, which FSDP2 shards further) and a forward that computes on this rank's part.
transformers' own forwards are not used: they wrap activations in DTensors, sum gradients elsewhere than hrl (see
`hrl.models.ops.tensor_parallel`) and gather the logits.

Beside what the plan names, embedding and head are cut by the vocabulary, and a mixture's experts by their number: each
rank has whole experts. Key heads that are fewer than the ranks are not cut: a rank computes the one that its queries
read.

Of an adapter (`hrl.models.adapter`) the side that meets a cut one is cut with it: B's rows where columns of the product
are cut, A's columns where rows are. What A makes of a row's parts is added up over the group, r numbers for a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from hrl.errors import HrlError
from hrl.models.adapter import AdapterIn, adapter_in
from hrl.models.ops.expert_parallel import exchanged_experts
from hrl.models.ops.tensor_parallel import WeightGroup, gathered, summed

#: What a plan may say of a projection: which dimension of its weight is cut, and whether its bias is cut with it.
_OF_LINEAR = {
    "colwise": (0, True),
    "colwise_rep": (0, True),
    "colwise_gather_output": (0, True),
    "rowwise": (1, False),
    "rowwise_rep": (1, False),
    "rowwise_split_input": (1, False),
}
_GATHERS = ("colwise_rep", "colwise_gather_output")
_SPLITS = ("rowwise_rep", "rowwise_split_input")
#: Of embeddings, which are cut by the vocabulary whatever the plan says.
_OF_EMBEDDING = frozenset({"embedding_rowwise"})
#: Of modules that every rank computes alone. Shares of gradients add up whatever they are of.
_WITHOUT_CUT = frozenset({"replicated_with_grad_allreduce", "mla_kv_a_proj"})
#: Of a module with all experts of a layer, and of its parameters.
_OF_EXPERTS = frozenset({"moe_tp_experts", "ep_dispatch_experts"})
_OF_EXPERT_WEIGHTS = frozenset({"packed_colwise", "rowwise", "grouped_gemm"})
_KEY_HEADS = "key heads"
_OF_KEYS = ("k_proj", "v_proj")
_OF_QUERIES, _GROUPS = "q_proj", "num_key_value_groups"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class TensorParallelError(HrlError, ValueError):
    """A model, or its experts, can't be cut over so many ranks.

    Attributes:
        hint: What to do, as a sentence.
    """

    def __init__(self, what: str, hint: str = "Set it to 1: FSDP2 shards every model.") -> None:
        super().__init__(what)
        self.hint = hint


class UnevenError(TensorParallelError):
    """So many ranks can't share its heads, experts or vocabulary, and another number of them could."""


def require_cuttable(config: PretrainedConfig, degree: int, copy: int | None = None) -> None:
    """Check what a model's config says about cutting it over `degree` ranks; one rank cuts nothing.

    Args:
        config: Of the model.
        degree: Ranks of a tensor group.
        copy: Ranks that share a copy of the model, a multiple of it; None where no part is sharded further.

    Raises:
        TensorParallelError: Its family has no plan in transformers or one with unknown words; its heads, key heads or
            experts don't divide by the degree; or its vocabulary is cut into parts that can't be sharded.
    """
    if degree == 1:
        return
    text = config.get_text_config()
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not any(style in _OF_LINEAR for style in plan.values()):
        raise TensorParallelError(f"{text.model_type} has no tensor-parallel plan in transformers")
    known = _OF_LINEAR.keys() | _OF_EMBEDDING | _WITHOUT_CUT | _OF_EXPERTS | _OF_EXPERT_WEIGHTS
    unknown = sorted(set(plan.values()) - known)
    if unknown:
        raise TensorParallelError(
            f"the tensor-parallel plan of {text.model_type} has {', '.join(unknown)}, which hrl does not compute"
        )
    counts = _counts(text)
    for what, count in counts.items():
        if not _shares(what, count, degree):
            fitting = [
                n for n in range(1, max(counts.values()) + 1) if all(_shares(*each, n) for each in counts.items())
            ]
            hint = f"Set it to one of {', '.join(map(str, fitting))}." if len(fitting) > 1 else "Set it to 1."
            raise UnevenError(f"its {count} {what} can't be shared by {degree} processes", hint)
    words = getattr(text, "vocab_size", 0)
    if copy is not None and not are_equal_shards(words, degree, copy // degree):
        on_two = 2 * degree if copy // degree % 2 == 0 else degree
        fitting = [
            n
            for n in range(1, copy + 1)
            if copy % n == 0
            and all(_shares(*each, n) for each in counts.items())
            and are_equal_shards(words, n, copy // n)
        ]
        raise UnevenError(
            f"the {words} rows of its vocabulary can't be shared by {degree} processes whose parts lie on "
            f"{copy // degree} each",
            f"Set it to {'one of ' if len(fitting) > 1 else ''}{', '.join(map(str, fitting))}; or fsdp_size, the "
            f"number of processes that share a copy of the model, to {on_two}.",
        )


def are_equal_shards(rows: int, degree: int, ranks: int) -> bool:
    """Return whether the parts into which `degree` ranks cut rows are sharded over `ranks` each in pieces of one size.

    torch takes the first part's pieces for those of all (`_StridedShard`), which is right where two ranks share a part.
    """
    part = -(-rows // degree)
    last = rows - (degree - 1) * part
    return degree == 1 or ranks <= 2 or -(-part // ranks) == -(-last // ranks)


def _shares(what: str, count: int, degree: int) -> bool:
    return count % degree == 0 or (what == _KEY_HEADS and degree % count == 0)


def _counts(text: PretrainedConfig) -> dict[str, int]:
    """Return what of a model the ranks of a group share out whole → how many it has."""
    names = {"attention heads": ("num_attention_heads",), _KEY_HEADS: ("num_key_value_heads",), "experts": _EXPERTS}
    found = {what: next((n for key in keys if (n := getattr(text, key, None))), None) for what, keys in names.items()}
    return {what: count for what, count in found.items() if isinstance(count, int)}


def cut(model: PreTrainedModel, group: WeightGroup) -> None:
    """Cut a model's weights over the group, and let its modules compute with this rank's parts.

    Args:
        model: Whole, usually without storage.
        group: The ranks.

    Raises:
        TensorParallelError: See `require_cuttable`; or the plan is of modules that hrl does not know how to cut.
    """
    require_cuttable(model.config, group.size)
    parts = _Parts(group)
    decoder = model.get_decoder()
    text = model.config.get_text_config()
    plan, usual = text.base_model_tp_plan, _counts(text).get(_KEY_HEADS, group.size)
    for name, module in decoder.named_modules():
        style = plan.get(_pattern(name))
        adapter = adapter_in(module)
        linear = module if adapter is None else adapter.base
        if isinstance(linear, nn.Linear) and style in _OF_LINEAR:
            attention = decoder.get_submodule(name.rpartition(".")[0])
            if style == "colwise" and name.endswith(_OF_KEYS):
                key_heads = _require_shares(attention, usual, group.size)
                if key_heads < group.size:
                    for picked in (linear,) if adapter is None else (linear, adapter.b):
                        _pick_key_head(picked, key_heads, group)
                    continue
            _cut_linear(linear, style, parts)
            if adapter is not None:
                _cut_adapter(adapter, style, parts)
            if style == "colwise" and name.endswith(_OF_QUERIES):
                _cut_sinks(attention, parts)
        elif holds_experts(module):
            _cut_experts(module, parts)
        elif style is not None and style not in _WITHOUT_CUT | _OF_EMBEDDING:
            raise TensorParallelError(f"{type(model).__name__}: hrl does not cut {name}, a {type(module).__name__}")
    _cut_embedding(model.get_input_embeddings(), parts)
    head = model.get_output_embeddings()
    if head is not None:
        _cut_parameters(head, {"weight": 0, "bias": 0}, parts)


def require_experts(config: PretrainedConfig, degree: int) -> None:
    """Check what a model's config says about sharing out its experts to `degree` ranks; one rank has all.

    Raises:
        TensorParallelError: It has no experts, or they don't divide by the degree.
    """
    if degree == 1:
        return
    text = config.get_text_config()
    count = _counts(text).get("experts")
    if count is None:
        raise TensorParallelError(f"{text.model_type} has no experts")
    if count % degree:
        fitting = ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)
        raise UnevenError(f"its {count} experts can't be shared by {degree} processes", f"Set it to one of {fitting}.")


def share_out_experts(model: PreTrainedModel, group: WeightGroup) -> None:
    """Give each rank of a group whole experts of every layer, to which the tokens of all its ranks travel.

    Args:
        model: Whole, usually without storage.
        group: The ranks, each with rows of its own.

    Raises:
        TensorParallelError: See `require_experts`; or the experts are modules that hrl does not know how to share out.
    """
    require_experts(model.config, group.size)
    parts = _Parts(group)
    layers = [module for module in model.get_decoder().modules() if holds_experts(module)]
    if not layers:
        raise TensorParallelError(f"{type(model).__name__} has its experts in a form that hrl does not share out")
    for module in layers:
        _cut_experts(module, parts, exchange=True)


def own(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, differentiably; the parameter itself where it is not cut."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Parts:
    """Cuts parameters, of which several modules may have the same."""

    def __init__(self, group: WeightGroup) -> None:
        self.group = group
        self._of: dict[nn.Parameter, nn.Parameter] = {}

    def of(self, parameter: nn.Parameter, dim: int) -> nn.Parameter:
        if parameter not in self._of:
            whole = distribute_tensor(parameter.detach(), self.group.mesh, [Shard(dim)], src_data_rank=None)
            self._of[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        return self._of[parameter]


def _pattern(name: str) -> str:
    """Return the name of a module as plans have it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _cut_parameters(module: nn.Module, dims: Mapping[str, int], parts: _Parts) -> None:
    for name, dim in dims.items():
        parameter = module._parameters.get(name)
        if parameter is not None and not isinstance(parameter, DTensor):
            module._parameters[name] = parts.of(parameter, dim)


def _cut_linear(module: nn.Linear, style: str, parts: _Parts) -> None:
    dim, with_bias = _OF_LINEAR[style]
    _cut_parameters(module, {"weight": dim} | ({"bias": 0} if with_bias else {}), parts)
    group, (columns, rows) = parts.group, (module.out_features, module.in_features)

    def colwise(states: Tensor) -> Tensor:
        out = functional.linear(states, own(module.weight), None if module.bias is None else own(module.bias))
        return gathered(out, columns, group) if style in _GATHERS else out

    def rowwise(states: Tensor) -> Tensor:
        mine = states[..., group.part(rows)] if style in _SPLITS else states
        out = summed(functional.linear(mine, own(module.weight)), group)
        return out if module.bias is None else out + module.bias

    module.forward = rowwise if dim else colwise


def _cut_adapter(adapter: AdapterIn, style: str, parts: _Parts) -> None:
    """Cut A or B where it meets the side of the layer's weight that is cut.

    The other one every rank has, and gets its share of the gradient: of A from this rank's rows of B, of B from this
    rank's share of the gradient of what the layer adds to the residual stream.
    """
    if _OF_LINEAR[style][0] == 0:
        _cut_linear(adapter.b, style, parts)
    else:
        _cut_linear(adapter.a, style, parts)


def _require_shares(attention: nn.Module, usual: int, degree: int) -> int:
    """Return the key heads of a layer, which may have others than the config says of the model.

    Raises:
        TensorParallelError: The ranks can't share its heads.
    """
    queries, width, groups = (getattr(attention, name, None) for name in (_OF_QUERIES, "head_dim", _GROUPS))
    if queries is not None and (adapter := adapter_in(queries)) is not None:
        queries = adapter.base
    if not isinstance(queries, nn.Linear) or not isinstance(width, int) or not isinstance(groups, int):
        return usual
    heads = queries.out_features // width
    for what, count in {"attention heads": heads, _KEY_HEADS: heads // groups}.items():
        if not _shares(what, count, degree):
            raise UnevenError(f"the {count} {what} of some layers can't be shared by {degree} processes")
    return heads // groups


def _pick_key_head(module: nn.Linear, heads: int, group: WeightGroup) -> None:
    """Let a projection, which stays whole, compute the one key head that this rank's queries read."""
    width, head = module.out_features // heads, group.place * heads // group.size
    rows = slice(head * width, (head + 1) * width)

    def forward(states: Tensor) -> Tensor:
        return functional.linear(states, module.weight[rows], None if module.bias is None else module.bias[rows])

    module.forward = forward


def _cut_sinks(attention: nn.Module, parts: _Parts) -> None:
    """Cut what an attention has beside its projections: a number for each head, `sinks (Hq,)`."""
    if attention._parameters.get("sinks") is None:
        return
    _cut_parameters(attention, {"sinks": 0}, parts)
    attend = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _LocalParameters(attention):
            return attend(*args, **kwargs)

    attention.forward = forward


def _cut_embedding(module: nn.Embedding, parts: _Parts) -> None:
    group, mine = parts.group, parts.group.part(module.num_embeddings)
    _cut_parameters(module, {"weight": 0}, parts)
    if module.padding_idx is not None:  # whose row gets no gradient, on the rank that has it
        inside = mine.start <= module.padding_idx < mine.stop
        module.padding_idx = module.padding_idx - mine.start if inside else None
    look_up = module.forward

    def forward(ids: Tensor) -> Tensor:
        is_mine = (ids >= mine.start) & (ids < mine.stop)
        with _LocalParameters(module):
            found = look_up(torch.where(is_mine, ids - mine.start, 0))
        return summed(torch.where(is_mine[..., None], found, 0.0), group)

    module.forward = forward


def holds_experts(module: nn.Module) -> bool:
    """Return whether a module has all experts of a layer, each weight of all of them in one tensor.

    What transformers' `use_experts_implementation` has decorated takes tokens, their experts and their weights.
    """
    own_parameters = list(module.parameters(recurse=False))
    return hasattr(module, "_is_expert_parallel") and any(p.ndim == 3 for p in own_parameters)


def _cut_experts(module: nn.Module, parts: _Parts, *, exchange: bool = False) -> None:
    """Give each rank whole experts, and let it compute the choices that fall on these: of its tokens, or of all."""
    group, count = parts.group, module.num_experts
    mine = group.part(count)
    if any(len(p) != module.num_experts for p in module.parameters(recurse=False)):
        raise TensorParallelError(f"hrl does not cut {type(module).__name__}: not all its weights are of experts")
    _cut_parameters(module, dict.fromkeys(module._parameters, 0), parts)
    module.num_experts = mine.stop - mine.start
    compute: Callable[..., Tensor] = module.forward

    def with_own(*rows: Tensor) -> Tensor:
        with _LocalParameters(module):
            return compute(*rows)

    def with_tokens_of_all(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return exchanged_experts(with_own, states, chosen, weights, num_experts=count, group=group)

    def with_own_tokens(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        # (T, H), (T, k) and (T, k): a row for each choice of an expert of this rank.
        tokens, slots = torch.nonzero((chosen >= mine.start) & (chosen < mine.stop), as_tuple=True)
        rows = states[tokens], chosen[tokens, slots, None] - mine.start, weights[tokens, slots, None]
        if not len(tokens):  # something has to run, so that every rank joins in summing the gradients of its copies
            tokens = tokens.new_zeros(1)
            rows = states[:1], chosen.new_zeros(1, 1), weights.new_zeros(1, 1)
        return summed(torch.zeros_like(states).index_add(0, tokens, with_own(*rows).to(states.dtype)), group)

    module.forward = with_tokens_of_all if exchange else with_own_tokens


class _LocalParameters:
    """Within the block, a module's parameters are this rank's parts."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._whole = dict(self._module._parameters)
        parameters: dict[str, Any] = self._module._parameters
        parameters.update({name: own(p) for name, p in self._whole.items() if p is not None})

    def __exit__(self, *error: object) -> None:
        self._module._parameters.update(self._whole)
