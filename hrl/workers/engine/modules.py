"""What is sharded and run: a transformers backbone with the one head that reinforcement learning asks for."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hrl.workers.engine.packing import PackedMicroBatch
from hrl.workers.ops.log_prob import TokenStatistics, default_chunk, token_statistics


class _PackedModel(nn.Module):
    """A transformers model on packed micro-batches. The head runs inside ``forward``, where FSDP has its weight."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def hidden_states(self, packed: PackedMicroBatch) -> Tensor:
        """``(N, H)`` last hidden states at the wanted tokens."""
        output = self.model.base_model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, packing=packed.layout, use_cache=False
        )
        return output.last_hidden_state[0].index_select(0, packed.hidden_index)


class PackedCausalLM(_PackedModel):
    """Log-probs of the tokens that were sampled."""

    def forward(
        self, packed: PackedMicroBatch, temperature: float, with_entropy: bool, with_sum_pi_squared: bool = False
    ) -> TokenStatistics:
        """Log-probs ``(N,)`` and what else is asked for, float32."""
        hidden = self.hidden_states(packed)
        return token_statistics(
            hidden,
            self.model.get_output_embeddings().weight,
            packed.labels,
            temperature,
            chunk=default_chunk(hidden.device),
            with_entropy=with_entropy,
            with_sum_pi_squared=with_sum_pi_squared,
        )


class PackedScalarModel(_PackedModel):
    """One number per token, for value and reward models."""

    def forward(self, packed: PackedMicroBatch) -> Tensor:
        """``(N,)`` float32. The head's product is in float32: bfloat16 has two digits, too few for a value."""
        hidden = self.hidden_states(packed)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        head = self.model.score
        values = torch.mv(hidden.to(wide), head.weight[0].to(wide))
        return values if head.bias is None else values + head.bias.to(wide)
