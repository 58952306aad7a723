"""Sizes from a config alone are those of the model that is loaded."""

from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV3Config

from hrl.models.adapter import AdapterSource, add_adapter, is_part
from hrl.models.footprint import FootprintError, footprint
from hrl.models.loading import ModelSource, load_causal_lm
from tests.models.tiny import SHAPE, save_gemma3, save_llama, save_mixture


def source(folder):
    return ModelSource(str(folder), {}, True, share_prefix=True, trust_remote_code=False, max_model_len=64)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_once(tmp_path, tied):
    given = source(save_llama(tmp_path, tied=tied))
    size = footprint(given)
    model = load_causal_lm(given, torch.float32).model
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.embedding == SHAPE["vocab_size"] * SHAPE["hidden_size"]
    assert size.head == (0 if tied else size.embedding)
    assert size.largest_layer == sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert (size.num_layers, size.vocab_size) == (2, SHAPE["vocab_size"])


def test_what_optimizers_take_at_once_is_the_largest_of_its_kind(tmp_path):
    given = source(save_llama(tmp_path / "llama"))
    size, hidden, inner = footprint(given), SHAPE["hidden_size"], SHAPE["intermediate_size"]
    assert size.largest_tensor == size.embedding > size.largest_matrix == hidden * inner
    assert (size.shorter_side, size.largest_stack) == (min(hidden, inner), 0)
    adapter = AdapterSource(4, 8, ("q_proj", "down_proj"), None, False, None, seed=0, merge=False)
    beside = footprint(replace(given, adapter=adapter))
    assert beside.largest_tensor == beside.largest_matrix == 4 * max(hidden, inner) and beside.shorter_side == 4
    mixture = source(save_mixture(tmp_path / "mixture", "qwen3_moe"))
    stacks = [p for p in load_causal_lm(mixture, torch.float32).model.parameters() if p.dim() == 3]
    assert footprint(mixture).largest_stack == max(p.numel() for p in stacks) > 0


def test_the_stream_and_the_cache_are_as_wide_as_the_config_says(tmp_path):
    size = footprint(source(save_llama(tmp_path)))
    assert size.stream_bytes_per_token == 2 * SHAPE["hidden_size"]
    assert size.kv_bytes_per_token == 2 * 2 * 2 * SHAPE["num_key_value_heads"] * 8  # keys and values, layers, bytes
    assert [size.cache_share(ranks) for ranks in (1, 2, 4)] == [1.0, 0.5, 0.5]  # two heads


def test_a_stream_in_float32_is_twice_as_wide_where_only_sums_and_norms_touch_it(tmp_path):
    size, other = footprint(source(save_llama(tmp_path / "llama"))), footprint(source(save_gemma3(tmp_path / "gemma")))
    assert size.wide_stream_bytes_per_token == 2 * size.stream_bytes_per_token
    assert size.wide_kept_bytes_per_token >= size.kept_bytes_per_token + 2 * 2 * SHAPE["hidden_size"]  # two norms
    assert other.wide_stream_bytes_per_token == other.stream_bytes_per_token


def test_a_layer_keeps_at_least_what_its_products_are_made_of(tmp_path):
    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    products = 2 * (4 * hidden + 2 * inner)  # two norms, attention's output, its input; gate and up
    assert products <= footprint(source(save_llama(tmp_path))).kept_bytes_per_token <= 6 * products


def test_a_tower_that_text_does_not_pass_counts_in_the_parameters_alone(tmp_path):
    size = footprint(source(save_gemma3(tmp_path)))
    assert size.num_layers == 2
    assert size.kv_bytes_per_token == 2 * 2 * 2 * SHAPE["num_key_value_heads"] * 8


def test_an_adapter_counts_as_it_is_trained_and_none_of_it_is_in_a_tower(tmp_path):
    path = save_gemma3(tmp_path)
    adapter = AdapterSource(4, 8, "all-linear", None, False, None, seed=0, merge=False)
    given = replace(source(path), adapter=adapter)
    model = load_causal_lm(given, torch.float32).model
    add_adapter(model, adapter, torch.float32)
    parts = {name: part.numel() for name, part in model.named_parameters() if is_part(name)}
    assert parts and not any("vision" in name for name in parts)
    assert footprint(given).adapter == sum(parts.values())


def test_latent_attention_caches_one_vector_for_all_heads(tmp_path):
    latent = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
    DeepseekV3Config(**SHAPE | latent | experts | {"num_key_value_heads": 4}).save_pretrained(tmp_path)
    assert footprint(source(tmp_path)).kv_bytes_per_token == 2 * 2 * (16 + 4)  # bytes, layers
    assert footprint(source(tmp_path)).cache_share(8) == 1.0


def test_experts_count_with_all_their_weights(tmp_path):
    given = source(save_mixture(tmp_path, "mixtral"))
    size = footprint(given)
    assert size.parameters == sum(p.numel() for p in load_causal_lm(given, torch.float32).model.parameters())


def test_a_model_that_can_not_be_followed_is_told(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(FootprintError, match="can't be sized without its weights"):
        footprint(source(tmp_path))
