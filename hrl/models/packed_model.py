"""What is sharded and run: a transformers backbone on packed micro-batches, with the head that training needs."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hrl.models.head import backbone_of, head_form
from hrl.models.micro_batch import PackedMicroBatch
from hrl.models.ops.log_prob import TokenStatistics, default_chunk, token_statistics


class _PackedModel(nn.Module):
    """A transformers model on packed micro-batches."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @property
    def backbone(self) -> nn.Module:
        """The part of the model that ends with the last hidden states."""
        return backbone_of(self.model)

    def hidden_states(self, packed: PackedMicroBatch) -> Tensor:
        """Return the last hidden states at the wanted tokens, `(N, H)`."""
        output = self.backbone(
            input_ids=packed.input_ids,
            attention_mask=packed.layout.full_mask(packed.input_ids.device),
            position_ids=packed.position_ids,
            packing=packed.layout,
            use_cache=False,
        )
        return output.last_hidden_state[0].index_select(0, packed.hidden_index)


class PackedCausalLM(_PackedModel):
    """Log-probs of the sampled tokens, from logits as the model's own forward makes them.

    Raises:
        ValueError: The model makes logits in a way that can't be followed (see `head_form`).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.form = head_form(model)
        head = model.get_output_embeddings()
        # Computed inside the head's own `forward`, where FSDP has gathered its weight.
        head.forward = MethodType(_head_forward, head)

    def forward(
        self, packed: PackedMicroBatch, temperature: float, with_entropy: bool, with_sum_pi_squared: bool = False
    ) -> TokenStatistics:
        """Return log-probs `(N,)` and what else is asked for, in float32."""
        hidden = self.hidden_states(packed)
        if self.form.hidden_scale != 1.0:
            hidden = hidden * self.form.hidden_scale
        return self.model.get_output_embeddings()(
            hidden,
            packed.labels,
            temperature=temperature,
            chunk=default_chunk(hidden.device),
            with_entropy=with_entropy,
            with_sum_pi_squared=with_sum_pi_squared,
            form=self.form.logits,
        )


def _head_forward(head: nn.Linear, hidden: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
    """Return logits as the head's own forward does, or with labels `(N,)` statistics of the tokens after `(N, H)`."""
    if labels is None:
        return type(head).forward(head, hidden)
    return token_statistics(hidden.to(head.weight.dtype), head.weight, labels, bias=head.bias, **options)


class PackedScalarModel(_PackedModel):
    """One number per wanted token, for value and reward models."""

    def forward(self, packed: PackedMicroBatch) -> Tensor:
        """Return `(N,)` float32."""
        # The product is in float32 too: bfloat16 has two to three digits, too few for a value.
        hidden = self.hidden_states(packed)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        head = self.model.score
        values = torch.mv(hidden.to(wide), head.weight[0].to(wide))
        return values if head.bias is None else values + head.bias.to(wide)
