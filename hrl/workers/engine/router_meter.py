"""What routers did in an update: the load of experts in every layer, and how sure routers were.

A token counts once for each row that it is part of: a prompt that is computed once for eight samples counts eight
times. So no number depends on how rows are packed, cut or dealt out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hrl.metrics import Metric
from hrl.models.experts import ExpertLayers, RoutingPass

#: Sums of a layer beside the choices of each expert: tokens; tokens whose router's logits are known, and the sum of
#: their entropies; tokens whose choice was replayed, and the sum of the shares of it that they would have made too.
_TOKENS, _WITH_ENTROPY, _ENTROPY, _REPLAYED, _AGREED = range(5)
_NUM_SUMS = 5


class RouterMeter:
    """Adds up choices on the device, and fetches them once.

    Args:
        experts: Layers of the model.
        device: Of this rank.
    """

    def __init__(self, experts: ExpertLayers, device: torch.device) -> None:
        self._experts = experts
        self._load = torch.zeros(len(experts), experts.num_experts, dtype=torch.float64, device=device)
        self._sums = torch.zeros(len(experts), _NUM_SUMS, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, routing: RoutingPass, num_rows: Tensor) -> None:
        """Add the choices of a forward.

        Args:
            routing: What layers chose.
            num_rows: `(T,)`, of how many rows each token is one.
        """
        weights = num_rows.double()
        for layer, chosen in enumerate(routing.chosen):
            if chosen.experts is None:  # a family that chooses in another way
                continue
            sums = self._sums[layer]
            self._load[layer].index_add_(
                0, chosen.experts.flatten(), weights.repeat_interleave(chosen.experts.shape[1])
            )
            sums[_TOKENS] += weights.sum()
            if chosen.logits is not None:
                sums[_WITH_ENTROPY] += weights.sum()
                sums[_ENTROPY] += (_entropies(chosen.logits) * weights).sum()
            if chosen.own is not None:
                agreed = (chosen.experts[:, :, None] == chosen.own[:, None, :]).any(2).double().mean(1)
                replayed = weights * routing.is_replayed(layer)
                sums[_REPLAYED] += replayed.sum()
                sums[_AGREED] += (agreed * replayed).sum()

    def metrics(self) -> dict[str, Metric]:
        """Return the metrics of all ranks, the same on each; every rank calls it."""
        both = torch.cat([self._load, self._sums], 1)
        if dist.get_world_size() > 1:
            dist.all_reduce(both)
        load, sums = both.cpu().split([self._load.shape[1], _NUM_SUMS], 1)
        return _metrics(load, sums, [layer.num_experts for layer in self._experts.layers])


def _entropies(logits: Tensor) -> Tensor:
    """Return the entropy in nats of each token's distribution over experts, `(T,)`, of logits `(T, E)`."""
    log_probs = logits.double().log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def _metrics(load: Tensor, sums: Tensor, num_experts: Sequence[int]) -> dict[str, Metric]:
    """Return the metrics of loads `(L, E)` and of the other sums `(L, _NUM_SUMS)`.

    The largest load over the mean one, less 1, is MaxVio of Wang et al. 2024, "Auxiliary-loss-free load balancing
    strategy for mixture-of-experts", https://arxiv.org/abs/2408.15664.
    """
    metrics: dict[str, Metric] = {}
    shares, violations, dead = [], [], 0
    for layer, count in enumerate(num_experts):
        total = float(load[layer].sum())
        if total == 0:
            continue
        share = float(load[layer].max()) / total
        shares.append(share)
        violations.append(share * count - 1)
        dead += int((load[layer, :count] == 0).sum())
        metrics[f"moe/layer_{layer}/max_expert_share"] = Metric.mean(share, 1)
    if shares:
        metrics["moe/max_expert_share"] = Metric.mean(max(shares), 1)
        metrics["moe/max_vio"] = Metric.mean(sum(violations), len(violations))
        metrics["moe/dead_experts"] = Metric.mean(dead, 1)
    of_all = sums.sum(0).tolist()
    metrics["moe/router_entropy"] = Metric.mean(of_all[_ENTROPY], of_all[_WITH_ENTROPY])
    if of_all[_REPLAYED]:
        metrics["moe/replayed"] = Metric.mean(of_all[_REPLAYED], of_all[_TOKENS])
        metrics["moe/router_agreement"] = Metric.mean(of_all[_AGREED], of_all[_REPLAYED])
    return metrics
