"""Slices of packed rows on 2 and 4 ranks: what these compute together is what one computes alone.

The ranks are four processes. They run every case as two groups of two and as one group of four, and send the largest
differences from the whole row, which each of them computes too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hrl.models.ops.attention import packed_attention, sliced_attention
from hrl.models.ops.exchange import SequenceGroup, SlicedLayout, to_heads
from hrl.models.ops.layout import AttentionLayout
from hrl.models.packed_model import PackedCausalLM, SlicedMicroBatch, TokenRows, pack_micro_batch
from tests.models.test_packed_model import CPU, FAMILIES, build, rows_of
from tests.models.tiny import run_ranks
from tests.models.trees import tree_batch

pytestmark = pytest.mark.cluster

DEGREES = (2, 4)
#: Query and key heads: as many as the degree, fewer, more, and such that a rank's queries part the group of a key head.
HEADS = ((8, 8), (8, 4), (4, 2), (12, 6), (12, 3), (8, 1))
#: Segments: lengths, parents, prefixes. The last row has fewer tokens than ranks.
ROWS = {
    "sequences": ((5, 3, 9), (0, 0, 0), (0, 0, 0)),
    "a shared prompt": ((7, 3, 1, 4), (0, 0, 0, 0), (0, 7, 7, 7)),
    "a tree": ((6, 4, 3, 2), (0, 0, 1, 2), (0, 3, 5, 8)),
    "one token": ((1,), (0,), (0,)),
}
OPTIONS = {
    "plain": {},
    "a window": {"window": 3},
    "chunks": {"chunk": 4},
    "a cap": {"softcap": 1.5},
    "sinks": {"sinks": True, "window": 4},
}
ATTENTION_CASES = [
    *((row, "plain", heads) for row in ROWS for heads in HEADS),
    *(("a tree", kind, (8, 2)) for kind in OPTIONS),
]
#: Families whose rows with one prompt are run too, beside those that form trees.
WITH_ONE_PROMPT = ("plain", "sinks and windows", "latent attention")
#: Some families compute RoPE and routers in float32, whose products round by the number of rows.
TOLERANCE = 1e-6
EXACT = 1e-12

Found = dict[str, float]


def groups() -> dict[int, SequenceGroup]:
    """By degree, the group of this rank."""
    found = {}
    for size in DEGREES:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("data", "sequence"))
        found[size] = SequenceGroup(mesh["sequence"].get_group(), size, mesh["sequence"].get_local_rank())
    return found


def layout_of(name: str) -> AttentionLayout:
    return AttentionLayout(*map(np.array, ROWS[name]))


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    assert one.shape == other.shape, (one.shape, other.shape)
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-3))


def attended(
    layout: AttentionLayout | SlicedLayout, inputs: list[Tensor], options: dict
) -> tuple[Tensor, list[Tensor]]:
    """The output of attention to a whole row or to this rank's slice of it, and gradients of a weighted sum of it.

    Args:
        layout: Of the row, or of the slice.
        inputs: Query, key, value, weights of the output, and sinks, of the whole row.
        options: Of attention.
    """
    *of_tokens, sinks = (x.clone().requires_grad_() for x in inputs)
    is_sliced = isinstance(layout, SlicedLayout)
    query, key, value, weight = (slice_of(x, layout) if is_sliced else x for x in of_tokens)
    attend = sliced_attention if is_sliced else packed_attention
    given = options | {"scale": 0.4, "sinks": sinks if options.get("sinks") else None}
    out = attend(query, key, value, layout, **given)
    (out * weight.detach()).sum().backward()
    leaves = [*of_tokens[:3], *([sinks] if options.get("sinks") else [])]
    return out.detach(), [leaf.grad for leaf in leaves]


def attention_cases(group: SequenceGroup) -> Found:
    """Outputs and gradients of attention, by row, option and heads."""
    found = {}
    for row, kind, (heads, kv_heads) in ATTENTION_CASES:
        layout = layout_of(row)
        sliced, tokens = SlicedLayout(layout, group), layout.num_tokens
        torch.manual_seed(0)
        shapes = ((tokens, heads, 6), (tokens, kv_heads, 6), (tokens, kv_heads, 4), (tokens, heads, 4), (heads,))
        inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        whole, wanted = attended(layout, inputs, OPTIONS[kind])
        out, grads = attended(sliced, inputs, OPTIONS[kind])
        for grad in grads:  # each rank has the gradients of its tokens, and of its heads' sinks
            dist.all_reduce(grad, group=group.processes)
        error = max(apart(out, slice_of(whole, sliced)), *map(apart, grads, wanted))
        found[f"{row}, {kind}, {heads} heads on {kv_heads}"] = error
    return found


def slice_of(row: Tensor, sliced: SlicedLayout) -> Tensor:
    """This rank's tokens of `(T, ...)`, zeros behind the end."""
    size = sliced.num_tokens
    whole = torch.cat([row, row.new_zeros(size * sliced.group.size - len(row), *row.shape[1:])])
    return whole[sliced.start : sliced.start + size]


def results_and_gradients(
    model: nn.Module, rows: TokenRows, picked: tuple[int, ...], group: SequenceGroup | None, *, is_tree: bool
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs, entropies and sums of squares of a micro-batch, and gradients of a loss of the first two."""
    module = PackedCausalLM(model)
    model.zero_grad()
    packed = pack_micro_batch(rows, picked, share_prefix=True, is_tree=is_tree, wanted="next", device=CPU, group=group)
    assert isinstance(packed, SlicedMicroBatch) is (group is not None)
    results = packed.join(tuple(column for column in module(packed, 0.7, True, True) if column is not None))
    torch.manual_seed(1)
    weights = [torch.randn(len(results[0]), dtype=torch.float64) for _ in range(2)]
    sum((column * weight).sum() for column, weight in zip(results[:2], weights, strict=True)).backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    if group is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=group.processes)
    return [column.detach() for column in results], gradients


def model_cases(degrees: dict[int, SequenceGroup]) -> dict[int, Found]:
    """Log-probs and gradients by family, of rows with one prompt and of rows that form a tree."""
    found: dict[int, Found] = {size: {} for size in degrees}
    rng = np.random.default_rng(0)
    prompt, *responses = (rng.integers(3, 61, n) for n in (7, 6, 9))
    for family in FAMILIES:
        _, model = build(family)
        batches = [("a tree", TokenRows.of(tree_batch(seed=3, num_rows=7, longest=14)), tuple(range(7)))]
        if family in WITH_ONE_PROMPT:
            batches.append(("one prompt", rows_of(prompt, responses), (0, 1)))
        for kind, rows, picked in batches:
            is_tree = kind == "a tree"
            wanted, gradients = results_and_gradients(model, rows, picked, None, is_tree=is_tree)
            for size, group in degrees.items():
                got, of_slices = results_and_gradients(model, rows, picked, group, is_tree=is_tree)
                worst = max(map(apart, got, wanted))
                largest = max(float(gradient.abs().max()) for gradient in gradients.values())
                off = max(float((of_slices[name] - gradients[name]).abs().max()) for name in gradients)
                found[size][f"{family}, {kind}"] = max(worst, off / largest)
    return found


def refusal(group: SequenceGroup) -> str:
    """What is said of heads that can't be shared."""
    query = torch.zeros(1, 6, 2)
    try:
        to_heads(query, query, query, SlicedLayout(layout_of("one token"), group))
    except ValueError as error:
        return str(error)
    return ""


def on_rank(rank: int) -> dict[int, dict[str, Found]]:
    """All cases, by degree."""
    degrees = groups()
    models = model_cases(degrees)
    message = refusal(degrees[4])
    assert "6 query heads can't be shared by the 4 ranks" in message, message
    return {size: {"attention": attention_cases(group), "models": models[size]} for size, group in degrees.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, dict[str, Found]]]:
    folder: Path = tmp_path_factory.mktemp("exchange") / "ranks"
    return run_ranks(4, folder, on_rank)


@pytest.mark.parametrize("degree", DEGREES)
def test_attention_over_slices_is_attention_over_the_row(found, degree):
    for rank, cases in enumerate(found):
        wrong = {case: error for case, error in cases[degree]["attention"].items() if not error <= EXACT}
        assert not wrong, (rank, wrong)
        assert len(cases[degree]["attention"]) == len(ATTENTION_CASES)


@pytest.mark.parametrize("degree", DEGREES)
def test_models_compute_in_slices_what_they_compute_whole(found, degree):
    for rank, cases in enumerate(found):
        wrong = {case: error for case, error in cases[degree]["models"].items() if not error <= TOLERANCE}
        assert not wrong, (rank, wrong)
        assert len(cases[degree]["models"]) == len(FAMILIES) + len(WITH_ONE_PROMPT)
        assert cases[degree]["models"]["plain, a tree"] <= EXACT
