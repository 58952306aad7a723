"""Frequencies of LongRoPE and dynamic RoPE follow the run's longest sequence, never a row's neighbours."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from hrl.models.ops.rope import fix_rope_frequencies

SHORT, LONG = [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]
PRETRAINED, LONGEST = 16, 64


def longrope() -> torch.nn.Module:
    rope = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "rope_theta": 10_000.0}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64, "pad_token_id": 0}
    lengths = {"max_position_embeddings": LONGEST, "original_max_position_embeddings": PRETRAINED}
    return Phi3RotaryEmbedding(Phi3Config(**sizes, **lengths, rope_parameters=rope))


def dynamic() -> torch.nn.Module:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": PRETRAINED}
    return LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=rope))


def frequencies(module: torch.nn.Module, longest_position: int) -> torch.Tensor:
    """`(4,)`: the angle at position 1, of a row whose longest sequence ends at `longest_position`."""
    cos, sin = module(torch.zeros(1), torch.tensor([[0, 1, longest_position]]))
    assert cos.shape == (1, 3, 8)
    return torch.atan2(sin[0, 1, :4], cos[0, 1, :4])


@pytest.mark.parametrize("make", [longrope, dynamic])
def test_without_it_a_neighbour_would_change_the_frequencies(make):
    module = make()
    assert not torch.allclose(frequencies(module, 3), frequencies(module, 40))


@pytest.mark.parametrize("make", [longrope, dynamic])
@pytest.mark.parametrize("max_length", [PRETRAINED, LONGEST])
def test_no_neighbour_changes_the_frequencies(make, max_length):
    """Whatever came before: both kinds remember the longest sequence that they have seen."""
    module = make()
    fix_rope_frequencies(module, max_length)
    expected = frequencies(module, 3)
    for longest in (max_length - 1, 2, max_length - 1, 3):
        assert torch.equal(frequencies(module, longest), expected)


@pytest.mark.parametrize(("max_length", "factors"), [(PRETRAINED, SHORT), (PRETRAINED + 1, LONG), (LONGEST, LONG)])
def test_longrope_is_long_where_the_run_is_longer_than_the_pretraining(max_length, factors):
    """vLLM's rule: max_model_len > original_max_position_embeddings. Frequency i is 1 / (factor * theta^(2i/8))."""
    module = longrope()
    fix_rope_frequencies(module, max_length)
    by_hand = 1 / (torch.tensor(factors) * 10_000.0 ** (torch.arange(0, 8, 2) / 8))
    assert torch.allclose(frequencies(module, 2), by_hand, rtol=1e-5)


def test_dynamic_rope_within_the_models_positions_is_plain_rope():
    """vLLM computes its table once, for max_position_embeddings, at which the base is theta itself."""
    module = dynamic()
    fix_rope_frequencies(module, PRETRAINED)
    assert torch.allclose(frequencies(module, 5), 10_000.0 ** -(torch.arange(0, 8, 2) / 8), rtol=1e-5)


def test_a_rope_that_depends_on_nothing_is_left_alone():
    module = LlamaRotaryEmbedding(LlamaConfig(hidden_size=32, num_attention_heads=4))
    before = module.forward
    fix_rope_frequencies(module, LONGEST)
    assert module.forward == before
