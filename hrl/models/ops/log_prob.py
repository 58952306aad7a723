"""The one place where hidden states become log-probs, entropies and other statistics of a token's distribution.

The logits of a batch, `(T, V)`, would be its largest tensor by far. They are computed here tile by tile (tokens ×
vocabulary), folded into a running log-sum-exp, and computed again in the backward pass, so that the peak memory depends
on the tile and not on `T` times `V`.

A head makes logits `z = scale * (hidden W^T + bias)`, and some models cap them: `cap * tanh(z / cap)`, with slope
`1 - (capped / cap)^2`. Then comes the temperature. With `p` the softmax of the result `z` and entropy
`H = -sum(p log p)`:

- `d log p(y) / d z = onehot(y) - p`
- `d H / d z = -p (log p + H)`

Log-probs of other tokens than the sampled one have the same gradient, and the tiles are gone through once for all of
them. The collision probability `sum(p^2)` is a number for advantage estimators and has no gradient.

The ranks of a tensor group have a part of the vocabulary each. They fold the tiles of their own part, then put
together a few numbers for each token (largest logit, mass, label's logit), and no rank ever has another's logits. The
gradient of a rank's logits is that of its own part; that of the hidden states is a share (`tensor_parallel`).

What is done to a tile between its products takes one kernel on a GPU (`log_prob_kernels`), and torch's operators, which
pass over it several times, elsewhere: on a CPU a tile stays in the cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hrl.models.ops.cpu_product import BLOCK, PackedWeight, can_multiply
from hrl.models.ops.layout import accumulation_dtype, has_triton
from hrl.models.ops.tensor_parallel import WeightGroup

#: Logits held at once. On a CPU a few megabytes, which the last-level cache holds.
CPU_CHUNK = 1 << 22
CUDA_CHUNK = 1 << 27
#: The most tokens of a tile. Long tiles keep the products with the head's weight efficient.
MAX_TILE_TOKENS = 4096


def default_chunk(device: torch.device) -> int:
    """Return the number of logits to hold at once on `device`."""
    return CPU_CHUNK if device.type == "cpu" else CUDA_CHUNK


class TokenStatistics(NamedTuple):
    """Statistics of each sampled token, `(T,)` each; `None` where not asked for.

    Attributes:
        log_prob: Of the token, with gradient.
        entropy: Of the distribution it was sampled from, with gradient.
        sum_pi_squared: Sum of that distribution's squared probabilities, without gradient.
        log_prob_at: `(T, K)` log-probs of other tokens, with gradient.
        top_log_prob: `(T, k)` largest log-probs, in descending order, without gradient.
        top_ids: `(T, k)` int64, the tokens that have them.
        states: `(T, H)` hidden states of which the logits are made, without gradient.
        divergence: From a teacher's distribution, with gradient, see `hrl.models.ops.divergence`.
    """

    log_prob: Tensor
    entropy: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    log_prob_at: Tensor | None = None
    top_log_prob: Tensor | None = None
    top_ids: Tensor | None = None
    states: Tensor | None = None
    divergence: Tensor | None = None


@dataclass(frozen=True)
class LogitForm:
    """What a model does to the products of its head before the temperature.

    Attributes:
        scale: Factor of the products (Cohere's `logit_scale`, one over Granite's `logits_scaling`).
        softcap: Logits are `softcap * tanh(logits / softcap)` (Gemma's `final_logit_softcapping`); `None` is no cap.
    """

    scale: float = 1.0
    softcap: float | None = None


#: Logits are the products.
PLAIN = LogitForm()


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    *,
    chunk: int,
    with_entropy: bool,
    with_sum_pi_squared: bool = False,
    bias: Tensor | None = None,
    form: LogitForm = PLAIN,
    first: int = 0,
    group: WeightGroup | None = None,
    at: Tensor | None = None,
    num_top: int = 0,
) -> TokenStatistics:
    """Return log-probs of `labels`, and more if asked, under `softmax(form(hidden @ weight.T + bias) / temperature)`.

    Args:
        hidden: `(T, H)` last hidden states, response positions only.
        weight: `(V, H)` weight of the language-model head.
        labels: `(T,)` int64, the token that was sampled from each position.
        temperature: Of the sampler, positive. The distribution is the one that was sampled from.
        chunk: Logits held at once (tokens × vocabulary entries of one tile).
        with_entropy: Whether entropies are wanted. They cost one more pass over the tile.
        with_sum_pi_squared: Whether sums of squared probabilities are wanted. They cost as much.
        bias: `(V,)` of the head, with gradient.
        form: What happens to the products before the temperature.
        first: The vocabulary's entry to which the first row of `weight` belongs.
        group: Ranks that have the other entries, each a run of them; every one of them calls this, with the same hidden
            states and labels, and gets the same results. None where `weight` is all of the head's.
        at: `(T, K)` int64, other tokens whose log-probs are wanted.
        num_top: How many of the largest log-probs are wanted; at most the vocabulary.

    Returns:
        Float32 (float64 for float64 inputs).

    Raises:
        ValueError: The temperature is not positive, or shapes don't fit.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}: greedy samples have no log-prob")
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden (T, H), weight (V, H), labels (T,) don't fit: {tuple(hidden.shape)}, {tuple(weight.shape)}, "
            f"{tuple(labels.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"a bias (V,) of {tuple(bias.shape)} does not fit a weight (V, H) of {tuple(weight.shape)}")
    if at is not None and (at.ndim != 2 or at.shape[0] != len(labels)):
        raise ValueError(f"at (T, K) of {tuple(at.shape)} does not fit {len(labels)} labels")
    log_prob, entropy, sum_pi_squared, log_prob_at, top_log_prob, top_ids = _LogProb.apply(
        hidden,
        weight,
        bias,
        labels if group is None else labels - first,
        form,
        float(temperature),
        int(chunk),
        with_entropy,
        with_sum_pi_squared,
        group,
        None if at is None else at - first,
        int(num_top),
        first,
    )
    return TokenStatistics(
        log_prob,
        entropy if with_entropy else None,
        sum_pi_squared if with_sum_pi_squared else None,
        None if at is None else log_prob_at,
        top_log_prob if num_top else None,
        top_ids if num_top else None,
    )


def tiles_of(tokens: int, vocabulary: int, chunk: int) -> tuple[list[slice], list[slice]]:
    """Cut tokens and vocabulary into tiles of at most `chunk` logits (and at least one)."""
    rows = max(1, min(tokens, MAX_TILE_TOKENS, chunk))
    columns = max(1, min(vocabulary, chunk // rows))
    if columns > BLOCK:
        columns -= columns % BLOCK  # whole blocks, of which a CPU makes its products
    return list(_slices(tokens, rows)), list(_slices(vocabulary, columns))


def _slices(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def logits_of_tile(hidden: Tensor, weight: Tensor, bias: Tensor | None, form: LogitForm, dtype: torch.dtype) -> Tensor:
    """Return the logits of one tile, `(t, v)`, in the accumulation dtype."""
    logits = _products(hidden, weight, dtype)
    if bias is not None:
        logits.add_(bias)
    if form.scale != 1.0:
        logits.mul_(form.scale)
    if form.softcap is not None:
        logits.div_(form.softcap).tanh_().mul_(form.softcap)
    return logits


def _products(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if hidden.dtype == dtype:
        return torch.mm(hidden, weight.t())
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=dtype)
    if can_multiply(hidden, weight):
        return PackedWeight.of(weight).product(hidden)
    with _bf16_matmul():  # no `out_dtype` on a CPU
        return torch.mm(hidden.to(dtype), weight.to(dtype).t())


def allow_bf16_matmul() -> None:
    """Let oneDNN multiply float32 matrices with bfloat16 instructions, where the CPU has them, and sum in float32.

    For bfloat16 numbers in float32 tensors this gives the exact product at bfloat16's speed. Logits keep the bits that
    a bfloat16 result would round away (0.03 of a logit of 16 on average).
    """
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def _has_kernels(logits: Tensor) -> bool:
    """Return whether a tile is passed over by `log_prob_kernels`."""
    return logits.is_cuda and logits.dtype == torch.float32 and has_triton()


@contextlib.contextmanager
def _bf16_matmul() -> Iterator[None]:
    before = torch.backends.mkldnn.matmul.fp32_precision
    allow_bf16_matmul()
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


class _LogProb(torch.autograd.Function):
    """Online log-sum-exp over vocabulary tiles, which the backward computes again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        form: LogitForm,
        temperature: float,
        chunk: int,
        with_entropy: bool,
        with_sum_pi_squared: bool,
        group: WeightGroup | None,
        at: Tensor | None,
        num_top: int,
        first: int,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        dtype = accumulation_dtype(hidden.dtype)
        row_tiles, vocab_tiles = tiles_of(hidden.shape[0], weight.shape[0], chunk)
        normaliser = hidden.new_empty(hidden.shape[0], dtype=dtype)
        label_logit = torch.full_like(normaliser, torch.nan)  # a label outside the vocabulary stays NaN, never a number
        mean_logit = torch.empty_like(normaliser) if with_entropy else None
        sum_pi_squared = torch.empty_like(normaliser)
        # Of other tokens too: what is outside the vocabulary stays NaN.
        at_logit = normaliser.new_full((len(normaliser), 0 if at is None else at.shape[1]), torch.nan)
        top_logit = normaliser.new_full((len(normaliser), num_top), -torch.inf)
        top_ids = torch.zeros_like(top_logit, dtype=torch.int64)
        for rows in row_tiles:
            top = normaliser.new_full((rows.stop - rows.start,), -torch.inf)
            mass = torch.zeros_like(top)  # sum of exp(z - top)
            first_moment = torch.zeros_like(top)  # sum of exp(z - top) * z
            squared_mass = torch.zeros_like(top)  # sum of exp(z - top)^2
            for columns in vocab_tiles:
                logits = logits_of_tile(hidden[rows], weight[columns], part_of(bias, columns), form, dtype)
                if at is not None:
                    _pick(logits, at[rows], columns, at_logit[rows])
                if num_top:
                    _keep_top(logits, first + columns.start, top_logit[rows], top_ids[rows])
                if _has_kernels(logits):
                    from hrl.models.ops.log_prob_kernels import fold_tile

                    fold_tile(
                        logits,
                        labels[rows],
                        columns.start,
                        temperature,
                        top,
                        mass,
                        first_moment if with_entropy else None,
                        squared_mass if with_sum_pi_squared else None,
                        label_logit[rows],
                    )
                    del logits  # before the next tile's are made
                    continue
                if temperature != 1.0:
                    logits.div_(temperature)
                _pick(logits, labels[rows, None], columns, label_logit[rows, None])
                new_top = torch.maximum(top, logits.amax(1))
                shrink = torch.exp(top - new_top)
                if with_entropy:
                    exponentials = (logits - new_top[:, None]).exp_()
                    first_moment.mul_(shrink).add_(torch.linalg.vecdot(exponentials, logits))
                else:
                    exponentials = logits.sub_(new_top[:, None]).exp_()
                mass.mul_(shrink).add_(exponentials.sum(1))
                if with_sum_pi_squared:
                    squared_mass.mul_(shrink.square()).add_(torch.linalg.vecdot(exponentials, exponentials))
                top = new_top
                del logits, exponentials  # before the next tile's are made
            if group is not None:
                folded = _fold_of_group(top, mass, first_moment, squared_mass, label_logit[rows], group)
                top, mass, first_moment, squared_mass, label_logit[rows] = folded
                at_logit[rows] = _picks_of_group(at_logit[rows], group)
                top_logit[rows], top_ids[rows] = _top_of_group(top_logit[rows], top_ids[rows], group)
            normaliser[rows] = top + mass.log()
            if mean_logit is not None:
                mean_logit[rows] = first_moment / mass
            sum_pi_squared[rows] = squared_mass / mass.square()
        entropy = normaliser - mean_logit if mean_logit is not None else torch.empty_like(normaliser)
        log_prob_at, top_log_prob = (picked / temperature - normaliser[:, None] for picked in (at_logit, top_logit))
        ctx.save_for_backward(hidden, weight, bias, labels, normaliser, entropy, at)
        ctx.form, ctx.temperature, ctx.chunk, ctx.accumulation_dtype = form, temperature, chunk, dtype
        ctx.mark_non_differentiable(sum_pi_squared, top_log_prob, top_ids)
        return label_logit - normaliser, entropy, sum_pi_squared, log_prob_at, top_log_prob, top_ids

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_prob, grad_entropy, _, grad_at, *_ = grads
        hidden, weight, bias, labels, normaliser, entropy, at = ctx.saved_tensors
        if grad_log_prob is None and grad_entropy is None and grad_at is None:
            return (None,) * 13
        # The tokens whose log-probs have gradients, and these, (T, K) each.
        picks, grad_picks = labels[:, None], None if grad_log_prob is None else grad_log_prob[:, None]
        if at is not None and grad_at is not None:
            picks = at if grad_picks is None else torch.cat([picks, at], 1)
            grad_picks = grad_at if grad_picks is None else torch.cat([grad_picks, grad_at], 1)
        form = ctx.form
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        row_tiles, vocab_tiles = tiles_of(hidden.shape[0], weight.shape[0], ctx.chunk)
        dtype = ctx.accumulation_dtype
        grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if want_hidden else None
        grad_weight = torch.empty_like(weight) if want_weight else None
        grad_bias = torch.zeros(weight.shape[0], dtype=dtype, device=weight.device) if want_bias else None
        for columns in vocab_tiles:
            grad_columns: Tensor | None = None
            for rows in row_tiles:
                logits = logits_of_tile(hidden[rows], weight[columns], part_of(bias, columns), form, dtype)
                grad_logits = _grad_of_products(
                    logits,
                    normaliser[rows],
                    entropy[rows],
                    picks[rows],
                    columns,
                    None if grad_picks is None else grad_picks[rows],
                    None if grad_entropy is None else grad_entropy[rows],
                    form,
                    ctx.temperature,
                    hidden.dtype if grad_bias is None else dtype,
                )
                if grad_bias is not None:
                    grad_bias[columns] += grad_logits.sum(0)
                    grad_logits = grad_logits.to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] += torch.mm(grad_logits, weight[columns])
                if grad_weight is not None and len(row_tiles) == 1 and hidden.dtype == weight.dtype:
                    torch.mm(grad_logits.t(), hidden[rows], out=grad_weight[columns])
                elif grad_weight is not None:
                    part = torch.mm(grad_logits.t(), hidden[rows])
                    # Several row tiles are summed in the accumulation dtype.
                    grad_columns = part if grad_columns is None else grad_columns.to(dtype).add_(part)
                del logits, grad_logits  # before the next tile's are made
            if grad_weight is not None and grad_columns is not None:
                grad_weight[columns] = grad_columns
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 10,
        )


def _fold_of_group(
    top: Tensor, mass: Tensor, first_moment: Tensor, squared_mass: Tensor, label_logit: Tensor, group: WeightGroup
) -> tuple[Tensor, ...]:
    """Put together what the ranks have folded of their parts of the vocabulary, `(t,)` each. Two small collectives."""
    largest = top.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group.processes)
    shrink = torch.exp(top - largest)
    has_label = ~label_logit.isnan()
    own = torch.where(has_label, label_logit, 0.0)
    sums = torch.stack([mass * shrink, first_moment * shrink, squared_mass * shrink.square(), own, has_label.to(own)])
    dist.all_reduce(sums, group=group.processes)
    mass, first_moment, squared_mass, label, count = sums.unbind()
    return largest, mass, first_moment, squared_mass, torch.where(count > 0, label, torch.nan)


def _picks_of_group(picked: Tensor, group: WeightGroup) -> Tensor:
    """Return logits `(t, K)` that one rank each has found, the others being NaN; NaN where none has. A collective."""
    if not picked.numel():
        return picked
    found = ~picked.isnan()
    sums = torch.stack([torch.where(found, picked, 0.0), found.to(picked)])
    dist.all_reduce(sums, group=group.processes)
    return torch.where(sums[1] > 0, sums[0], torch.nan)


def _top_of_group(logits: Tensor, ids: Tensor, group: WeightGroup) -> tuple[Tensor, Tensor]:
    """Return the largest of all ranks' largest logits and their tokens, `(t, k)` each. Two collectives."""
    if not logits.numel():
        return logits, ids
    size = dist.get_world_size(group.processes)
    parts = []
    for own in (logits, ids):
        of_ranks = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(of_ranks, own.contiguous(), group=group.processes)
        parts.append(torch.cat(of_ranks, 1))
    largest, places = parts[0].topk(logits.shape[1], dim=1)
    return largest, parts[1].gather(1, places)


def part_of(bias: Tensor | None, columns: slice) -> Tensor | None:
    """Return what a vocabulary tile has of a head's bias, if there is one."""
    return None if bias is None else bias[columns]


def _pick(logits: Tensor, tokens: Tensor, columns: slice, out: Tensor) -> None:
    """Write the logits of the tokens `(t, K)` that fall into this vocabulary tile to `out (t, K)`."""
    local = tokens - columns.start
    inside = (local >= 0) & (local < logits.shape[1])
    picked = logits.gather(1, local.clamp(0, logits.shape[1] - 1))
    torch.where(inside, picked, out, out=out)


def _keep_top(logits: Tensor, first: int, top: Tensor, ids: Tensor) -> None:
    """Let the largest logits so far `(t, k)` and their tokens be those with this tile's, whose first token is given."""
    here, places = logits.topk(min(top.shape[1], logits.shape[1]), dim=1)
    largest, chosen = torch.cat([top, here], 1).topk(top.shape[1], dim=1)
    ids.copy_(torch.cat([ids, places + first], 1).gather(1, chosen))
    top.copy_(largest)


def _grad_of_products(
    logits: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    picks: Tensor,
    columns: slice,
    grad_picks: Tensor | None,
    grad_entropy: Tensor | None,
    form: LogitForm,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the products behind one tile's logits, `(t, v)` in `dtype`; may overwrite `logits`."""
    if _has_kernels(logits) and picks.shape[1] == 1:
        from hrl.models.ops.log_prob_kernels import grad_of_tile

        factor, first = form.scale / temperature, columns.start
        ends = (normaliser, entropy, None if grad_picks is None else grad_picks[:, 0], grad_entropy)
        return grad_of_tile(logits, picks[:, 0], first, temperature, factor, form.softcap, *ends, dtype)
    slope = None if form.softcap is None else 1.0 - (logits / form.softcap).square_()
    if temperature != 1.0:
        logits.div_(temperature)
    grad_logits = _grad_of_logits(logits, normaliser, entropy, picks, columns, grad_picks, grad_entropy)
    if slope is not None:
        grad_logits.mul_(slope)
    if form.scale != temperature:
        grad_logits.mul_(form.scale / temperature)
    return grad_logits.to(dtype)


def _grad_of_logits(
    logits: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    picks: Tensor,
    columns: slice,
    grad_picks: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient of one tile's scaled logits, `(t, v)`; may overwrite `logits`."""
    log_p = logits.sub_(normaliser[:, None])
    entropy_part = None
    if grad_entropy is not None:
        entropy_part = torch.exp(log_p).mul_(log_p + entropy[:, None]).mul_(-grad_entropy[:, None])
    if grad_picks is None:
        assert entropy_part is not None  # the caller returned early when all gradients are absent
        return entropy_part
    grad = log_p.exp_().mul_(-grad_picks.sum(1, keepdim=True))
    local = picks - columns.start
    inside = (local >= 0) & (local < grad.shape[1])
    grad.scatter_add_(1, local.clamp(0, grad.shape[1] - 1), torch.where(inside, grad_picks, 0.0))
    return grad if entropy_part is None else grad.add_(entropy_part)
