"""An adapter in a running vLLM engine, fed from memory: nothing is read from a folder.

vLLM's LoRA manager keeps adapters by number and reads an unknown one from the path in its request. Here one number is
given to what a weight sync brings; every request names it, and finds it loaded. The model's own weights stay as they
were loaded from its folder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hrl.config.model import LORA_RANKS
from hrl.workers.weight_sync.wire import WeightSyncError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

    from hrl.models.adapter import AdapterSource
    from hrl.models.loading import ModelSource

#: The adapter's number and name, the same in every sync.
ADAPTER_ID, ADAPTER_NAME = 1, "policy"


def engine_options(model: ModelSource) -> dict[str, Any]:
    """Return the arguments of vLLM's engine by which it takes an adapter; none where it gets a whole model.

    vLLM makes matrices for every layer that it could adapt, and for all experts of a mixture. It is told the last parts
    of the names of the layers that have an adapter, and leaves the others alone, heads and embeddings too.

    Raises:
        AdapterError: See `hrl.models.adapter.target_names`.
        RolloutError: vLLM has no kernels for the rank.
    """
    adapter = model.adapter
    if adapter is None or adapter.merge:
        return {}
    from hrl.models.adapter import target_names
    from hrl.models.loading import load_causal_lm
    from hrl.workers.rollout.base import RolloutError

    config = adapter.config()
    rank = config.r
    if rank > LORA_RANKS[-1]:
        raise RolloutError(
            f"the adapter has rank {rank}, and vLLM takes {LORA_RANKS[-1]} at most: set "
            "actor_rollout_ref.model.lora.merge=true, or a smaller lora_rank"
        )
    names = target_names(load_causal_lm(model, torch.bfloat16, meta=True).model, config)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": next(known for known in LORA_RANKS if known >= rank),
        # vLLM compares whole names with its own, where a layer may be fused with others; of ends it knows the parts.
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in names}),
    }


def plain_fields(adapter: AdapterSource | None) -> dict[str, Any] | None:
    """Return what the engine's processes need to know of an adapter that they get; None where they get none."""
    if adapter is None or adapter.merge:
        return None
    config = adapter.config()
    return {
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "use_rslora": config.use_rslora,
    }


def lora_request() -> LoRARequest:
    """Return what a request names the adapter by. Its path is never read."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(ADAPTER_NAME, ADAPTER_ID, "in memory")


class _Place(NamedTuple):
    """Where vLLM keeps a matrix: in `A` or `B` of a layer, and which of the matrices that the layer fuses."""

    layer: Any
    is_a: bool
    member: int
    scaling: float

    def own_part(self, sent: Tensor) -> Tensor:
        """Return what this process holds of a matrix: of a tensor-parallel engine perhaps some rows or columns."""
        if self.layer.tp_size == 1:
            return sent
        take = self.layer.slice_lora_a if self.is_a else self.layer.slice_lora_b
        if self.layer.n_slices == 1:
            part: Tensor = take(sent)
            return part
        members: list[Tensor | None] = [None] * self.layer.n_slices
        members[self.member] = sent
        part = take(members)[self.member]
        return part

    def held(self, shape: torch.Size) -> Tensor:
        """Return what is in the layer, whose memory may be larger than the matrix."""
        stacks = self.layer.lora_a_stacked if self.is_a else self.layer.lora_b_stacked
        held: Tensor = stacks[self.member][0, 0, : shape[0], : shape[1]]
        return held


class VllmAdapterWriter:
    """Gives vLLM's LoRA manager an adapter, in place of the one before.

    Args:
        manager: vLLM's `LRUCacheLoRAModelManager`.
        fields: See `plain_fields`.
        vllm_config: vLLM's.
    """

    def __init__(self, manager: Any, fields: Mapping[str, Any], vllm_config: VllmConfig) -> None:
        from vllm.lora.peft_helper import PEFTHelper

        self._manager = manager
        lora: Any = vllm_config.lora_config
        self._helper = PEFTHelper.from_dict({**fields, "target_modules": lora.target_modules})
        self._dtype = lora.lora_dtype
        self._sent: dict[str, Tensor] = {}
        self._places: dict[str, _Place | None] = {}

    def begin(self) -> None:
        """Expect a complete adapter."""
        self._sent = {}

    def write(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Take matrices, whose memory will be written again."""
        self._sent |= {name: tensor.clone() for name, tensor in weights}

    def finish(self, kept: Collection[str] = ()) -> None:
        """Put the adapter into the layers' memory.

        Raises:
            WeightSyncError: The engine has no layer for a matrix, or lacks one of a pair, or finds one too large.
        """
        from vllm.lora.lora_model import LoRAModel

        device = next(iter(self._sent.values())).device
        try:
            lora = LoRAModel.from_lora_tensors(
                ADAPTER_ID,
                {name: tensor.clone() for name, tensor in self._sent.items()},  # of which vLLM scales some in place
                self._helper,
                device=str(device),
                dtype=self._dtype,
                weights_mapper=self._mapper(),
            )
            places = self._places_of(lora.loras)
            self._manager.remove_adapter(ADAPTER_ID)
            self._manager.add_adapter(lora)
            self._manager.activate_adapter(ADAPTER_ID)
        except (ValueError, KeyError, AssertionError, RuntimeError) as error:
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(f"the engine refused the adapter: {type(error).__name__}: {error}") from error
        self._places = places

    def cancel(self) -> None:
        """Leave what was written: the receiver counts the model as broken until the next complete adapter."""

    def read_back(self, name: str) -> Tensor | None:
        """Return a matrix if this process's part of it is what was sent, else one without numbers.

        None where a layer has other members than there are matrices, so that a matrix is cut into several.
        """
        place, sent = self._places[name], self._sent[name]
        if place is None:
            return None
        part = place.own_part(sent)
        # vLLM keeps `scaling · B`: if that is what is there, it was made of what was sent.
        expected = part if place.is_a else part * place.scaling
        return sent if torch.equal(place.held(part.shape), expected) else torch.full_like(sent, torch.nan)

    def _mapper(self) -> Any:
        """Return how the model's names in a checkpoint become vLLM's; before 0.29 the mapping does nothing else."""
        mapper: Any = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper

    def _places_of(self, loras: Mapping[str, Any]) -> dict[str, _Place | None]:
        """Return the place of every matrix that was sent; see `read_back` for None."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        fused = {
            part: (whole, index)
            for whole, parts in self._manager.packed_modules.items()
            for index, part in enumerate(parts)
        }
        incomplete = [name for name, lora in loras.items() if lora.lora_a is None or lora.lora_b is None]
        if incomplete:
            raise WeightSyncError(f"the trainer sent only one of the two matrices of {incomplete[0]}")
        places: dict[str, _Place | None] = {}
        mapper = self._mapper()
        for name in self._sent:
            module, is_a = parse_fine_tuned_lora_name(name, mapper)
            whole, index = fused.get(module, (module, 0))
            layer = self._manager.modules.get(whole)
            if layer is None:
                raise WeightSyncError(
                    f"vLLM has no LoRA layer for {module}: set actor_rollout_ref.model.lora.merge=true, or leave the "
                    "layer out (exclude_modules)"
                )
            members = len(self._manager.packed_modules[whole]) if module in fused else 1
            is_known = layer.n_slices == members
            places[name] = _Place(layer, is_a, index, loras[module].scaling) if is_known else None
        return places


def multiply_plainly(manager: Any) -> None:
    """Let a CPU engine multiply all tokens by the one adapter there is.

    vLLM's own products on a CPU copy an adapter's matrices for every token.
    """
    for wrapper in manager.punica_wrapper_mapping.values():
        wrapper.add_lora_linear = _Product(wrapper)


class _Product:
    """`y += scale · x Aᵀ Bᵀ`, rounded where the trainer rounds, for the adapter in the first slot."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def __call__(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Sequence[Tensor],
        lora_b_stacked: Sequence[Tensor],
        scale: float,
        output_slices: Sequence[int],
        **_: Any,
    ) -> None:
        if self._wrapper.no_lora:
            return
        start = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            added = nn.functional.linear(nn.functional.linear(x, a[0, 0]), b[0, 0])
            y[:, start : start + width] += added if scale == 1.0 else added * scale
            start += width
