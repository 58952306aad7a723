"""Seconds of a pass over the batch on the training ranks: log-probs, values, scores and updates."""

from __future__ import annotations

from dataclasses import dataclass

from hrl.plan.assumptions import Assumptions
from hrl.plan.collectives import gather_s, replicate_s
from hrl.plan.cost import added
from hrl.plan.hardware import Hardware
from hrl.plan.passes import Pass
from hrl.plan.shapes import ModelShape
from hrl.plan.workload import Workload

PRODUCTS = "products"
UNEVEN = "waiting for the rank with the most tokens"
GATHERS = "gathering weights and reducing gradients"
OPTIMIZER = "optimizer step"
HOST = "copies to and from host memory"
EXCHANGES = "exchanging heads for tokens"
BETWEEN = "packing and statistics"

_REDUCE_BYTES = 4
_BACKWARD = 2.0


@dataclass(frozen=True)
class Learner:
    """A model on its ranks.

    Attributes:
        shape: Its sizes.
        hardware: A device.
        assumed: Constants.
        ranks: Processes that hold it.
        shards: Processes that share one copy.
        budget: Tokens of its largest micro-batch, of all ranks that run it.
        recompute: Whether layers run again in the backward pass.
        master_bytes: Bytes of a stored weight.
        compute_bytes: Bytes of a weight in a product.
        reshards: Whether gathered weights are dropped between forward and backward.
        has_head: Whether it computes log-probs.
        param_offload, optimizer_offload: Whether these come from host memory.
        degree: Ranks that run each micro-batch together.
        offload_policy: Whether weights, gradients and moments are in host memory all the time.
        tensor: Of these, ranks that have the same tokens and parts of the weights.
        experts: Ranks that share out a mixture's experts, each with tokens of its own.
        packs_rows: Whether the rows of a micro-batch are packed; else they are padded to the longest of them.
        max_rows: Rows of a micro-batch where their number is fixed; packed ones count as filled up to the budget.
    """

    shape: ModelShape
    hardware: Hardware
    assumed: Assumptions
    ranks: int
    shards: int
    budget: int
    recompute: bool
    master_bytes: int
    compute_bytes: int
    reshards: bool
    has_head: bool
    param_offload: bool
    optimizer_offload: bool
    degree: int = 1
    offload_policy: bool = False
    tensor: int = 1
    experts: int = 1
    packs_rows: bool = True
    max_rows: int | None = None

    @property
    def groups(self) -> int:
        """How many micro-batches run at once."""
        return self.ranks // self.degree

    def forward(self, work: Workload) -> dict[str, float]:
        """Return what a forward over all rows is spent on."""
        run = self._pass(work)
        layers, head = run.flops(self.shape.flops)
        flops = layers + head * self.has_head
        once = self._gathers(1) + self._streamed(1, 0)
        compute = self._compute(flops, run.micro_batches * once, run)
        exchanged = EXCHANGES, self._exchanges(run, 1)
        return added([*compute, exchanged, (BETWEEN, self.assumed.pass_s), *self._moved(0)])

    def update(self, work: Workload, optimizer_steps: int, mini_batches: int) -> dict[str, float]:
        """Return what an update is spent on: forward, backward, and an optimizer step for each mini-batch and pass.

        Ranks wait for each other in every mini-batch. Rows that teach nothing are not run.
        """
        compute: list[tuple[str, float]] = []
        if work.teaching > 0.0:
            run = self._pass(work.part(work.teaching / mini_batches))
            layers, head = run.flops(self.shape.flops)
            runs = 1.0 + _BACKWARD + self.recompute
            heads = 2.0 + _BACKWARD  # its logits are never kept, so they are computed again
            flops = runs * layers + heads * head * self.has_head
            once = self._gathers(1 + self.reshards) + self._reductions()
            once += self._streamed(1 + self.reshards, 1)
            compute = self._compute(flops, run.micro_batches * once, run)
            compute.append((EXCHANGES, self._exchanges(run, 2 + self.recompute)))
        return added(
            [
                *((label, optimizer_steps * seconds) for label, seconds in compute),
                (BETWEEN, self.assumed.pass_s),
                (OPTIMIZER, optimizer_steps * self._optimizer_s()),
                *self._moved(optimizer_steps),
            ]
        )

    def _pass(self, work: Workload) -> Pass:
        if self.packs_rows:
            return Pass.packed(work, self.groups, self.budget)
        return Pass.padded(work, self.groups, self.budget if self.max_rows is None else None, self.max_rows)

    def _compute(self, flops: float, collectives_s: float, run: Pass) -> list[tuple[str, float]]:
        """Return products, the wait for the fullest rank, and what of the collectives is not hidden behind them.

        Args:
            flops: Of all ranks.
            collectives_s: Seconds of all collectives.
            run: What is run between two points at which all ranks meet.
        """
        hardware, assumed = self.hardware, self.assumed
        share = hardware.product_share * (assumed.expert_share if self.shape.active_share < 0.5 else 1.0)
        even = flops / self.ranks / (hardware.flops * share)
        fullest = max(assumed.imbalance, run.fullest) if self.groups > 1 else 1.0
        exposed = max(0.0, collectives_s - assumed.overlap * even * fullest)
        return [(PRODUCTS, even), (UNEVEN, even * (fullest - 1.0)), (GATHERS, exposed)]

    def _exchanges(self, run: Pass, passes: int) -> float:
        """Return the seconds in which the ranks of a group exchange heads for tokens, and back, in every layer.

        Queries and outputs are about as wide as the residual stream. Key heads that are fewer than the ranks are sent
        once to each. The ranks of a tensor group add up what leaves attention and MLP instead, and a sum moves its
        tensor twice. Tokens that go to experts of other ranks, and back, are another exchange.
        """
        size, copies = self.shape.size, max(1.0, self.degree / self.shape.size.kv_heads)
        per_token = 2 * size.hidden_size * size.num_layers + copies * size.kv_bytes_per_token / 2
        tokens = run.tokens / self.ranks
        calls = 2 * size.num_layers * run.micro_batches
        if self.tensor > 1:
            tokens, per_token = run.tokens / self.groups, 4 * size.hidden_size
            per_token *= size.num_layers
        moved = self.compute_bytes * per_token * tokens
        spent = gather_s(moved, calls, self.degree, self.hardware, self.assumed)
        if self.experts > 1 and size.routed_bytes_per_token:
            own = run.tokens / self.ranks
            routed = self.compute_bytes * size.routed_bytes_per_token * size.num_layers * own  # there and back
            spent += gather_s(routed, calls, self.experts, self.hardware, self.assumed)
        return passes * spent

    def _gathers(self, times: int) -> float:
        """Return the seconds of the all-gathers of a micro-batch."""
        size = self.shape.size
        calls = size.num_layers + 2
        return times * self._over_shards(self.compute_bytes * size.parameters, self.compute_bytes * size.experts, calls)

    def _over_shards(self, whole: float, experts: float, calls: int) -> float:
        """Return the seconds in which ranks get, or reduce, bytes that are sharded, some of which are of experts."""
        hardware, assumed = self.hardware, self.assumed
        if self.experts == 1:
            return gather_s(whole / self.tensor, calls, self.shards // self.tensor, hardware, assumed)
        found = gather_s(whole - experts, calls, self.shards, hardware, assumed)
        return found + gather_s(experts / self.experts, calls, self.shards // self.experts, hardware, assumed)

    def _reductions(self) -> float:
        """Return the seconds in which a micro-batch's gradients are reduced, in float32, over shards and replicas."""
        size, assumed, hardware = self.shape.size, self.assumed, self.hardware
        whole = _REDUCE_BYTES * size.trained
        of_experts = 0 if size.adapter else _REDUCE_BYTES * size.experts
        scattered = self._over_shards(whole, of_experts, size.num_layers + 2)
        return scattered + replicate_s(whole, self.shards, self.ranks // self.shards, hardware, assumed)

    def _optimizer_s(self) -> float:
        moved = self.assumed.optimizer_bytes * self.shape.size.trained / self.shards
        if self.offload_policy:  # of the host's memory a rank has about as much as of the bus to it
            return moved / self.hardware.host_rate
        return moved / (self.hardware.memory_rate * self.assumed.memory_share)

    def _streamed(self, weights: int, gradients: int) -> float:
        """Return the seconds in which a micro-batch's weights come from host memory, and its gradients go there.

        Args:
            weights: How often they come.
            gradients: How often they go.
        """
        size = self.shape.size
        moved = self.master_bytes * (weights * size.parameters + gradients * size.trained) / self.shards
        return self.offload_policy * moved / self.hardware.host_rate

    def _moved(self, optimizer_steps: int) -> list[tuple[str, float]]:
        """Return the copies of parameters before the pass and after an update, and of moments in each step."""
        share, rate = self.shape.size.parameters / self.shards, self.hardware.host_rate
        weights = self.param_offload * self.master_bytes * share * (1 + bool(optimizer_steps))
        moments = self.optimizer_offload * 8 * share * optimizer_steps  # both ways at once
        return [(HOST, (weights + moments) / rate)]
