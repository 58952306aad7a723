"""What is loaded, what is refused, and how much arithmetic it is."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
)

from hrl.models import flops
from hrl.models.dtypes import dtype_of
from hrl.models.flops import ModelFlops, peak_flops, peak_flops_of_card
from hrl.models.loading import load_causal_lm, load_scalar_model
from hrl.models.source import ModelSourceError
from tests.models.tiny import SHAPE, model_config, save_llama

FLOAT32 = torch.float32


def save_classifier(folder, num_labels: int):
    torch.manual_seed(3)
    LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=num_labels, pad_token_id=0)).save_pretrained(folder)
    return folder


def test_the_parameters_have_the_wanted_dtype(llama):
    assert load_causal_lm(model_config(llama), torch.float64).model.dtype == torch.float64


def test_the_structure_alone_has_no_storage(llama):
    loaded = load_causal_lm(model_config(llama), FLOAT32, meta=True)
    assert all(p.is_meta for p in loaded.model.parameters())


def test_a_causal_model_gets_a_value_head_of_zeros(llama):
    loaded = load_scalar_model(model_config(llama), FLOAT32)
    assert loaded.fresh_head and not loaded.model.score.weight.any()


def test_a_classifier_keeps_its_head(tmp_path):
    loaded = load_scalar_model(model_config(save_classifier(tmp_path, 1)), FLOAT32, head_required=True)
    assert not loaded.fresh_head and loaded.model.score.weight.any()


def test_a_reward_model_without_a_head_is_refused(llama):
    with pytest.raises(ValueError, match="no scalar head"):
        load_scalar_model(model_config(llama), FLOAT32, head_required=True)


def test_a_classifier_of_several_labels_is_refused(tmp_path):
    with pytest.raises(ValueError, match="3 labels"):
        load_scalar_model(model_config(save_classifier(tmp_path, 3)), FLOAT32)


def test_config_fields_can_be_overridden_and_unknown_ones_are_named(llama):
    config = model_config(llama, override_config={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert load_causal_lm(config, FLOAT32).model.config.rope_parameters["rope_theta"] == 5e5
    with pytest.raises(ValueError, match="max_positions"):
        load_causal_lm(model_config(llama, override_config={"max_positions": 3}), FLOAT32)


def test_weights_that_are_not_safetensors_are_refused(llama, tmp_path):
    for file in llama.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_text(file.read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_causal_lm(model_config(tmp_path), FLOAT32)


@pytest.mark.parametrize("load", [load_causal_lm, load_scalar_model])
def test_a_folder_without_some_of_its_weights_is_refused(tmp_path, load):
    """transformers would fill them with random numbers and go on."""
    file, lost = save_llama(tmp_path) / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    kept = {name: weight for name, weight in load_file(file).items() if name != lost}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"lacks 1 of its model's weights \({lost}\)"):
        load(model_config(tmp_path), FLOAT32)


def rewrite(folder, change):
    """Change the weights in a folder."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"


def test_a_renamed_weight_is_named_with_the_one_in_its_place(tmp_path):
    rewrite(save_llama(tmp_path), lambda weights: weights.update({"model.layers.1.mlp.w3": weights.pop(UP)}))
    with pytest.raises(ModelSourceError, match=rf"lacks 1 .*\({UP}\) and holds others in their place \(model.*w3\)"):
        load_causal_lm(model_config(tmp_path), FLOAT32)


def test_a_weight_of_another_shape_is_named_with_both(tmp_path):
    rewrite(save_llama(tmp_path), lambda weights: weights.update({UP: torch.zeros(3, 32)}))
    with pytest.raises(ModelSourceError, match=rf"{tmp_path} holds {UP} of shape \(3, 32\).*a model with \(48, 32\)"):
        load_causal_lm(model_config(tmp_path), FLOAT32)


def test_weights_without_a_place_are_told(tmp_path, caplog):
    rewrite(save_llama(tmp_path), lambda weights: weights.update({"model.layers.7.norm": torch.zeros(3)}))
    load_causal_lm(model_config(tmp_path), FLOAT32)
    assert "holds weights that LlamaForCausalLM has no place for (1: model.layers.7.norm)" in caplog.text


def test_a_head_of_its_own_in_a_model_said_to_be_tied_is_refused(tmp_path):
    """transformers would load it on rank 0; the other ranks and vLLM would use the embedding."""
    folder = save_llama(tmp_path, tied=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ModelSourceError, match=r"lm_head.weight of its own.*{tie_word_embeddings: false}"):
        load_causal_lm(model_config(folder), FLOAT32)
    untied = load_causal_lm(model_config(folder, override_config={"tie_word_embeddings": False}), FLOAT32).model
    assert torch.equal(untied.lm_head.weight, load_file(folder / "model.safetensors")["lm_head.weight"])
    rewrite(save_llama(tmp_path, tied=True), lambda weights: None)
    assert load_causal_lm(model_config(tmp_path), FLOAT32).model.lm_head.weight.any()


def test_dtypes_by_name():
    assert dtype_of("bf16") is dtype_of("bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match="float8"):
        dtype_of("float8")


def test_flops_by_hand():
    flops = ModelFlops.of(LlamaForCausalLM(LlamaConfig(**SHAPE)))
    attention = 32 * 8 * (2 * 4 + 2 * 2)  # q and o of 4 heads, k and v of 2
    assert flops.per_token == 2 * 2 * (attention + 3 * 32 * 48)
    assert flops.per_pair == 2 * 2 * 2 * 4 * 8  # two products, two layers, four heads of eight
    assert flops.per_head_token == 2 * 32 * 61
    assert flops.update(10, 5, 3) == 3 * flops.forward(10, 5, 3)


def test_flops_of_a_scalar_model_have_no_head():
    flops = ModelFlops.of(LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1)))
    assert flops.per_head_token == 0
    assert flops.per_token == ModelFlops.of(LlamaForCausalLM(LlamaConfig(**SHAPE))).per_token


def test_flops_of_families_with_other_names_by_hand():
    """GPT-2 and OPT: four square products and an inner layer of four times the width, in each of two layers."""
    layers = 2 * (4 * 32 * 32 + 2 * 32 * 128)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    opt = OPTConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=128, word_embed_proj_dim=32
    )
    for model in (gpt2, OPTForCausalLM(opt)):
        assert ModelFlops.of(model) == ModelFlops(2 * layers, 2 * 2 * 2 * 4 * 8, 2 * 32 * 61)


def deepseek() -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=8,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
    )
    with torch.device("meta"):
        return DeepseekV3ForCausalLM(config)


def test_flops_of_latent_attention_and_experts_by_hand():
    """One dense layer, two of a shared expert and 2 of 8 others; queries are 12 wide and values 6."""
    attention = 32 * 16 + 16 * 4 * 12 + 32 * (12 + 4) + 12 * 4 * (8 + 6) + 4 * 6 * 32
    experts = 32 * 8 + (2 + 1) * 3 * 32 * 8
    flops = ModelFlops.of(deepseek())
    assert flops.per_token == 2 * (3 * attention + 3 * 32 * 48 + 2 * experts)
    assert flops.per_pair == 3 * 2 * 4 * (12 + 6)


def test_what_cannot_be_counted_is_none():
    model = deepseek()
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = None
    model.config.num_experts_per_tok = None
    assert ModelFlops.of(model) is None


def test_the_peak_of_a_cpu_is_measured_once():
    peak = peak_flops(torch.device("cpu"))
    assert peak is not None and peak > 1e8 and peak_flops(torch.device("cpu")) == peak


def test_measuring_a_cpu_draws_nothing_from_the_runs_generator():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    flops._measured_cpu_flops.__wrapped__(1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("faster", ["float32", "bfloat16"])
def test_a_cpus_peak_is_that_of_the_dtype_it_is_faster_in(faster, monkeypatch):
    rates = {torch.float32: 1.0, torch.bfloat16: 1.0} | {getattr(torch, faster): 3.0}
    monkeypatch.setattr(flops, "_product_flops", rates.__getitem__)
    assert flops._measured_cpu_flops.__wrapped__(1) == 3.0


@pytest.mark.parametrize(
    ("card", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A10G", None),
        ("NVIDIA GB200", None),
    ],
)
def test_a_card_is_known_by_whole_words_of_its_name(card, flops):
    assert peak_flops_of_card(card) == flops
