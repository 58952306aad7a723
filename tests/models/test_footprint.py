"""Sizes from a config alone are those of the model that is loaded."""

import pytest
import torch

from hrl.models.footprint import FootprintError, footprint
from hrl.models.loading import ModelSource, load_causal_lm
from tests.models.tiny import SHAPE, save_llama, save_mixture


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


def test_the_stream_and_the_cache_are_as_wide_as_the_config_says(tmp_path):
    size = footprint(source(save_llama(tmp_path)))
    assert size.stream_bytes_per_token == 2 * SHAPE["hidden_size"]
    assert size.kv_bytes_per_token == 2 * 2 * 2 * SHAPE["num_key_value_heads"] * 8  # keys and values, layers, bytes


def test_a_layer_keeps_at_least_what_its_products_are_made_of(tmp_path):
    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    products = 2 * (4 * hidden + 2 * inner)  # two norms, attention's output, its input; gate and up
    assert products <= footprint(source(save_llama(tmp_path))).kept_bytes_per_token <= 6 * products


def test_experts_count_with_all_their_weights(tmp_path):
    given = source(save_mixture(tmp_path, "mixtral"))
    size = footprint(given)
    assert size.parameters == sum(p.numel() for p in load_causal_lm(given, torch.float32).model.parameters())


def test_a_model_that_can_not_be_followed_is_told(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(FootprintError, match="can't be sized without its weights"):
        footprint(source(tmp_path))
