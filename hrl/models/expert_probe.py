"""Find out, on a small cut of a model, whether its choices of experts can be replayed and its loads balanced.

As in `hrl.models.probe`, no list of families would do. The cut runs packed, as the engine runs it, and is told which
experts its tokens go to. These have to reach the experts, with weights that are not zero: a family that chooses among
groups of experts first may give those of other groups none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hrl.models.cut import UNREACHED_TOKENS
from hrl.models.experts import PackedRouting, RoutingError
from hrl.models.loading import prepare
from hrl.models.ops.attention import ATTENTION_NAME
from hrl.models.packed_model import PackedCausalLM, PackedMicroBatch, pack_micro_batch
from hrl.models.probe import FAILURES, Family, first_that_runs, probe_rows, unnoticed
from hrl.routing import routing_dtype

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class ExpertsFound:
    """What a run may ask of a model's experts.

    Attributes:
        num_layers: Layers of the cut whose experts can be followed; 0 for a dense model.
        why_no_replay: Why choices can't be recorded and replayed; empty where they can.
        has_logits: The entropy of its routers can be measured.
        is_balanced_by_loss: It has the auxiliary loss of the load of experts.
    """

    num_layers: int
    why_no_replay: str
    has_logits: bool
    is_balanced_by_loss: bool

    @property
    def why_no_balance(self) -> str:
        """Why the load of its experts can't be balanced by the auxiliary loss; empty where it can."""
        if not self.num_layers or (self.is_balanced_by_loss and self.has_logits):
            return self.why_no_replay  # choices are counted as they are recorded
        return "its family has no auxiliary loss"


def probe_experts(config: PretrainedConfig, max_model_len: int, *, trust_remote_code: bool = False) -> ExpertsFound:
    """Replay random choices through the smallest cut of a configuration that runs.

    Args:
        config: The model's, with its overrides.
        max_model_len: The longest sequence of the run in tokens.
        trust_remote_code: Whether the config's folder may run code.

    Raises:
        ProbeError: No cut runs.
    """
    with unnoticed():
        family = Family(AutoModelForCausalLM, max_model_len, trust_remote_code)
        cut, own = first_that_runs(config, family)
        model = family.build(cut, ATTENTION_NAME)
        model.load_state_dict(own.state_dict())
        prepare(model, max_model_len=UNREACHED_TOKENS, recompute=False)
        return _found(model, cut)


@torch.no_grad()
def _found(model: PreTrainedModel, cut: PretrainedConfig) -> ExpertsFound:
    packed_model = PackedCausalLM(model)
    experts = packed_model.experts
    if not experts.layers:
        return ExpertsFound(0, "it has no layer with experts that transformers' own interface runs", False, False)
    packed = pack_micro_batch(
        probe_rows(cut), (0, 1, 2, 3), share_prefix=True, wanted="next", device=_CPU, with_routing=True
    )
    assert packed.routing is not None
    has_logits = all(layer.router is not None for layer in experts.layers)
    try:
        with experts.following(packed.routing) as routing:
            packed_model(packed, 1.0, False)
        assert routing is not None
        own = routing.stacked(routing_dtype(experts.num_experts))
        why = _why_not_replayed(packed_model, packed, packed.routing, own)
    except (RoutingError, *FAILURES) as error:
        why = str(error)
    return ExpertsFound(len(experts.layers), why, has_logits, experts.is_balanced_by_loss)


def _why_not_replayed(packed_model: PackedCausalLM, packed: PackedMicroBatch, known: PackedRouting, own: Tensor) -> str:
    """Return what happens to choices `(T, L, K)` other than the model's own; nothing if they are taken."""
    experts, (tokens, layers, each) = packed_model.experts, own.shape
    rng = np.random.default_rng(0)
    told = [[rng.permutation(layer.num_experts)[:each] for layer in experts.layers] for _ in range(tokens)]
    given = torch.from_numpy(np.array(told, routing_dtype(experts.num_experts)))
    reached: list[tuple[Tensor, Tensor]] = []
    hooks = [
        layer.block.experts.register_forward_pre_hook(lambda _, args: reached.append((args[1], args[2])))
        for layer in experts.layers
    ]
    try:
        routing = replace(known, replayed=given, has_missing=False, is_known=True)
        with experts.following(routing):
            packed_model(packed, 1.0, False)
    finally:
        for hook in hooks:
            hook.remove()
    if len(reached) != layers:
        return f"{len(reached)} of its {layers} layers with experts ran"
    for layer, (took, weights) in enumerate(reached):
        if not torch.equal(took.reshape(tokens, each).long(), given[:, layer].long()):
            return f"layer {layer} of those with experts takes others than it is told"
        if (weights == 0).any():
            return f"layer {layer} of those with experts gives some of the experts that it is told no weight"
    return ""
