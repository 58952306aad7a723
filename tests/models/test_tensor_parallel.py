"""Models cut over two ranks: what these compute together is what one computes alone, in every family with a plan.

Experts that are shared out to ranks with rows of their own are here too.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hrl.models.adapter import AdapterSource, add_adapter
from hrl.models.ops.attention import ATTENTION_NAME
from hrl.models.ops.expert_parallel import exchanged_experts
from hrl.models.ops.log_prob import LogitForm, token_statistics
from hrl.models.ops.tensor_parallel import WeightGroup
from hrl.models.packed_model import PackedCausalLM, TokenRows, pack_micro_batch
from hrl.models.tensor_parallel import TensorParallelError, require_cuttable
from tests.models.test_packed_model import CPU, LATENT, SMALL
from tests.models.tiny import run_ranks
from tests.models.trees import tree_batch

pytestmark = pytest.mark.cluster

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
#: Config class and fields. The vocabulary of 61 and, in one of them, the MLP's width don't divide.
FAMILIES = {
    "llama": ("LlamaConfig", {"intermediate_size": 47, "mlp_bias": True, "attention_bias": True}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2, one key head": ("Qwen2Config", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "mistral": ("MistralConfig", {"sliding_window": 4}),
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 4, "pad_token_id": 7}),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 8, "norm_topk_prob": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 1}),
    "olmo2": ("Olmo2Config", {}),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {}),
    "glm4": ("Glm4Config", {"head_dim": 8}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
}
#: With an adapter on every linear layer: plain, with a key head for both ranks, with projections whose outputs are
#: gathered and inputs split, and beside experts.
ADAPTED = ("llama", "qwen2, one key head", "phi3", "qwen2_moe")
CASES = (*FAMILIES, *(f"{family} with an adapter" for family in ADAPTED))
#: These models' own norms and routers are computed in float32, where the shares of a gradient round apart.
TOLERANCE = 1e-6
EXACT = 1e-12


def build(family: str) -> nn.Module:
    """A random model far from uniform, in float64, ready for packed rows."""
    family, _, adapter = family.partition(" with an ")
    name, fields = FAMILIES[family]
    config = getattr(transformers, name)(**(SMALL | fields))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")  # torch's grouped product has no float64
    if adapter:
        add_adapter(model, AdapterSource(4, 8, "all-linear", None, False, None, seed=0, merge=False), torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def results_and_gradients(model: nn.Module, group: WeightGroup | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs, entropies and sums of squares of a tree of rows, and gradients of a loss of the first two."""
    module = PackedCausalLM(model)
    if group is not None:
        module.cut(group)
    rows = TokenRows.of(tree_batch(seed=3, num_rows=7, longest=14))
    packed = pack_micro_batch(rows, tuple(range(7)), share_prefix=True, is_tree=True, wanted="next", device=CPU)
    results = module(packed, 0.7, True, True)
    torch.manual_seed(1)
    weights = [torch.randn(len(results[0]), dtype=torch.float64) for _ in range(2)]
    sum((column * weight).sum() for column, weight in zip(results[:2], weights, strict=True)).backward()
    return [column.detach() for column in results[:3]], {n: gradient_of(p, group) for n, p in model.named_parameters()}


def gradient_of(parameter: Tensor, group: WeightGroup | None) -> Tensor:
    """The whole gradient: parts put side by side, or shares added up."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    if group is not None:
        dist.all_reduce(gradient, group=group.processes)
    return gradient


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    assert one.shape == other.shape, (one.shape, other.shape)
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-3))


def family_case(family: str, group: WeightGroup) -> dict[str, float]:
    """How far results and gradients are off, and the share of all weights that a rank has."""
    model = build(family)
    wanted, gradients = results_and_gradients(copy.deepcopy(model), None)
    got, of_parts = results_and_gradients(model, group)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    off = max(float((of_parts[name] - gradients[name]).abs().max()) for name in gradients)
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    share = held / sum(gradient.numel() for gradient in gradients.values())
    return {"results": max(map(apart, got, wanted)), "gradients": off / largest, "share": share}


def head_case(group: WeightGroup, chunk: int, size: int) -> dict[str, float]:
    """A head whose tiles end anywhere, of `size` words, one label outside of them: statistics and gradients."""
    torch.manual_seed(2)
    hidden, weight, bias = (torch.randn(n, dtype=torch.float64) for n in ((9, 6), (size, 6), (size,)))
    labels = torch.cat([torch.arange(8) % size, torch.tensor([size])])
    form, mine = LogitForm(1.5, 2.0), group.part(size)

    def of(part: slice, of_group: WeightGroup | None) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (hidden, weight[part], bias[part])]
        found = token_statistics(
            leaves[0], leaves[1], labels, 0.7, chunk=chunk, with_entropy=True, with_sum_pi_squared=True,
            bias=leaves[2], form=form, first=part.start, group=of_group,
            at=(labels[:, None] + torch.arange(3)) % size, num_top=min(4, size),
        )  # fmt: skip
        (found.log_prob[:-1].sum() + (found.entropy[:-1] ** 2).sum() + (found.log_prob_at**2).sum()).backward()
        return [*(column.detach() for column in found if column is not None), *(leaf.grad for leaf in leaves)]

    wanted, got = of(slice(0, size), None), of(mine, group)
    assert wanted[0][-1].isnan() and got[0][-1].isnan(), "a label outside of the vocabulary has no log-prob"
    wanted[0], got[0] = wanted[0][:-1], got[0][:-1]
    dist.all_reduce(got[6], group=group.processes)
    wanted[7:] = [gradient[mine] for gradient in wanted[7:]]
    return {str(index): apart(*pair) for index, pair in enumerate(zip(got, wanted, strict=True)) if pair[1].numel()}


def fewer_words_case(group: WeightGroup, words: int) -> dict[str, float]:
    """A teacher that is asked for its first words alone, which a rank may have none of."""
    rows = TokenRows.of(tree_batch(seed=3, num_rows=5, longest=10))
    packed = pack_micro_batch(rows, tuple(range(5)), share_prefix=True, is_tree=True, wanted="next", device=CPU)
    packed = replace(packed, labels=packed.labels % words)
    whole, cut = PackedCausalLM(build("llama")), PackedCausalLM(build("llama"))
    cut.cut(group)
    with torch.no_grad():
        wanted, got = (module(packed, 0.7, True, num_top=3, vocabulary=words) for module in (whole, cut))
        hidden = whole.hidden_states(packed)
        logits = nn.functional.linear(hidden, whole.model.lm_head.weight)[:, :words] / 0.7
    by_hand = logits.log_softmax(-1)
    columns = {"label": (wanted.log_prob, by_hand.gather(1, packed.labels[:, None])[:, 0])}
    columns |= {"top": (wanted.top_log_prob, by_hand.topk(3).values), "entropy": (wanted.entropy, got.entropy)}
    columns |= {"of a group": (got.log_prob, wanted.log_prob), "its top": (got.top_log_prob, wanted.top_log_prob)}
    assert torch.equal(got.top_ids, wanted.top_ids) and int(got.top_ids.max()) < words
    return {name: apart(*pair) for name, pair in columns.items()}


def experts_case(family: str, group: WeightGroup) -> dict[str, float]:
    """How far results and gradients are off where each rank has rows of its own and half of the experts."""
    model, wanted = build(family), []
    whole, seeds = PackedCausalLM(copy.deepcopy(model)), (3, 4)
    whole.model.zero_grad()
    for seed in seeds:
        wanted.append(learnt(whole, seed))
    mine = PackedCausalLM(model)
    mine.share_out_experts(group)
    results = learnt(mine, seeds[group.place])
    gradients = {n: p.grad for n, p in whole.model.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    got = {n: gradient_of(p, group) for n, p in model.named_parameters()}
    off = max(float((got[name] - gradients[name]).abs().max()) for name in gradients)
    held = [p.to_local().numel() / p.numel() for p in model.parameters() if isinstance(p, DTensor)]
    return {"results": apart(results, wanted[group.place]), "gradients": off / largest, "share": max(held)}


def crowded_case(group: WeightGroup) -> dict[str, float]:
    """Four experts, of which e multiplies by e + 1: tokens of both ranks that all choose the first two, by hand."""
    torch.manual_seed(group.place)
    states, weights = (torch.randn(3, n, dtype=torch.float64, requires_grad=True) for n in (5, 2))
    factors, calls = torch.arange(1.0, 5.0, dtype=torch.float64)[group.part(4)].requires_grad_(), []

    def compute(tokens: Tensor, experts: Tensor, ones: Tensor) -> Tensor:
        calls.append(len(tokens))
        return tokens * factors[experts] * ones

    chosen = torch.tensor([[0, 1], [1, 0], [0, 1]])
    out = exchanged_experts(compute, states, chosen, weights, num_experts=4, group=group)
    out.sum().backward()
    assert calls == [12 if group.place == 0 else 1], "the second rank has nothing but one token of its own to run"
    wanted = (weights * (chosen + 1)).sum(1, keepdim=True).detach()
    sums = torch.stack([(weights * states.sum(1, keepdim=True) * (chosen == e)).sum() for e in (0, 1)]).detach()
    dist.all_reduce(sums, group=group.processes)
    sums = sums if group.place == 0 else torch.zeros(2, dtype=torch.float64)
    pairs = (out.detach(), wanted * states.detach()), (states.grad, wanted.expand(3, 5)), (factors.grad, sums)
    return {"results": apart(*pairs[0]), "gradients": max(apart(*pair) for pair in pairs[1:]), "share": 0.5}


def learnt(module: PackedCausalLM, seed: int) -> Tensor:
    """Log-probs of some rows, whose sum is differentiated."""
    rows = TokenRows.of(tree_batch(seed=seed, num_rows=5, longest=10))
    packed = pack_micro_batch(rows, tuple(range(5)), share_prefix=True, is_tree=True, wanted="next", device=CPU)
    found = module(packed, 0.7, False).log_prob
    (found**2).sum().backward()
    return found.detach()


def on_rank(rank: int) -> dict[str, dict[str, dict[str, float]]]:
    """All cases of two ranks."""
    group = WeightGroup.of(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))["tensor"])
    heads = {f"{size} words, {chunk} at once": head_case(group, chunk, size) for size, chunk in HEADS}
    heads |= {f"{words} words of 61": fewer_words_case(group, words) for words in FEWER}
    shared = {family: experts_case(family, group) for family in MIXTURES} | {"crowded": crowded_case(group)}
    return {
        "heads": heads,
        "models": {case: family_case(case, group) for case in CASES},
        "experts": shared,
    }


MIXTURES = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3")
#: Words, of which a rank may have none, and logits at once.
HEADS = ((13, 1), (13, 20), (12, 1000), (1, 4))
FEWER = (50, 20)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, dict[str, float]]]]:
    folder: Path = tmp_path_factory.mktemp("tensor") / "ranks"
    return run_ranks(2, folder, on_rank)


@pytest.mark.parametrize("family", CASES)
def test_a_cut_model_computes_what_the_whole_one_computes(found, family):
    for rank in found:
        case = rank["models"][family]
        assert case["results"] <= TOLERANCE and case["gradients"] <= TOLERANCE, case
        assert case["share"] < 0.65, "most weights have to be cut"


def test_tokens_travel_to_experts_of_another_rank_and_back(found):
    for rank in found:
        assert len(rank["experts"]) == len(MIXTURES) + 1
        for name, case in rank["experts"].items():
            assert case["results"] <= TOLERANCE and case["gradients"] <= TOLERANCE, (name, case)
            assert case["share"] == 0.5


def test_the_vocabulary_lies_on_several_ranks(found):
    for rank in found:
        assert len(rank["heads"]) == len(HEADS) + len(FEWER)
        for name, case in rank["heads"].items():
            assert max(case.values()) <= EXACT, (name, case)


@pytest.mark.parametrize(
    ("config", "degree", "what", "hint"),
    [
        (("LlamaConfig", {}), 3, "its 4 attention heads can't be shared by 3 processes", "Set it to one of 1, 2, 4."),
        (
            ("LlamaConfig", {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3}),
            2,
            "its 3 key heads can't be shared by 2 processes",
            "Set it to one of 1, 3, 6.",
        ),
        (("MixtralConfig", {"num_local_experts": 3}), 2, "its 3 experts can't be shared by 2", "Set it to 1."),
        (  # 33 and 32 rows, on four of the eight processes each: 9 and 8
            ("LlamaConfig", {"vocab_size": 65}),
            2,
            "the 65 rows of its vocabulary can't be shared by 2 processes whose parts lie on 4 each",
            "Set it to one of 1, 4; or fsdp_size, the number of processes that share a copy of the model, to 4.",
        ),
        (("GPT2Config", {}), 2, "gpt2 has no tensor-parallel plan", "Set it to 1: FSDP2 shards every model."),
    ],
)
def test_a_model_that_can_not_be_cut_is_refused_by_what_it_has(config, degree, what, hint):
    name, fields = config
    model = getattr(transformers, name)(**(SMALL | fields))
    with pytest.raises(TensorParallelError, match=what) as refused:
        require_cuttable(model, degree, 8)
    assert refused.value.hint == hint
    require_cuttable(model, 1, 8)
    require_cuttable(transformers.LlamaConfig(**SMALL), 2, 8)  # 31 and 30 rows: 8 at most, of both
