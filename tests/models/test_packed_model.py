"""Log-probs as models make them: packed against the model's own forward, and what is measured of that forward."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, LlamaConfig, LlamaForCausalLM

from hrl.models.head import HeadForm, head_form
from hrl.models.ops import attention, attention_varlen
from hrl.models.ops.attention import ATTENTION_NAME
from hrl.models.ops.log_prob import LogitForm
from hrl.models.packed_model import PackedCausalLM, TokenRows, pack_micro_batch
from hrl.protocol import DataProto
from tests.models.trees import TREE_BATCHES, sequences_of, tree_batch

CPU = torch.device("cpu")
VOCAB = 61
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
#: Config class and fields. Windows and chunks are shorter than the sequences.
FAMILIES = {
    "plain": ("LlamaConfig", {}),
    "head with a bias": ("PhiConfig", {}),
    "logits multiplied": ("CohereConfig", {"logit_scale": 0.25}),
    "logits divided": ("GraniteConfig", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    "logits multiplied under the name that divides": ("HyperCLOVAXConfig", {"logits_scaling": 0.5}),
    "hidden states divided": ("MiniCPM3Config", {**LATENT, "dim_model_base": 16}),
    "soft-caps and windows": (
        "Gemma2Config",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 4,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
        },
    ),
    "sinks and windows": ("GptOssConfig", {**EXPERTS, "head_dim": 8, "sliding_window": 4}),
    "latent attention, first version": ("DeepseekV2Config", {**LATENT, "topk_method": "greedy"}),
    "latent attention": ("DeepseekV3Config", LATENT),
    "chunks in the mask alone": (
        "Llama4TextConfig",
        {**EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "head_dim": 8, "attention_chunk_size": 4},
    ),
    "windows in the mask alone": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    ),
    "a window in the mask, experts with jitter": ("PhimoeConfig", {**EXPERTS, "sliding_window": 4}),
    "a tied head behind learned positions": ("GPT2Config", {}),
}


def build(family: str) -> tuple[nn.Module, nn.Module]:
    """One random model twice, far from uniform, in float64: with its own eager attention, and ready for packed rows."""
    name, fields = FAMILIES[family]
    config = getattr(transformers, name)(**(SMALL | fields))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float64).eval()
    model.set_experts_implementation("eager")  # torch's grouped product has no float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    packed = copy.deepcopy(model)
    packed.set_attn_implementation(ATTENTION_NAME)
    return model, packed


def rows_of(prompt: np.ndarray, responses: list[np.ndarray]) -> TokenRows:
    """Responses to one prompt, all tokens trained."""
    width = max(map(len, responses))
    padded = np.zeros((len(responses), width), np.int64)
    trained = np.zeros((len(responses), width), bool)
    for row, response in enumerate(responses):
        padded[row, : len(response)], trained[row, : len(response)] = response, True
    lengths = np.array([len(response) for response in responses])
    return TokenRows([prompt] * len(responses), padded, lengths, trained)


def own_log_probs(model: nn.Module, prompt: np.ndarray, response: np.ndarray, temperature: float) -> torch.Tensor:
    tokens = torch.from_numpy(np.concatenate([prompt, response]))
    log_p = (model(tokens[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
    return log_p[len(prompt) - 1 : -1].gather(1, tokens[len(prompt) :, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probs_and_gradients_equal_the_models_own(family):
    model, to_pack = build(family)
    module = PackedCausalLM(to_pack)
    rng = np.random.default_rng(0)
    prompt, *responses = (rng.integers(3, VOCAB, n) for n in (7, 6, 9))
    rows = rows_of(prompt, responses)
    want = torch.cat([own_log_probs(model, prompt, response, 0.7) for response in responses])
    weight = torch.randn(len(want), dtype=torch.float64)
    (want * weight).sum().backward()
    for picked in ([(0, 1)], [(0,), (1,)]):
        module.zero_grad()
        packs = [pack_micro_batch(rows, part, share_prefix=True, wanted="next", device=CPU) for part in picked]
        got = torch.cat([module(part, 0.7, True).log_prob for part in packs])
        # Some families (RoPE, routers) compute parts in float32.
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        (got * weight).sum().backward()
        for (name, mine), theirs in zip(to_pack.named_parameters(), model.parameters(), strict=True):
            if theirs.grad is None:
                assert mine.grad is None or not mine.grad.any(), name
            else:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)


def own_results(model: nn.Module, batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the trained tokens, row by row, by the model's own forward of each row alone."""
    rows, log_probs, entropies = TokenRows.of(batch), [], []
    for row, tokens in enumerate(sequences_of(batch)):
        columns = np.flatnonzero(rows.trained[row])
        if not len(columns):
            continue
        places = torch.from_numpy(columns + len(rows.prompts[row]))
        log_p = (model(torch.from_numpy(tokens)[None], use_cache=False).logits[0] / 0.7).log_softmax(-1)[places - 1]
        log_probs.append(log_p.gather(1, torch.from_numpy(tokens)[places][:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def assert_a_tree_equals_plain_forwards(family: str, batch: DataProto, dtype: torch.dtype, rtol: float) -> None:
    """Log-probs, entropies and all gradients, of the whole tree and of the tree in two parts."""
    model, to_pack = (each.to(dtype) for each in build(family))
    module, rows = PackedCausalLM(to_pack), TokenRows.of(batch)
    want = own_results(model, batch)
    weights = [torch.randn(len(want[0]), dtype=dtype) for _ in want]
    sum((column * weight).sum() for column, weight in zip(want, weights, strict=True)).backward()
    count = len(rows.prompts)
    for cut in (count, count // 2):
        module.zero_grad()
        found = []
        for part in (tuple(range(cut)), tuple(range(cut, count))):
            packed = pack_micro_batch(rows, part, share_prefix=True, is_tree=True, wanted="next", device=CPU)
            if not packed.is_empty:
                found.append(module(packed, 0.7, True))
        got = [torch.cat(column) for column in zip(*((one.log_prob, one.entropy) for one in found), strict=True)]
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs.to(mine.dtype), rtol=rtol, atol=rtol)
        sum((column * weight).sum() for column, weight in zip(got, weights, strict=True)).backward()
        for (name, mine), theirs in zip(to_pack.named_parameters(), model.parameters(), strict=True):
            if theirs.grad is None:
                assert mine.grad is None or not mine.grad.any(), name
            else:
                apart = (mine.grad - theirs.grad).norm()
                assert apart <= 10 * rtol * (theirs.grad.norm() + 1), (name, float(apart))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_of_rows_equals_the_models_own_forward_of_each(family):
    # Some families (RoPE, routers) compute parts in float32.
    assert_a_tree_equals_plain_forwards(family, tree_batch(seed=3, num_rows=7, longest=14), torch.float64, 1e-6)


@settings(max_examples=12, deadline=None)
@given(TREE_BATCHES.filter(lambda batch: bool(batch.batch["response_mask"].any())))
def test_any_tree_of_rows_equals_plain_forwards_in_float32(batch):
    assert_a_tree_equals_plain_forwards("plain", batch, torch.float32, 1e-6)


@pytest.mark.parametrize(
    "family, form",
    [
        ("plain", HeadForm(1.0, LogitForm())),
        ("logits multiplied", HeadForm(1.0, LogitForm(0.25))),
        ("logits divided", HeadForm(1.0, LogitForm(0.25))),
        ("logits multiplied under the name that divides", HeadForm(1.0, LogitForm(0.5))),
        ("hidden states divided", HeadForm(0.5, LogitForm())),
        ("soft-caps and windows", HeadForm(1.0, LogitForm(1.0, 2.0))),
    ],
)
def test_the_form_of_a_head_is_measured_without_storage(family, form):
    name, fields = FAMILIES[family]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**(SMALL | fields)))
    assert head_form(model) == form
    assert "forward" not in model.get_output_embeddings().__dict__ and "forward" not in model.base_model.__dict__


def llama_with(forward) -> LlamaForCausalLM:
    """A Llama whose logits pass `forward` on their way out."""

    class Altered(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return forward(self, super().forward, *args, **kwargs)

    return Altered(LlamaConfig(**SMALL))


def changing(change):
    def forward(self, original, *args, **kwargs):
        output = original(*args, **kwargs)
        output.logits = change(output.logits)
        return output

    return llama_with(forward)


def skipping_the_head(self, original, *args, **kwargs):
    return SimpleNamespace(logits=self.model(*args, **kwargs).last_hidden_state @ torch.zeros(32, VOCAB))


@pytest.mark.parametrize(
    "model, message",
    [
        (changing(lambda logits: logits + 1.0), "neither a factor nor a soft-cap"),
        (changing(lambda logits: logits.sigmoid()), "neither a factor nor a soft-cap"),
        (changing(lambda logits: logits[..., :50]), "by applying its head"),
        (changing(lambda logits: logits.index_fill(-1, torch.tensor([3]), -100.0)), "entries of its vocabulary"),
        (changing(lambda logits: logits.no_such_thing), "could not be followed: AttributeError"),
        (llama_with(skipping_the_head), "by applying its head"),
    ],
)
def test_logits_made_in_another_way_are_refused(model, message):
    with pytest.raises(ValueError, match=f"Altered .*{message}"):
        head_form(model)


def test_a_layer_between_hidden_states_and_head_is_refused():
    class Head(nn.Linear):
        pass

    def forward(self, original, *args, **kwargs):
        hidden = self.model(*args, **kwargs).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(nn.functional.gelu(hidden)))

    with pytest.raises(ValueError, match="between its last hidden states and its head"):
        head_form(llama_with(forward))


def test_the_head_still_is_a_head():
    """Whoever calls the model itself, or a copy of it, gets logits as before."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CohereConfig(**SMALL, tie_word_embeddings=False), attn_implementation="eager"
    ).eval()
    ids = torch.arange(3, 9)[None]
    want = model(ids).logits
    module = PackedCausalLM(model)
    assert torch.equal(model(ids).logits, want)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.model.lm_head.weight.mul_(2.0)
    assert torch.equal(twin.model(ids).logits, 2 * want)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernels", "blocks"])
@pytest.mark.parametrize("family", ["plain", "sinks and windows", "soft-caps and windows", "chunks in the mask alone"])
def test_the_host_reads_nothing_of_a_micro_batch(family, kernel, monkeypatch):
    """On a GPU every number that the host reads makes it wait for all queued work. Meta tensors have none to read."""
    if kernel and "soft-cap" in family:
        pytest.skip("torch's kernels have no soft-cap")
    monkeypatch.setattr(attention, "has_kernel", lambda *arguments: kernel)
    monkeypatch.setattr(attention_varlen, "_has_flash_attn", lambda: False)
    _, to_pack = build(family)
    if family == "sinks and windows":
        to_pack.set_experts_implementation("grouped_mm")  # as by default
    module = PackedCausalLM(to_pack.bfloat16().to("meta"))
    rows = rows_of(np.arange(5, 12), [np.arange(7, 16), np.arange(9, 11)])
    packed = pack_micro_batch(rows, (0, 1), share_prefix=True, wanted="next", device=torch.device("meta"))
    statistics = module(packed, 0.7, True, True)
    loss = packed.unpack(statistics.log_prob) * packed.mask + packed.unpack(statistics.entropy)
    assert loss.is_meta and loss.shape == (2, 9)
    loss.sum().backward()
    assert all(parameter.grad is not None for name, parameter in module.named_parameters() if "self_attn" in name)


def test_results_are_spread_over_the_rows_and_their_gradients_gathered():
    rows = rows_of(np.array([5, 6]), [np.array([7, 8, 9]), np.array([7])])
    packed = pack_micro_batch(rows, (0, 1), share_prefix=True, wanted="next", device=CPU)
    flat = torch.arange(1.0, 5.0, requires_grad=True)
    spread = packed.unpack(flat)
    spread.backward(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert spread.tolist() == [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]
    assert flat.grad.tolist() == [1.0, 2.0, 3.0, 4.0]


def packed_log_probs(module: PackedCausalLM, rows: TokenRows, device: str) -> torch.Tensor:
    picked = tuple(range(len(rows.prompts)))
    packed = pack_micro_batch(rows, picked, share_prefix=True, wanted="next", device=torch.device(device))
    return module(packed, 0.7, True).log_prob


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family",
    ["plain", "sinks and windows", "soft-caps and windows", "latent attention", "chunks in the mask alone"],
)
def test_a_gpu_in_bfloat16_is_as_near_to_float64_as_a_cpu(family):
    rng = np.random.default_rng(0)
    rows = rows_of(rng.integers(3, VOCAB, 20), [rng.integers(3, VOCAB, n) for n in (30, 11, 25)])
    _, to_pack = build(family)
    module = PackedCausalLM(to_pack)
    with torch.no_grad():
        truth = packed_log_probs(module, rows, "cpu")
        module.bfloat16()
        on_cpu = (packed_log_probs(module, rows, "cpu") - truth).abs().mean()
        on_gpu = (packed_log_probs(module.cuda(), rows, "cuda").cpu() - truth).abs().mean()
    assert on_gpu <= 2 * on_cpu + 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["plain", "sinks and windows", "soft-caps and windows"])
def test_no_operation_of_a_micro_batch_waits_for_the_gpu(family):
    """By CUDA's own account: its debug mode makes every wait an error."""
    _, to_pack = build(family)
    if family == "sinks and windows":
        to_pack.set_experts_implementation("grouped_mm")  # as by default
    module = PackedCausalLM(to_pack.bfloat16().cuda())
    rows = rows_of(np.arange(5, 12), [np.arange(7, 16), np.arange(9, 11)])
    packed_log_probs(module, rows, "cuda").sum().backward()  # libraries are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = pack_micro_batch(rows, (0, 1), share_prefix=True, wanted="next", device=torch.device("cuda"))
        packed.unpack(module(packed, 0.7, True).log_prob).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
