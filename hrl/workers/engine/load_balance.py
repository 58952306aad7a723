"""The auxiliary loss that balances the load of experts, over a mini-batch however it is cut.

With E experts, f_e the mean number of a token's choices that fall on expert e, and P_e the mean of its router's
probability for e, both over the tokens of all rows and over all layers with experts::

    loss = E * sum over e of f_e * P_e

which is `load_balancing_loss_func` of transformers on the padded rows of the mini-batch (Fedus et al. 2021, "Switch
transformers", https://arxiv.org/abs/2101.03961, equations 4 to 6). It is a product of two means, so it is not the mean
of what its micro-batches have. But f has no gradient, and with f known the loss is linear in P, which micro-batches and
ranks add up. So f is counted first: from the experts to be replayed, where all of them are known, else by a forward
pass of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hrl.models.experts import RoutingPass
from hrl.models.ops.exchange import SequenceGroup
from hrl.models.ops.layout import accumulation_dtype


class LoadCounter:
    """Counts what is needed of a mini-batch before the loss of a part of it can be computed.

    Args:
        num_experts: E.
        device: Of this rank.
    """

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self._sums = torch.zeros(num_experts + 1, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, experts: Tensor, num_rows: Tensor) -> None:
        """Add the choices `(T, L, K)` of tokens that are part of `num_rows (T,)` rows each."""
        weights = num_rows.double()
        of_choices = weights[:, None, None].expand(experts.shape).flatten()
        # What is no token of a row may have no choice.
        numbers = experts.flatten().long().clamp(max=len(self._sums) - 2)
        self._sums[:-1].index_add_(0, numbers, of_choices)
        self._sums[-1] += weights.sum() * experts.shape[1]

    def result(self, coefficient: float, group: SequenceGroup | None, copies: int) -> LoadBalance:
        """Return the loss, after all ranks have counted; every rank calls it.

        Args:
            coefficient: Its weight.
            group: Ranks that have slices of the same rows.
            copies: Ranks of a tensor group, which have counted the same tokens.
        """
        if dist.get_world_size() > 1:
            dist.all_reduce(self._sums)
        counts, num_tokens = self._sums[:-1], self._sums[-1].clamp(min=1)
        return LoadBalance(counts / num_tokens, num_tokens, coefficient, group, copies)


@dataclass(frozen=True)
class LoadBalance:
    """The loss of a mini-batch whose loads are known.

    Attributes:
        load: `(E,)`, f.
        num_tokens: Tokens times layers of the mini-batch, on all ranks; a tensor group's count once for each of these.
        coefficient: Weight of the loss.
        group: Ranks that have slices of the same rows; None where each has rows of its own.
        copies: Ranks of a tensor group, which compute the same tokens.
    """

    load: Tensor
    num_tokens: Tensor
    coefficient: float
    group: SequenceGroup | None
    copies: int = 1

    def share(self, routing: RoutingPass, num_rows: Tensor) -> Tensor:
        """Return a micro-batch's share of the loss, without its weight.

        Ranks of a group have the value of the whole group. The gradients add up: they are those of their own slices, or
        an n-th of what the n ranks of a tensor group compute alike.

        Args:
            routing: What layers computed, with the router's logits.
            num_rows: `(T,)`, of how many rows each token is one.
        """
        sums: list[Tensor] = []
        for chosen in routing.chosen:
            assert chosen.logits is not None, "families without logits are refused"
            wide = accumulation_dtype(chosen.logits.dtype)
            sums.append(num_rows.to(wide) @ chosen.logits.to(wide).softmax(-1))
        probability = torch.stack(sums).sum(0) / self.num_tokens
        own = len(self.load) * (self.load.to(probability) * probability).sum()
        if self.group is None and self.copies == 1:
            return own
        whole = own.detach() * self.copies
        if self.group is not None:
            dist.all_reduce(whole, group=self.group.processes)
        return own + (whole - own.detach())
